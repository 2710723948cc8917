"""Compare doctor and convert with transformers on randomly damaged model directories.

`tests/damage/verdicts.json` records the verdict of transformers for each seed. `make damage` records them
again, where transformers is installed, and tries all of them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, succeed

import ckpttools
from damage.models import BASES, Model, base, damaged
from damage.verdicts import digest, verdict

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).parents[1].joinpath("damage").joinpath("verdicts.json").read_bytes()
)
SEEDS = [int(item) for item in RECORDED if item.isdecimal()]
IS_ALL = os.environ.get("CKPTTOOLS_DAMAGE") == "all"


def digest_of(model: Model) -> str:
    return digest({name: values for tensors in model.shards.values() for name, values in tensors.items()})


def converted(source: Path, scratch: Path) -> tuple[int, str, Path]:
    """Convert a model to MaxText and back. Returns the exit code, the output and the final location."""
    there = ckpt("convert", "hf-to-maxtext", source, scratch / "maxtext", "--no-progress")
    if there.exit_code == 0:
        words = "--dtype", "float32", "--no-progress"
        there = ckpt("convert", "maxtext-to-hf", scratch / "maxtext", scratch / "back", *words)
    return there.exit_code, there.output, scratch / "back"


def loaded(directory: Path) -> str:
    """Return the digest of the weights of a model that ckpt wrote."""
    arrays = ckpttools.open(directory).arrays
    return digest({".".join(path): array.read() for path, array in arrays.items()})


def check_doctor(model: Model, result: dict[str, Any], source: Path) -> None:
    """If transformers refuses a model or warns, doctor names the damage."""
    complaints = [f"{what}: {result[what]}" for what in ("why", "tokenizer", "generation") if what in result]
    outcome = ckpt("doctor", source)
    has_weights = any(name.endswith(".safetensors") for name in (*model.shards, *model.files))
    assert outcome.exit_code in ((0, 1) if has_weights else (1, 3)), outcome.output
    if not complaints:
        return
    assert "configuration OK" not in outcome.output, complaints
    text = "".join(outcome.output.split())
    words = [word for item in model.words for word in item if word]
    assert any("".join(word.split()) in text for word in words), (complaints, words, outcome.output)


def check_conversion(model: Model, result: dict[str, Any], source: Path, scratch: Path) -> None:
    """If ckpt converts a model, converting it back gives the values that transformers loads."""
    code, output, back = converted(source, scratch)
    assert code in (0, 2, 3), output
    if code == 0:
        # Where transformers refuses, for its own files, the values are those without damage.
        expected = result.get("digest") or digest_of(base(*model.made_of))
        assert loaded(back) == expected, (result, output)


def check(seed: int, result: dict[str, Any]) -> None:
    model = damaged(seed)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = scratch / "model"
        model.write(source)
        try:
            check_doctor(model, result, source)
            check_conversion(model, result, source, scratch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {model.made_of}: {model.damage}: {error}") from error


@pytest.mark.skipif(IS_ALL, reason="all are tried")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(SEEDS))
def test_doctor_and_convert_agree_with_transformers(seed):
    check(seed, RECORDED[str(seed)])


@pytest.mark.parametrize("seed", SEEDS if IS_ALL else [])
def test_doctor_and_convert_agree_with_transformers_on_every_seed(seed):
    check(seed, RECORDED[str(seed)])


def test_recorded_verdicts_cover_every_kind():
    kinds = Counter(RECORDED[str(seed)]["model"] for seed in SEEDS)
    assert min(kinds[item] for item in ("loaded", "warned", "refused")) >= 50, kinds
    assert len(SEEDS) >= 500


@pytest.mark.parametrize(("name", "shards"), BASES)
def test_models_without_damage_are_healthy(tmp_path, name, shards):
    model = base(name, shards)
    model.write(tmp_path / "model")
    assert "structure and configuration OK" in ckpt("doctor", tmp_path / "model").output
    code, output, back = converted(tmp_path / "model", tmp_path)
    assert code == 0, output
    assert loaded(back) == digest_of(model)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_recorded_verdicts_match_transformers(tmp_path, seed):
    pytest.importorskip("torch", reason="the extra `transformers` is not installed")
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    damaged(seed).write(tmp_path / "model")
    result, recorded = verdict(tmp_path / "model"), RECORDED[str(seed)]
    assert (result["model"], result.get("digest")) == (recorded["model"], recorded.get("digest"))


class TestChecks:
    """Checks that were added for damage, each with about ten variations."""

    def reported(self, directory: Path, check: str) -> list[dict[str, Any]]:
        result = json.loads(ckpt("doctor", directory, "--json").output)["findings"]
        return [item for item in result if item["check"] == check]

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"null", b"<html>", b'{"a": 1', b"\xff\xfe{}", b"{}x"]
    )
    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    def test_damaged_sidecar_json_is_reported(self, tmp_path, name, content):
        model = base("llama", 1)
        model.files[name] = content
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "sidecar-json")
        assert result["level"] == "error" and name in result["what"]
        # MaxText does not read it, and what is written for transformers must load there.
        succeed("convert", "hf-to-maxtext", tmp_path / "model", tmp_path / "maxtext")
        for words in (("maxtext-to-hf", tmp_path / "maxtext"), ("to-safetensors", tmp_path / "model")):
            refused = ckpt("convert", *words, tmp_path / "out")
            assert refused.exit_code == 3 and name in refused.output, refused.output

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_large_sidecar_is_checked_at_both_ends(self, tmp_path, is_whole):
        model = base("llama", 1)
        content = json.dumps({"a": "b" * (1 << 21)}).encode()
        model.files["tokenizer.json"] = content if is_whole else content[:-2]
        model.write(tmp_path / "model")
        assert len(self.reported(tmp_path / "model", "sidecar-json")) == (not is_whole)

    @pytest.mark.parametrize("name", ["weights.safetensors", "pytorch_model.safetensors", "a b.safetensors"])
    def test_nonstandard_weight_names_are_fixed_by_the_advice(self, tmp_path, name):
        model = base("llama", 1)
        model.shards = {name: model.shards["model.safetensors"]}
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "weight-names")
        assert name in result["what"]
        assert os.system(result["command"]) == 0
        assert "structure and configuration OK" in ckpt("doctor", tmp_path / "model").output

    @pytest.mark.parametrize("value", ["4", 4.0, 0, -1, True, {}])
    @pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "vocab_size"])
    def test_invalid_config_values_are_reported(self, tmp_path, name, value):
        model = base("llama", 2)
        model.config[name] = value
        model.write(tmp_path / "model")
        assert any(name in item["what"] for item in self.reported(tmp_path / "model", "config-values"))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, "1e6", True, [1.0]])
    @pytest.mark.parametrize(
        "name", ["rope_theta", "rope_parameters.rope_theta", "rope_scaling.full.rope_theta"]
    )
    def test_invalid_rope_theta_is_an_error(self, tmp_path, name, value):
        model = base("llama", 2)
        *parts, field = name.split(".")
        part = model.config
        for key in parts:
            part = part.setdefault(key, {})
        part[field] = value
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert name in result["what"] and result["level"] == "error"

    @pytest.mark.parametrize("value", [None, float("nan"), -1e-6, "1e-6", False])
    def test_invalid_norm_epsilon_is_an_error(self, tmp_path, value):
        model = base("llama", 2)
        model.config["rms_norm_eps"] = value
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert "rms_norm_eps" in result["what"] and result["level"] == "error"

    @pytest.mark.parametrize("value", ["swiglu", "SiLU", 3])
    def test_unknown_activation_is_a_warning(self, tmp_path, value):
        model = base("llama", 2)
        model.config["hidden_act"] = value
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert "hidden_act" in result["what"] and result["level"] == "warning"

    @pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "rope_parameters.full_attention"])
    @pytest.mark.parametrize(
        ("rope", "level"),
        [
            ({"rope_type": "lama3", "factor": 8.0}, "warning"),
            ({"type": "linear"}, "error"),
            ({"rope_type": "yarn", "factor": None}, "error"),
            ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "error"),
        ],
    )
    def test_unusable_rope_type_is_reported(self, tmp_path, name, rope, level):
        model = base("llama", 2)
        for part in reversed(name.split(".")):
            rope = {part: rope}
        model.config |= rope
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert result["level"] == level and "rope_type" in result["what"]

    @pytest.mark.parametrize("dtype", ["bfloat17", "torch.floaty"])
    def test_nonexistent_dtype_is_an_error(self, tmp_path, dtype):
        model = base("llama", 2)
        model.config["dtype"] = dtype
        model.write(tmp_path / "model")
        result = self.reported(tmp_path / "model", "dtype")
        assert [item["level"] for item in result] == ["error"]

    @pytest.mark.parametrize(
        "change",
        [
            {"rope_theta": None},
            {"rope_theta": 10000},
            {"rms_norm_eps": 0},
            {"hidden_act": "gelu_new"},
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_scaling": {"type": "mrope"}},
        ],
    )
    def test_values_transformers_accepts_are_not_reported(self, tmp_path, change):
        model = base("llama", 2)
        model.config |= change
        model.write(tmp_path / "model")
        assert not self.reported(tmp_path / "model", "config-values")

    def test_conversion_reports_unusable_config_values(self, tmp_path):
        model = base("llama", 2)
        model.config |= {"rope_theta": -1.0, "hidden_act": "swiglu"}
        model.write(tmp_path / "model")
        result = ckpt("convert", "to-safetensors", tmp_path / "model", tmp_path / "out", "--no-progress")
        assert result.exit_code == 0
        assert "rope_theta is -1.0" in result.output and "hidden_act is 'swiglu'" in result.output

    @pytest.mark.parametrize("kind", [None, "", 3])
    def test_missing_model_type_is_reported(self, tmp_path, kind):
        model = base("qwen3", 2)
        model.config["model_type"] = kind
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert "model_type" in result["what"]
        assert result["level"] == "error"

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_layers_of_different_dtypes_are_reported(self, tmp_path, dtype):
        model = base("llama", 1)
        (file,) = model.shards
        name = "model.layers.1.mlp.up_proj.weight"
        model.shards[file][name] = model.shards[file][name].astype(dtype)
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "coverage")
        assert name in result["what"] and result["level"] == "warning"
        refused = ckpt("convert", "hf-to-maxtext", tmp_path / "model", tmp_path / "out", "--no-progress")
        assert refused.exit_code == 3 and name in refused.output
        unscanned = ("--no-scan", "--no-progress")
        assert (
            ckpt("convert", "hf-to-maxtext", tmp_path / "model", tmp_path / "out", *unscanned).exit_code == 0
        )

    def test_misspelled_model_type_gets_a_suggestion(self, tmp_path):
        model = base("qwen3", 2)
        model.config["model_type"] = "qwen33"
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert "qwen33" in result["what"] and "qwen3" in result["what"]

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "policy."])
    @pytest.mark.parametrize("is_one", [True, False])
    def test_prefixed_names_are_fixed_by_the_advice(self, tmp_path, prefix, is_one):
        model = base("llama", 1)
        (file,) = model.shards
        tensors = model.shards[file]
        chosen = {"model.norm.weight"} if is_one else tensors.keys()
        model.shards[file] = {prefix * (name in chosen) + name: tensors[name] for name in tensors}
        model.write(tmp_path / "model")
        assert "configuration OK" not in ckpt("doctor", tmp_path / "model").output

    @pytest.mark.parametrize("architectures", [["LlamaModel"], ["LlamaForSequenceClassification"], ["Other"]])
    @pytest.mark.parametrize("how", ["drop", "crop", "whole"])
    def test_layers_are_checked_for_other_heads(self, tmp_path, architectures, how):
        model = base("llama", 1)
        (file,) = model.shards
        name = "model.layers.1.mlp.up_proj.weight"
        if how == "drop":
            del model.shards[file][name]
        elif how == "crop":
            model.shards[file][name] = model.shards[file][name][:-1]
        del model.shards[file]["lm_head.weight"]
        model.shards[file]["score.weight"] = model.shards[file]["model.norm.weight"]
        model.config["architectures"] = architectures
        model.write(tmp_path / "model")
        result = self.reported(tmp_path / "model", "coverage")
        is_damaged = how != "whole"
        assert [name in item["what"] for item in result] == [is_damaged]
        assert [item["level"] for item in result] == ["error" if is_damaged else "info"]

    @pytest.mark.parametrize("name", ["layer_types", "mlp_layer_types"])
    def test_invalid_layer_types_are_reported(self, tmp_path, name):
        model = base("llama", 1)
        model.config[name] = ["full"] * 3
        model.write(tmp_path / "model")
        (result,) = self.reported(tmp_path / "model", "config-values")
        assert name in result["what"] and "full" in result["what"]

    def test_model_without_weights_is_identified(self, tmp_path):
        model = base("llama", 1)
        model.shards = {}
        model.write(tmp_path / "model")
        result = ckpt("doctor", tmp_path / "model")
        assert result.exit_code == 3 and "has no weights" in result.output and "config.json" in result.output
