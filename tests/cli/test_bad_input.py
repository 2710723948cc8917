"""Bad input at the command line: place, got, expected, next step, exit code, and nothing left behind."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.hf_models import write_llama
from support.locations import GOLDEN_0_2_5

import ckpttools


@pytest.fixture
def broken(tmp_path):
    """Makes a Llama of 4 layers, lets its tensors and configuration be changed, converts it."""

    def run(change=lambda tensors, config: None, options=(), **sizes):
        directory = tmp_path / "hf"
        tensors = dict(write_llama(directory, **sizes))
        config = json.loads((directory / "config.json").read_text())
        change(tensors, config)
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
        return convert(directory, tmp_path, options)

    return run


def convert(source, tmp_path, options=()):
    arguments = ["convert", "hf-to-maxtext", str(source), str(tmp_path / "out"), *options]
    result = ckpt(*arguments)
    if result.exit_code:
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists()
        assert result.stdout == ""
    return result


def test_unchanged_model_converts(broken):
    assert broken().exit_code == 0


def test_missing_tensor_is_refused(broken):
    result = broken(lambda tensors, _: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    assert result.exit_code == 3
    assert "1 array is missing:\n    model.layers.3.mlp.up_proj.weight\n" in result.stderr


def test_several_missing_tensors_are_listed_at_once(broken):
    def change(tensors, _):
        del tensors["model.norm.weight"]
        for layer in (0, 1, 3):
            del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]

    result = broken(change)
    assert result.exit_code == 3
    assert "4 arrays are missing:" in result.stderr
    assert "    model.layers.{0..1,3}.mlp.up_proj.weight\n" in result.stderr
    assert "    model.norm.weight\n" in result.stderr


def test_extra_tensor_error_names_the_drop_option(broken, tmp_path):
    def change(tensors, _):
        tensors["model.layers.1.self_attn.q_proj.bias"] = tensors["model.norm.weight"]

    result = broken(change)
    assert result.exit_code == 3
    assert "1 array is not expected:\n    model.layers.1.self_attn.q_proj.bias\n" in result.stderr
    assert "--drop" not in result.stderr
    assert "check that config.json belongs to these weights" in " ".join(result.stderr.split())
    assert convert(tmp_path / "hf", tmp_path, ["--drop", "*.q_proj.bias"]).exit_code == 0


def test_unmatched_drop_pattern_is_refused(broken):
    result = broken(options=["--drop", "*.lora_A.*"])
    assert result.exit_code == 2
    assert "*.lora_A.*" in result.stderr


def test_dropping_a_required_tensor_is_refused(broken):
    result = broken(options=["--drop", "model.norm.*"])
    assert result.exit_code == 3
    assert "model.norm.weight is missing because it was dropped" in result.stderr


def test_misspelled_tensor_is_shown_with_its_near_name(broken):
    def change(tensors, _):
        tensors["model.layers.1.self_attn.qproj.weight"] = tensors.pop(
            "model.layers.1.self_attn.q_proj.weight"
        )

    result = broken(change)
    assert "q_proj.weight  (model.layers.1.self_attn.qproj.weight exists)" in result.stderr


def test_transposed_tensor_is_refused(broken):
    def change(tensors, _):
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T

    result = broken(change)
    assert result.exit_code == 3
    assert "up_proj.weight: got [64, 128], expected [128, 64] (it looks transposed)" in result.stderr


def test_extra_layer_is_refused(broken):
    result = broken(lambda _, config: config.update(num_hidden_layers=3))
    assert result.exit_code == 3
    assert "9 arrays are not expected:" in result.stderr
    assert "is beyond the 3 of config.json: num_hidden_layers" in result.stderr


def test_missing_layer_is_refused(broken):
    result = broken(lambda _, config: config.update(num_hidden_layers=5))
    assert "9 arrays are missing:" in result.stderr
    assert "rope" not in result.stderr


@pytest.mark.parametrize(
    ("case", "name", "number"),
    [
        ("kimi-k2", "num_nextn_predict_layers", 10**9),
        ("kimi-k2", "n_routed_experts", 10**9),
        ("kimi-k2", "num_nextn_predict_layers", 10**30),
        ("qwen3.5", "num_experts", 10**30),
    ],
)
def test_config_with_too_many_arrays_is_refused(tmp_path, case, name, number):
    hf = shutil.copytree(GOLDEN_0_2_5 / case / "hf", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    config.get("text_config", config)[name] = number
    (hf / "config.json").write_text(json.dumps(config))
    result = ckpt("convert", "hf-to-maxtext", hf, tmp_path / "out")
    assert result.exit_code == 3
    assert str(number) in result.stderr and name in result.stderr


def test_tied_config_with_a_head_is_refused(broken):
    result = broken(lambda _, config: config.update(tie_word_embeddings=True))
    assert result.exit_code == 3
    assert (
        "lm_head.weight is not expected because of config.json: tie_word_embeddings is true" in result.stderr
    )


def test_untied_config_without_a_head_is_refused(broken):
    result = broken(lambda tensors, _: tensors.pop("lm_head.weight"))
    assert result.exit_code == 3
    assert "lm_head.weight is expected because of config.json: tie_word_embeddings is false" in result.stderr


def test_lost_head_hint_downloads_it_first(broken, tmp_path):
    """A head that is made from the embedding is another model unless the model was tied."""
    outcome = broken(lambda tensors, _: tensors.pop("lm_head.weight"))
    advice = outcome.stderr.partition("hint")[2]
    assert advice.index("download the file with lm_head.weight again") < advice.index("--tied")
    result = ckpttools.doctor(tmp_path / "hf").findings
    assert "download the file with lm_head.weight again" in next(
        item.hint for item in result if item.check == "coverage"
    )
    built = ckpt("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "made", "--tied", "materialize")
    assert built.exit_code == 0 and "is written as a copy of model.embed_tokens.weight" in " ".join(
        built.stderr.split()
    )
    outcome = broken(lambda tensors, _: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:200]}))
    assert outcome.exit_code == 3 and "download the file with lm_head.weight again" in outcome.stderr
    assert "--tied" not in outcome.stderr


@pytest.mark.parametrize(
    ("layers", "advice"), [(6, "download the files with the missing"), (3, "check that config")]
)
def test_wrong_layer_count_gets_a_hint(broken, layers, advice):
    result = broken(lambda _, config: config.update(num_hidden_layers=layers))
    assert result.exit_code == 3 and advice in " ".join(result.stderr.split())


def test_config_contradiction_names_field_and_shape(broken):
    result = broken(lambda _, config: config.update(vocab_size=300))
    assert result.exit_code == 3
    message = (
        "model.embed_tokens.weight: got [256, 64], expected [300, 64] (vocab 300 from config.json: "
        "vocab_size)"
    )
    assert message in result.stderr


@pytest.mark.parametrize("value", ["64", 0, -1, 1.5, True])
def test_invalid_size_is_refused(broken, value):
    result = broken(lambda _, config: config.update(hidden_size=value))
    assert result.exit_code == 3
    assert "hidden_size must be an integer of at least 1\n  at       config.json\n" in result.stderr
    assert f"\n  got      {value!r}" in result.stderr


def test_unknown_model_type_lists_known_families(broken):
    result = broken(lambda _, config: config.update(model_type="lama"))
    assert result.exit_code == 3
    assert "no family has model_type 'lama'" in result.stderr
    assert "expected one of deepseek_v2, deepseek_v3, " in result.stderr
    assert "the names of gemma, llama, mistral" in result.stderr and "--family NAME" in result.stderr


def test_custom_model_type_converts_with_family_option(broken):
    result = broken(lambda _, config: config.update(model_type="my_llama"), ["--family", "llama"])
    assert result.exit_code == 0


def test_missing_config_is_refused(broken, tmp_path):
    broken()
    (tmp_path / "hf" / "config.json").unlink()
    (tmp_path / "out").rename(tmp_path / "other")
    result = convert(tmp_path / "hf", tmp_path)
    assert result.exit_code == 3
    assert "config.json does not exist next to the weights" in result.stderr


@pytest.mark.parametrize("text", ["", "{'a': 1}", "[]", "version https://git-lfs.github.com/spec/v1\noid 1"])
def test_unreadable_config_is_refused(broken, tmp_path, text):
    broken()
    (tmp_path / "out").rename(tmp_path / "other")
    (tmp_path / "hf" / "config.json").write_text(text)
    result = convert(tmp_path / "hf", tmp_path)
    assert result.exit_code == 3
    assert "config.json" in result.stderr
    assert "hint" in result.stderr


def test_unsupported_interleaved_layout_is_refused(broken):
    result = broken(options=["--rope-layout", "interleaved"], model_type="qwen3")
    assert result.exit_code == 2
    assert "family qwen3 has no interleaved RoPE layout" in result.stderr


def test_invalid_scan_axis_is_refused(broken):
    result = broken(options=["--scan-axis", "7"])
    assert result.exit_code == 2
    assert "expected 0 or 1" in result.stderr


def test_interleaving_an_odd_head_dim_is_refused(broken):
    rope = {"rope_type": "llama3", "factor": 8.0}
    result = broken(head_dim=15, rope_parameters=rope)
    assert result.exit_code == 3
    assert "self_attn.q_proj.weight: got [60, 64], expected [56, 64]" in result.stderr
    assert "pair 7 from head_dim // half (config.json: head_dim; family llama)" in result.stderr


def test_truncated_shard_error_gives_both_sizes(broken, tmp_path):
    broken()
    (tmp_path / "out").rename(tmp_path / "other")
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 1000)
    result = convert(tmp_path / "hf", tmp_path)
    assert result.exit_code == 3
    assert f"{whole:,}" in result.stderr
    assert f"{whole - 1000:,}" in result.stderr
