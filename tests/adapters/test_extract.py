"""What a fine-tuning changed, as an adapter: the SVD of each difference."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import run
from support.hf_models import write_llama
from support.locations import FIXTURES
from support.trees import lazy

import ckpttools
from ckpttools import DTYPES, CheckpointError, MemoryBudgetError, SourceChangedError, UsageError
from ckpttools.adapters.bases import open_base
from ckpttools.adapters.extract import ExtractOptions, extract_low_rank, ranked_spectrum, spectrum

PEFT = FIXTURES / "peft"
BASE = PEFT / "bases" / "llama-float32"
NAME = "model.layers.1.mlp.down_proj.weight"


def matrices(decay):
    """Return two matrices, and the singular values of their difference, which decay."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((n, 60)))[0] for n in (90, 70))
    values = np.exp(-np.arange(60) / decay)
    base = random.standard_normal((90, 70)).astype("f4")
    return lazy((base + left * values @ right.T).astype("f4")), lazy(base), values


def test_spectrum_matches_the_largest_singular_values():
    tuned, base, values = matrices(5)
    result = spectrum(tuned, base, 8)
    assert np.allclose(result.values, values[:8], rtol=1e-4)
    least = np.sqrt((values[8:] ** 2).sum() / (values**2).sum())
    difference = tuned.read().astype("f8") - base.read()
    left = np.linalg.norm(difference - result.left @ result.right) / np.linalg.norm(difference)
    assert left == pytest.approx(result.error(8), rel=1e-6) and least <= left < 1.01 * least


@pytest.mark.parametrize("error", [0.5, 0.05, 0.001])
def test_ranked_spectrum_meets_the_error_limit(error):
    tuned, base, values = matrices(8)
    result = ranked_spectrum(tuned, base, error, 90)
    left = [np.sqrt((values[k:] ** 2).sum() / (values**2).sum()) for k in range(61)]
    expected = next(k for k in range(61) if left[k] <= error)
    assert result.error(len(result.values)) <= error and expected <= len(result.values) <= expected + 1
    assert len(ranked_spectrum(tuned, base, error, 3).values) == min(3, expected)


def test_extract_recovers_a_merged_adapter(tmp_path):
    ckpttools.merge_adapter(BASE, tmp_path / "tuned", adapter=PEFT / "plain")
    told = run("adapter", "extract", tmp_path / "tuned", BASE, tmp_path / "adapter", "--rank", "2")
    told = " ".join(told.split())
    assert (
        "14 arrays" in told
        and "; 0.00% of the difference is lost in the worst matrix, " in told
        and "ranks" not in told
    )
    assert "because its name on the Hub is unknown; set it with --base-name NAME" in told
    ckpttools.merge_adapter(BASE, tmp_path / "again", adapter=tmp_path / "adapter")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "again"))
    for name, array in one.items():
        assert np.allclose(two[name], array, atol=1e-6), name
    result = ckpttools.inspect(tmp_path / "adapter").adapter
    assert (result.ranks, result.alpha, result.base_model) == ({2: 14}, 2, str(BASE))


def test_extract_from_maxtext_meets_error_limit(tmp_path):
    """Each matrix gets the rank that it needs, and an alpha of the same ratio."""
    ckpttools.merge_adapter(BASE, tmp_path / "tuned", adapter=PEFT / "patterns")
    ckpttools.hf_to_maxtext(tmp_path / "tuned", tmp_path / "maxtext")
    ckpttools.extract_adapter(
        tmp_path / "maxtext", tmp_path / "adapter", base=BASE, error=0.001, base_name="me/base"
    )
    result = ckpttools.inspect(tmp_path / "adapter").adapter
    assert result.ranks == {1: 1, 2: 7, 3: 2} and result.base_model == "me/base"
    declared = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert declared["rank_pattern"] and declared["alpha_pattern"] == declared["rank_pattern"]
    ckpttools.merge_adapter(BASE, tmp_path / "again", adapter=tmp_path / "adapter")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "again"))
    for name, array in one.items():
        assert np.allclose(two[name], array, atol=1e-4), name


def test_changed_non_matrices_are_named(tmp_path):
    write_llama(tmp_path / "base", num_hidden_layers=2, dtype="float32")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors[NAME] = tensors[NAME] + 1
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write_llama(tmp_path / "tuned", num_hidden_layers=2, dtype="float32")
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    words = ("adapter", "extract", tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter")
    told = " ".join(run(*words, "--rank", "1", "--dtype", "bfloat16").split())
    assert "not layer matrices: 1 array (model.norm.weight)" in told
    built = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert list(built) == [f"base_model.model.{NAME[:-7]}.lora_{x}.weight" for x in "AB"]
    declared = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert declared["target_modules"] == [NAME[:-7]], "layer 0 has none"


def test_impossible_extractions_are_refused(tmp_path):
    with pytest.raises(UsageError, match="neither a rank nor an error"):
        ckpttools.extract_adapter(BASE, tmp_path / "out", base=BASE)
    with pytest.raises(UsageError, match="no matrix of a linear layer differs"):
        ckpttools.extract_adapter(BASE, tmp_path / "out", base=BASE, rank=1)
    with pytest.raises(CheckpointError, match="do not have the same weights"):
        ckpttools.extract_adapter(PEFT / "bases" / "gpt-oss-float32", tmp_path / "out", base=BASE, rank=1)
    ckpttools.merge_adapter(BASE, tmp_path / "tuned", adapter=PEFT / "plain")
    tensors = load_file(tmp_path / "tuned" / "model.safetensors")
    tensors[NAME][0, 0] = np.nan
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        ckpttools.extract_adapter(tmp_path / "tuned", tmp_path / "out", base=BASE, rank=1)


def test_oversized_factors_are_refused(monkeypatch, tmp_path):
    from ckpttools import DTYPES
    from ckpttools.adapters.bases import open_base
    from ckpttools.adapters.extract import ExtractOptions, extract_low_rank

    ckpttools.merge_adapter(BASE, tmp_path / "tuned", adapter=PEFT / "plain")
    tuned, base = (open_base(ckpttools.open(location)) for location in (tmp_path / "tuned", BASE))
    options = ExtractOptions(2, None, DTYPES["float32"])
    assert extract_low_rank(tuned, base, options, 1 << 20).nbytes < 1 << 20
    with pytest.raises(MemoryBudgetError, match="factors do not fit"):
        extract_low_rank(tuned, base, options, 1000)


def test_model_changed_during_extraction_is_refused(tmp_path):
    """Factors are computed while planning, so the models are not read again later."""

    class Meddling(ExtractOptions):
        def spectrum(self, tuned, base, name):
            os.utime(tmp_path / "tuned/model.safetensors", (1, 1))
            return super().spectrum(tuned, base, name)

    ckpttools.merge_adapter(BASE, tmp_path / "tuned", adapter=PEFT / "plain")
    tuned, base = (open_base(ckpttools.open(path)) for path in (tmp_path / "tuned", BASE))
    with pytest.raises(SourceChangedError, match="was changed while it was read"):
        extract_low_rank(tuned, base, Meddling(2, None, DTYPES["float32"]), 1 << 30)


def test_copied_output_head_is_ignored(tmp_path):
    """FSDP and DeepSpeed save the head of tied models, but the base has only the table."""
    for name in ("base", "tuned"):
        write_llama(tmp_path / name, num_hidden_layers=2, dtype="float32", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors[NAME] = tensors[NAME] + 1
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    for one, two in (("tuned", "base"), ("base", "tuned")):
        ckpttools.extract_adapter(tmp_path / one, tmp_path / f"of-{one}", base=tmp_path / two, rank=1)
        assert ckpttools.inspect(tmp_path / f"of-{one}").adapter.targets == {"down_proj": 1}
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: not in the base"):
        ckpttools.extract_adapter(tmp_path / "tuned", tmp_path / "out", base=tmp_path / "base", rank=1)
