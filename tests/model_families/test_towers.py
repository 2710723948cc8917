"""Towers are converted in both directions by default, left out on request, and never partially."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, run
from support.golden_data import all_described, arrays_by_tensorstore
from support.internals import families, keystr
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import (
    ConfigError,
    CoverageError,
    Resources,
    Select,
    ToHuggingFace,
    ToMaxText,
    Tree,
    UsageError,
    plan_to_huggingface,
    plan_to_maxtext,
)
from ckpttools.maxtext.model_config import text_config

RESOURCES = Resources(jobs=2)
GEMMA3 = GOLDEN_0_2_5 / "gemma3-vision" / "hf"
OMNI = GOLDEN_0_2_5 / "qwen3-omni" / "hf"


def to_maxtext(source: Path | Tree, location: Path, **options: object) -> tuple[str, ...]:
    """Convert, and return the messages."""
    conversion = plan_to_maxtext(source, ToMaxText(**options), RESOURCES)
    conversion.run(location)
    return conversion.plan.remarks


def back(source: Path, location: Path, **options: object) -> dict[str, dict[str, object]]:
    """Convert back, and return the result as digests by name."""
    plan_to_huggingface(source, ToHuggingFace(**options), RESOURCES).run(location)
    return all_described(load_file(location / "model.safetensors"))


def paths(location: Path) -> set[str]:
    return set(map(keystr, ckpttools.open(location).arrays))


def test_unscanned_llama4_tower_matches_maxtext_script(tmp_path):
    to_maxtext(GOLDEN / "llama4-scout" / "hf", tmp_path / "out", scan=False)
    golden = json.loads((GOLDEN / "llama4-scout" / "leaves_unscanned.json").read_bytes())
    expected = {path: leaf for path, leaf in golden.items() if "vision_encoder" in path}
    assert len(expected) == 26
    read = all_described(arrays_by_tensorstore(tmp_path / "out" / "0" / "items"))
    assert {path: leaf for path, leaf in read.items() if "vision_encoder" in path} == expected


def test_towers_are_never_scanned(tmp_path):
    for scan in (True, False):
        to_maxtext(GEMMA3, tmp_path / str(scan), scan=scan)
    scanned, unscanned = (
        {path for path in paths(tmp_path / str(scan)) if "vision_encoder" in path} for scan in (True, False)
    )
    assert scanned == unscanned
    assert any("encoderblock_1/" in path for path in scanned)


def test_text_only_leaves_towers_out_with_a_note(tmp_path):
    (declared,) = to_maxtext(GEMMA3, tmp_path / "out", text_only=True, exact=True)
    assert declared.startswith("the towers are left out") and declared.endswith("39 arrays")
    assert not any("vision" in path for path in paths(tmp_path / "out"))
    with pytest.raises(ConfigError, match="have no arrays"):
        plan_to_huggingface(tmp_path / "out")
    text = back(tmp_path / "out", tmp_path / "text", spelling="text")
    assert not any("vision" in name for name in text)
    assert back(tmp_path / "out", tmp_path / "whole", like=GEMMA3, carry=True) == all_described(
        load_file(GEMMA3 / "model.safetensors")
    )


def test_text_only_with_carry_restores_towers(tmp_path):
    (declared,) = to_maxtext(GEMMA3, tmp_path / "out", text_only=True, carry=True, exact=True)
    assert "kept for the reverse conversion" in declared
    assert back(tmp_path / "out", tmp_path / "hf") == all_described(load_file(GEMMA3 / "model.safetensors"))


def test_dropping_all_tower_arrays_leaves_it_out(tmp_path):
    drop = ("vision_tower.*", "multi_modal_projector.*")
    to_maxtext(GEMMA3, tmp_path / "named", drop=drop)
    to_maxtext(GEMMA3, tmp_path / "alone", text_only=True)
    assert paths(tmp_path / "named") == paths(tmp_path / "alone")
    with pytest.raises(CoverageError, match="missing because it was dropped"):
        plan_to_maxtext(GEMMA3, ToMaxText(drop=drop[1:]))


def test_undeclared_tower_is_refused_once():
    tree = ckpttools.open(GEMMA3)
    config = {name: item for name, item in (tree.metadata.config or {}).items() if name != "vision_config"}
    with pytest.raises(CoverageError) as caught:
        plan_to_maxtext(tree.with_metadata(config=config), ToMaxText(), RESOURCES)
    why = "are not expected because of config.json: no vision_config.hidden_size"
    assert str(caught.value.hint).count("because of") == 1 and f"and others {why}" in str(caught.value.hint)


def test_missing_declared_tower_is_refused(tmp_path):
    tree = ckpttools.open(GEMMA3).pipe(Select(drop=["vision_tower.*", "multi_modal_projector.*"]))
    with pytest.raises(CoverageError, match="are missing") as error:
        plan_to_maxtext(tree)
    assert "text_only=True" in str(error.value.hint)
    assert error.value.got == "config.json: vision_config.hidden_size is 24"
    to_maxtext(tree, tmp_path / "out", text_only=True)


def test_partial_tower_is_refused_in_reverse(tmp_path):
    to_maxtext(GEMMA3, tmp_path / "out")
    part = ckpttools.open(tmp_path / "out").pipe(Select(drop=["*encoderblock_1/LayerNorm_0/bias"]))
    with pytest.raises(CoverageError, match="1 array is missing"):
        plan_to_huggingface(part, ToHuggingFace(like=GEMMA3))


def test_text_model_is_written_separately(tmp_path):
    to_maxtext(GEMMA3, tmp_path / "out")
    conversion = plan_to_huggingface(tmp_path / "out", ToHuggingFace(spelling="text"), RESOURCES)
    assert len(conversion.plan.notes.dropped) == 39
    conversion.run(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in config
    # It is a model of its own.
    to_maxtext(tmp_path / "hf", tmp_path / "again")
    assert paths(tmp_path / "again") == {path for path in paths(tmp_path / "out") if "vision" not in path}


def test_tower_names_show_the_transformers_version(tmp_path):
    """transformers 5 does not nest a model in the tower; names of the text part are equal."""
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "gemma3" / "hf", source)
    to_maxtext(source, tmp_path / "out", carry=True)
    assert back(tmp_path / "out", tmp_path / "hf") == all_described(load_file(source / "model.safetensors"))
    built = back(tmp_path / "out", tmp_path / "hub", spelling="hub")
    assert "vision_tower.vision_model.post_layernorm.bias" in built


def test_each_tower_is_optional(tmp_path):
    to_maxtext(OMNI, tmp_path / "out", scan=False, drop=("thinker.audio_tower.*",))
    there = paths(tmp_path / "out")
    assert any("vision_encoder" in path for path in there)
    assert not any("audio_encoder" in path for path in there)
    with pytest.raises(ConfigError, match="have no arrays") as error:
        plan_to_huggingface(tmp_path / "out")
    assert "thinker_config.audio_config" in str(error.value.got)


@pytest.mark.parametrize("model", ["qwen3-vl", "qwen3-vl-moe", "qwen3-omni"])
def test_layers_using_tower_outputs_are_not_scanned(tmp_path, model):
    """MaxText refuses such a model, but scans its text part."""
    source = GOLDEN_0_2_5 / model / "hf"
    with pytest.raises(UsageError, match="does not scan the layers") as error:
        plan_to_maxtext(source)
    assert "scan=False" in str(error.value.hint) and "text_only=True" in str(error.value.hint)
    (declared, *_) = to_maxtext(source, tmp_path / "out", text_only=True)
    assert "writes only the text model" in declared


TEXT_MODELS = {
    "qwen3-vl": "Qwen3ForCausalLM",
    "qwen3-vl-moe": "Qwen3MoeForCausalLM",
    "qwen3-omni": "Qwen3MoeForCausalLM",
    "qwen3.5": "Qwen3_5MoeForCausalLM",
}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_model_config_has_a_transformers_class(tmp_path, model):
    """Its configuration has that class, and it converts to the text part in MaxText."""
    to_maxtext(GOLDEN_0_2_5 / model / "hf", tmp_path / "out", scan=False)
    back(tmp_path / "out", tmp_path / "hf", spelling="text")
    config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
    assert config["architectures"] == [TEXT_MODELS[model]]
    assert ("mrope_section" in config["rope_parameters"]) == (model == "qwen3.5")
    to_maxtext(tmp_path / "hf", tmp_path / "again", scan=False)
    whole, again = (
        all_described(arrays_by_tensorstore(tmp_path / name / "0" / "items")) for name in ("out", "again")
    )
    assert again == {path: leaf for path, leaf in whole.items() if "_encoder" not in path}


def test_text_model_config_states_differing_defaults():
    """Qwen3-VL always normalizes the weights of experts, Qwen 3 only if configured."""
    whole = json.loads((GOLDEN_0_2_5 / "qwen3-vl-moe" / "hf" / "config.json").read_bytes())
    text = next(spelling for spelling in families()["qwen3-vl-moe"].spellings if spelling.name == "text")
    for declared in ({}, {"norm_topk_prob": False}):
        part = {key: value for key, value in whole["text_config"].items() if key != "norm_topk_prob"}
        built = text_config({**whole, "text_config": {**part, **declared}}, text)
        assert built is not None and built["norm_topk_prob"] is True


def test_tower_errors_name_command_line_options(tmp_path):
    done = ckpt("convert", "hf-to-maxtext", GEMMA3, tmp_path / "out", "--text-only", "--no-progress")
    assert done.exit_code == 0 and "--text-only" in done.stderr
    refused = ckpt("convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "hf", "--no-progress")
    assert refused.exit_code == 3 and "--names text" in refused.stderr
    written = ckpt("convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "hf", "--names", "text")
    assert written.exit_code == 0, written.output


TALKER = ("talker.model.norm.weight", "code2wav.pre_transformer.norm.weight")


def speaking(location: Path, *names: str, says: object = True) -> Path:
    """Return the golden Omni with speech arrays, and a configuration that declares speech or nothing."""
    shutil.copytree(OMNI, location)
    arrays = load_file(OMNI / "model.safetensors")
    anyone = arrays["thinker.model.norm.weight"]
    save_file({**arrays, **dict.fromkeys(names, anyone)}, location / "model.safetensors")
    config = json.loads((location / "config.json").read_bytes())
    config.pop("enable_audio_output")
    config |= {} if says is None else {"enable_audio_output": says}
    (location / "config.json").write_text(json.dumps(config))
    return location


def test_speech_arrays_are_not_dropped_silently(tmp_path):
    source = speaking(tmp_path / "hf", *TALKER)
    with pytest.raises(CoverageError, match="which would be lost") as error:
        plan_to_maxtext(source, ToMaxText(scan=False))
    assert error.value.got == (
        f"talker: 1 array, such as {TALKER[0]}, code2wav: 1 array, such as {TALKER[1]}"
    )
    assert 'drop=["talker.*", "code2wav.*"]' in str(error.value.hint)
    with pytest.raises(CoverageError, match="which would be lost") as error:
        plan_to_maxtext(source, ToMaxText(scan=False, drop=("talker.*",)))
    assert "talker" not in str(error.value.got)


def test_carried_speech_arrays_are_restored(tmp_path):
    source = speaking(tmp_path / "hf", *TALKER)
    to_maxtext(source, tmp_path / "out", scan=False, carry=True)
    assert back(tmp_path / "out", tmp_path / "back") == all_described(load_file(source / "model.safetensors"))
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("says", [True, None])
def test_model_without_speech_arrays_declares_no_speech(tmp_path, says):
    source = speaking(tmp_path / "hf", *TALKER, says=says)
    to_maxtext(source, tmp_path / "out", scan=False, carry=True, drop=("talker.*", "code2wav.*"))
    conversion = plan_to_huggingface(tmp_path / "out", ToHuggingFace(), RESOURCES)
    assert any("enable_audio_output is false" in declared for declared in conversion.plan.remarks)
    conversion.run(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_bytes())["enable_audio_output"] is False
    whole = back(tmp_path / "out", tmp_path / "whole", like=source, carry=True)
    assert set(TALKER) <= whole.keys()


def test_partial_speech_arrays_are_refused_in_reverse(tmp_path):
    source = speaking(tmp_path / "hf", *TALKER)
    to_maxtext(source, tmp_path / "out", scan=False, carry=True, drop=("code2wav.*",))
    with pytest.raises(ConfigError, match="only some of them exist") as error:
        plan_to_huggingface(tmp_path / "out")
    assert error.value.got == "talker, without code2wav"


def test_unused_gemma_head_is_declared_only_if_present(tmp_path):
    source = GOLDEN / "gemma3" / "hf"
    (declared,) = to_maxtext(source, tmp_path / "out", exact=True)
    assert declared.startswith("MaxText does not support")
    back(tmp_path / "out", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
    assert config["vision_config"]["vision_use_head"] is False
    whole = back(tmp_path / "out", tmp_path / "whole", like=source, carry=True)
    assert whole == all_described(load_file(source / "model.safetensors"))


def plain_gemma4(location: Path) -> Path:
    """Return the golden Gemma 4 without standardization of the tower's output."""
    shutil.copytree(GOLDEN_0_2_5 / "gemma4-vision" / "hf", location)
    arrays = load_file(location / "model.safetensors")
    kept = {name: array for name, array in arrays.items() if ".std_" not in name}
    assert len(arrays) == len(kept) + 2
    save_file(kept, location / "model.safetensors")
    config = json.loads((location / "config.json").read_bytes())
    config["vision_config"]["standardize"] = False
    (location / "config.json").write_text(json.dumps(config))
    return location


def test_unstandardized_gemma4_gets_ones_and_zeros(tmp_path):
    source = plain_gemma4(tmp_path / "hf")
    to_maxtext(source, tmp_path / "out", exact=True)
    built = arrays_by_tensorstore(tmp_path / "out" / "0" / "items")
    result = {path.rpartition("/")[2]: array for path, array in built.items() if "/std_" in path}
    assert (result["std_scale"] == 1).all() and (result["std_bias"] == 0).all()
    assert back(tmp_path / "out", tmp_path / "back") == all_described(load_file(source / "model.safetensors"))


def test_learned_standardization_is_not_dropped(tmp_path):
    to_maxtext(GOLDEN_0_2_5 / "gemma4-vision" / "hf", tmp_path / "out", exact=True)
    plain = plain_gemma4(tmp_path / "hf")
    shutil.copy(plain / "config.json", tmp_path / "out" / "0" / "items" / "hf")
    with pytest.raises(ConfigError, match=r"computes as if all values of this array were [01]") as error:
        plan_to_huggingface(tmp_path / "out").run(tmp_path / "back")
    assert "std_" in str(error.value) and "vision_config.standardize is false" in str(error.value.hint)
    source = GOLDEN_0_2_5 / "gemma4-vision" / "hf"
    shutil.copy(source / "config.json", tmp_path / "out" / "0" / "items" / "hf")
    assert back(tmp_path / "out", tmp_path / "back") == all_described(load_file(source / "model.safetensors"))


@pytest.mark.parametrize("source", [GEMMA3, OMNI], ids=["vision", "vision and audio"])
def test_text_model_is_compared_with_the_text_part(tmp_path, source):
    to_maxtext(source, tmp_path / "out", scan=False, carry=True)
    back(tmp_path / "out", tmp_path / "text", spelling="text")
    done = ckpt("verify", tmp_path / "text", "--against", tmp_path / "out", "--no-progress")
    assert done.exit_code == 1, done.output
    assert "--drop PATTERN compares without arrays that were left out on purpose" in done.stdout
    done = ckpt("verify", tmp_path / "text", "--against", tmp_path / "out", "--no-progress", "--json")
    report = json.loads(done.stdout)
    assert {item["reason"] for item in report["differences"]} == {"missing"}
    dropped = [f"--drop={item['name']}" for item in report["differences"]]
    done = ckpt("verify", tmp_path / "text", "--against", tmp_path / "out", "--no-progress", *dropped)
    assert done.exit_code == 0, done.output
    done = ckpt("verify", tmp_path / "out", "--against", tmp_path / "text", "--no-progress")
    assert done.exit_code == 1, done.output
    back(tmp_path / "out", tmp_path / "whole")
    done = ckpt("verify", tmp_path / "whole", "--against", tmp_path / "out", "--no-progress")
    assert done.exit_code == 0, done.output
    assert "not compared" not in done.stdout
    words = ("vision", "multi_modal", "visual", "audio_tower")
    drop = [f"--drop=*{word}*" for word in words if any(word in name for name in paths(tmp_path / "whole"))]
    run("select", tmp_path / "whole", tmp_path / "lost", *drop)
    done = ckpt("verify", tmp_path / "lost", "--against", tmp_path / "out", "--no-progress")
    assert done.exit_code == 1, done.output
