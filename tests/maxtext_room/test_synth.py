"""Models of noise: the same bits for a seed, the arrays that a family asks for; and models of two others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.hf_models import write_llama
from support.internals import to_maxtext
from support.locations import DOCS, GOLDEN, GOLDEN_0_2_5, HF, TRAINED
from support.pages import run_page
from support.stored_trees import contents
from support.trees import tree_of

import ckpttools
from ckpttools import CheckpointError, ConfigError, CoverageError, ShapeError, ToMaxText, UsageError
from ckpttools.array.nodes import seeded_noise
from ckpttools.maxtext.synthetic import stitch_models, synthetic_model
from ckpttools.testing.strategies import regions, shapes

MASK = (1 << 64) - 1
VISION = GOLDEN_0_2_5 / "qwen3-vl/hf"


def mixed(number: int) -> int:
    """splitmix64's output for a counter, as its author writes it."""
    z = number * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@settings(max_examples=25)
@given(st.data(), shapes(max_rank=4, limit=300), st.integers(0, 9))
def test_noise_regions_match_the_formula(data, shape, seed):
    array = seeded_noise(shape, seed, "w", 0.02)
    numbers = [mixed(array.key + k & MASK) for k in range(array.size)]
    sums = [sum(number >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070 for number in numbers]
    truth = (np.array(sums, np.float32) * np.float32(0.02 / 37837.22)).reshape(shape)
    region = data.draw(regions(shape))
    assert np.array_equal(array.read(region), truth[region.slices])


def test_random_weights_have_the_declared_deviation():
    values = seeded_noise((300, 400), 0, "w", 0.02).read().astype(np.float64)
    assert abs(values.std() / 0.02 - 1) < 0.01 and abs(values.mean()) < 0.0003
    other = seeded_noise((300, 400), 1, "w", 0.02).read()
    assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.01
    # Neighbors along each axis have nothing in common, either.
    assert abs(np.corrcoef(values[1:].ravel(), values[:-1].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(values[:, 1:].ravel(), values[:, :-1].ravel())[0, 1]) < 0.01


MODELS = sorted([*GOLDEN.glob("*/hf"), *GOLDEN_0_2_5.glob("*/hf")])


@pytest.mark.parametrize("hf", MODELS, ids=lambda location: location.parent.name)
def test_synthetic_arrays_match_every_family(hf):
    tree = ckpttools.open(hf)
    built = synthetic_model(tree.metadata.config)
    known = {path: item.shape for path, item in built.arrays.items()}
    if "quantization_config" not in tree.metadata.config:
        assert {path: item.shape for path, item in tree.arrays.items() if path in known} == known
    left_out = any("towers are left out" in remark for remark in built.metadata.notes.remarks)
    to_maxtext(built, ToMaxText(scan=False, leaves_out=True, text_only=left_out))


def test_model_with_omitted_towers_is_converted(tmp_path):
    ckpttools.synth(GOLDEN / "gemma3/hf", tmp_path / "out", names="maxtext")
    assert ckpttools.verify(tmp_path / "out", GOLDEN / "gemma3/hf", cast=True).arrays


def test_omitted_towers_are_removed_from_the_config(tmp_path):
    declared = run("synth", GOLDEN / "gemma3/hf", tmp_path / "out")
    assert "towers are left out" in declared and "only the text model is written" in " ".join(
        declared.split()
    )
    built = ckpttools.open(tmp_path / "out")
    assert (
        built.metadata.config["model_type"] == "gemma3_text" and "vision_config" not in built.metadata.config
    )
    assert not ckpttools.doctor(tmp_path / "out").findings
    run("convert", "hf-to-maxtext", tmp_path / "out", tmp_path / "maxtext")
    whole = ckpttools.open(GOLDEN / "gemma3/hf").arrays
    text = [array.shape for (name,), array in whole.items() if name.startswith("language_model.")]
    assert sorted(item.shape for item in built.arrays.values()) == sorted(text)


def test_norms_are_identities_and_biases_are_zero():
    built = synthetic_model(ckpttools.open(GOLDEN / "qwen2.5/hf").metadata.config)
    assert set(built["model.norm.weight"].read().tolist()) == {1.0}
    assert not built["model.layers.0.self_attn.q_proj.bias"].read().any()
    # What Gemma stores is added to 1.
    assert (
        not synthetic_model(ckpttools.open(GOLDEN / "gemma2/hf").metadata.config)["model.norm.weight"]
        .read()
        .any()
    )


def test_equal_seeds_give_equal_files(tmp_path):
    for name, words in (("a", ["--jobs", 1]), ("b", ["--jobs", 4, "--memory", "110MiB"])):
        run("synth", HF / "config.json", tmp_path / name, "--to", "orbax", *words)
    run("synth", HF, tmp_path / "c", "--seed", 1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert ckpt("diff", tmp_path / "a", tmp_path / "c").exit_code == 1
    run("plan", "synth", HF, tmp_path / "d", "--to", "orbax", "-o", tmp_path / "plan")
    run("run", tmp_path / "plan", "--part", "0/1")
    run("run", tmp_path / "plan", "--publish")
    assert ckpt("diff", tmp_path / "a", tmp_path / "d").exit_code == 0


@pytest.mark.parametrize(
    ("model", "declared", "error", "why"),
    [
        ("qwen3-moe", {"decoder_sparse_step": 2}, ConfigError, "describes other arrays than the rows"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, ConfigError, "mlp_only_layers"),
        ("qwen3", {"attention_bias": True}, ConfigError, "attention_bias"),
        ("llama3.1", {"num_hidden_layers": 10**30}, ShapeError, "implausibly large number of arrays"),
        ("llama3.1", {"num_hidden_layers": 0}, CheckpointError, "."),
        ("llama3.1", {"initializer_range": float("nan")}, ConfigError, "initializer_range"),
        ("llama3.1", {"initializer_range": "0.02"}, ConfigError, "initializer_range"),
        ("llama3.1", {"initializer_range": -1}, ConfigError, "initializer_range"),
    ],
)
def test_unsupported_configs_are_refused(model, declared, error, why):
    config = {**json.loads((GOLDEN / model / "hf/config.json").read_text()), **declared}
    with pytest.raises(error, match=why):
        synthetic_model(config)


def test_config_of_an_existing_model_is_accepted(tmp_path):
    (tmp_path / "mine.json").write_bytes((HF / "config.json").read_bytes())
    for words in ([], ["--as", "maxtext"]):
        run("synth", tmp_path / "mine.json", tmp_path / f"noise{len(words)}", *words)
    assert ckpt("synth", tmp_path / "mine.json", tmp_path).exit_code == 2
    assert ckpt("synth", tmp_path / "noise0", tmp_path / "noise0/x").exit_code == 2


def test_quantized_config_yields_plain_weights(tmp_path):
    run("synth", GOLDEN_0_2_5 / "qwen3.5-fp8/hf", tmp_path / "made")
    assert "quantization_config" not in json.loads((tmp_path / "made/config.json").read_text())
    assert {array.dtype.name for array in ckpttools.open(tmp_path / "made").arrays.values()} == {"bfloat16"}


def test_decoder_is_accepted_with_or_without_towers(tmp_path):
    run("stitch", VISION, _noise(tmp_path), tmp_path / "both")
    one, other, built = map(ckpttools.open, (VISION, tmp_path / "noise", tmp_path / "both"))
    assert built.keys() == one.keys() == other.keys()
    for path, array in built.arrays.items():
        expected = one if ".visual." in path[0] else other
        assert array.read().tobytes() == expected[path].read().tobytes(), path
    whole = {name: to_maxtext(tree, ToMaxText(scan=False)).state for name, tree in (("a", one), ("b", other))}
    again = stitch_models(*(item.with_metadata(location="") for item in whole.values()))
    expected = to_maxtext(built, ToMaxText(scan=False)).state
    assert all(
        again[path].read().tobytes() == item.read().tobytes() for path, item in expected.arrays.items()
    )


def _noise(directory: Path) -> Path:
    run("synth", VISION, directory / "noise", "--seed", 5)
    return directory / "noise"


def test_incompatible_decoders_are_refused_or_reported():
    one = ckpttools.open(VISION)

    def with_text(**declared):
        config = one.metadata.config
        return one.with_metadata(config={**config, "text_config": {**config["text_config"], **declared}})

    with pytest.raises(ConfigError, match="same shape into different heads"):
        stitch_models(one, with_text(num_attention_heads=8, head_dim=8, num_key_value_heads=4))
    told = stitch_models(one, with_text(rms_norm_eps=1e-5)).metadata.notes.remarks
    assert any("rms_norm_eps is 1e-06, and 1e-05 in the decoder's" in item for item in told)
    assert not any("decoder's" in remark for remark in stitch_models(one, one).metadata.notes.remarks)


def test_mismatched_models_are_not_stitched():
    vision, text = ckpttools.open(VISION), ckpttools.open(HF)
    with pytest.raises(CoverageError, match="the text models do not match"):
        stitch_models(vision, text)
    with pytest.raises(UsageError, match="has no towers"):
        stitch_models(text, text)
    with pytest.raises(UsageError, match="moments of one model"):
        stitch_models(ckpttools.open(TRAINED), ckpttools.open(TRAINED))
    with pytest.raises(UsageError, match="convert one of them first"):
        stitch_models(vision, tree_of(("params", "params", "decoder", "layers", "w")))


def test_synth_page_is_correct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(Path("hf/llama"))
    run("convert", "hf-to-maxtext", "hf/llama", "maxtext/llama")
    for name in ("vision", "text"):
        Path(name).symlink_to(VISION.parent)
    run_page("shrink.md")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "shrink.md").read_text(), re.DOTALL)
    exec(block, {})
    assert ckpttools.open("small-maxtext").metadata.custom["scan_layers"] is True
