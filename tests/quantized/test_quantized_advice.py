"""What is said of quantized models: advice that works, and nothing that misleads."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from support.command_line import ckpt
from support.hf_models import write_llama
from support.locations import FIXTURES, GOLDEN
from support.quantized_kinds import write

import ckpttools
from ckpttools import DTYPES, Tree
from ckpttools.cli.output import format_labeled
from ckpttools.cli.plan_text import _note_lines
from ckpttools.core.notes import Note
from ckpttools.testing.strategies import stored

SCALES = "model.layers.1.mlp.up_proj.weight_scale_inv"


def quantized(directory: Path) -> Path:
    plain = directory.with_name("plain")
    write_llama(plain)
    ckpttools.quantize(plain, directory)
    return directory


def damaged(source: Path, directory: Path, change: str) -> Path:
    tree = ckpttools.open(source)
    leaves, name = (
        dict(tree.items()),
        (SCALES.removesuffix("_scale_inv") if change == "no weight" else SCALES,),
    )
    if change == "grid":
        leaves[name] = stored(np.ones((9, 9), np.float32), DTYPES["float32"])
    elif change == "nan":
        leaves[name] = stored(np.full(tree[name].shape, np.nan, np.float32), DTYPES["float32"])
    else:
        del leaves[name]
    ckpttools.convert(Tree(leaves, tree.metadata), directory, format="safetensors")
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory


def run(*words: object, code: int = 0) -> str:
    result = ckpt(*words)
    assert result.exit_code == code, result.output
    return result.output


def declared(*words: object, code: int = 0) -> str:
    return " ".join(run(*words, code=code).split())


@pytest.mark.parametrize("change", ["no scale", "no weight", "grid"])
def test_damaged_model_gets_no_failing_advice(change, tmp_path):
    bad = damaged(quantized(tmp_path / "fp8"), tmp_path / "bad", change)
    card = declared(bad)
    assert "of llama" in card and "cannot be dequantized: model.layers.1.mlp.up_proj" in card
    assert f"ckpt doctor {bad}" in card
    assert "ckpt convert" not in card and "ckpt cast" not in card and "mixed dtypes" not in card
    told = declared("quantize", bad, tmp_path / "out", code=3)
    assert "cannot be dequantized" in told and "already quantized" not in told


@pytest.mark.parametrize("change", ["no scale", "no weight", "grid", "nan"])
def test_doctor_does_not_advise_converting_damage(change, tmp_path):
    bad = damaged(quantized(tmp_path / "fp8"), tmp_path / "bad", change)
    told = declared("doctor", bad, code=1)
    assert "1 error" in told and "ckpt cast" not in told and "each with its scales" not in told


def test_advice_for_quantized_models_works(tmp_path):
    source = quantized(tmp_path / "fp8")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    for location in (source, tmp_path / "native"):
        (line,) = [splitline for splitline in run(location).splitlines() if "ckpt cast" in splitline]
        _, *words = shlex.split(line.strip().replace("DST", str(tmp_path / f"{location.name}-plain")))
        run(*words)
    (line,) = [
        splitline
        for splitline in run("quantize", source, tmp_path / "no", code=3).splitlines()
        if "hint" in splitline
    ]
    assert line.endswith(f"`ckpt cast {source} DST --dtype bfloat16`")
    with pytest.raises(ckpttools.CheckpointError) as error:
        ckpttools.quantize(source, tmp_path / "no")
    assert f'ckpttools.cast("{source}", "DST", dtype="bfloat16")' in str(error.value.hint)


def test_empty_quantization_config_is_reported_once(tmp_path):
    """What is left of it is empty, and not the one that lies beside the source."""
    source = FIXTURES / "compressed-tensors" / "int4-group"
    told = declared("cast", source, tmp_path / "plain", "--dtype", "bfloat16")
    assert told.count("quantization_config is left out") == 1
    assert (tmp_path / "plain" / "config.json").read_bytes() == b"{}\n"


def test_config_remarks_are_correct(tmp_path):
    """One that is carried along in MaxText's names stays as it is, and is made true on the way back."""
    source = quantized(tmp_path / "fp8")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    for location, inside in ((source, "."), (tmp_path / "native", "0/items/hf")):
        built = tmp_path / f"{location.name}-plain"
        told = declared("cast", location, built, "--dtype", "bfloat16")
        is_gone = "quantization_config" not in (built / inside / "config.json").read_text()
        assert ("quantization_config is left out" in told) is is_gone is (location == source)
    told = declared("shrink", tmp_path / "native", tmp_path / "small", "--layers", "2", "--dtype", "bfloat16")
    assert told.count("quantization_config is left out") == 1


def test_weights_and_dequantized_weights_are_counted(tmp_path):
    source = quantized(tmp_path / "fp8")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    ckpttools.hf_to_maxtext(source, tmp_path / "made")
    assert "128 x 128; 28 weights" in declared("inspect", "tree", source)
    assert "128 x 128; 7 weights" in declared("inspect", "tree", tmp_path / "native")
    assert "quantized none left; the original model was: fp8" in declared(
        "inspect", "tree", tmp_path / "made"
    )


def test_fp8_run_and_version_limits_are_reported(tmp_path):
    source = quantized(tmp_path / "fp8")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    ckpttools.hf_to_maxtext(source, tmp_path / "made")
    for location, is_fp8 in (("native", True), ("made", False)):
        result = ckpttools.resolve(load_parameters_path=tmp_path / location / "0/items")
        assert result.loads and any("ignores the scales" in note for note in result.notes) is is_fp8
    told = declared("remap", tmp_path / "native", tmp_path / "old", "--maxtext", "e591f30", code=3)
    assert f"`ckpt cast {tmp_path / 'native'}/0/items DST --dtype bfloat16`" in told


@pytest.mark.parametrize("kind", ["gptq", "awq", "nf4"])
def test_unsupported_schemes_are_reported_at_once(kind, tmp_path):
    card = declared(write(tmp_path / "it", kind))
    assert "conversions do not support this scheme" in card and "ckpt doctor" in card
    assert "ckpt convert" not in card
    told = declared("cast", tmp_path / "it", tmp_path / "out", "--dtype", "bfloat16")
    assert ("AutoAWQConverter" if kind == "awq" else "dequantize the model to bfloat16") in told


def test_fp8_of_gpt_oss_names_the_scheme_of_its_experts(tmp_path):
    told = declared("quantize", GOLDEN / "gpt-oss" / "hf", tmp_path / "fp8")
    assert "of fused experts; this scheme is for" in told and "--scheme mxfp4 is for those" in told


def test_quantizing_without_any_error_is_one_line(tmp_path):
    ckpttools.quantize(GOLDEN / "gpt-oss" / "hf", tmp_path / "once", scheme="mxfp4")
    ckpttools.cast(tmp_path / "once", tmp_path / "plain", dtype="bfloat16")
    told = declared("quantize", tmp_path / "plain", tmp_path / "again", "--scheme", "mxfp4")
    assert "quantized without error" in told and "worst arrays" not in told
    # Other exponents stand for the same numbers.
    same = declared("diff", tmp_path / "once", tmp_path / "again", code=1)
    assert "dequantized, they are equal" in same and "other numbers" not in same


def test_quantization_differences_name_the_quantized_side(tmp_path):
    source = quantized(tmp_path / "fp8")
    plain, counted = tmp_path / "plain", "28 of 28 arrays with different values are quantized in {} alone"
    assert counted.format("B") in declared("diff", plain, source, code=1)
    ckpttools.hf_to_maxtext(plain, tmp_path / "run")
    assert counted.format("A") in declared("diff", source, tmp_path / "run", code=1)
    ckpttools.quantize(plain, tmp_path / "less", exclude="*.down_proj.weight")
    assert "4 of 4 arrays with different values are quantized in A alone" in declared(
        "diff", source, tmp_path / "less", code=1
    )
    assert "rounds them" not in declared("diff", source, source)


def test_single_command_has_no_quotes():
    command = "ckpt cast some/where/far/away DST --dtype bfloat16"
    assert format_labeled("next", f"`{command}` makes plain weights", 6, 60, command=command) == [
        f"next  {command}",
        "      makes plain weights",
    ]


def test_array_counts_are_consistent():
    def line(*notes):
        (result,) = _note_lines(notes)
        return result

    some, many, one = (Note.of_arrays(count, "rounded") for count in (13, 1032, 1))
    rows = [Note(name, "rounded") for name in ("a.b", "c", "d")]
    assert (one.subject, many.subject) == ("1 array", "1,032 arrays")
    assert line(some, many) == "1,045 arrays: rounded"
    assert line(one) == "1 array: rounded"
    assert line(rows[0], some) == "a.b and 13 arrays: rounded"
    assert line(*rows) == "a.b and 2 more: rounded"


def test_name_resembling_a_count_stays_a_name():
    named = [Note("12 arrays", "rounded"), Note.of_arrays(3, "rounded")]
    assert list(_note_lines(named)) == ["12 arrays and 3 arrays: rounded"]
