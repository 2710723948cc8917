"""`ckpt verify` and `ckpt hash` between Hugging Face and MaxText: a conversion proves equal, nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import ckpt
from support.golden_data import FAMILIES, SCAN_NAMES, convert
from support.internals import SafetensorsWriter, to_maxtext
from support.locations import GOLDEN
from support.stored_trees import write

import ckpttools
from ckpttools import DTYPES, Resources, ToHuggingFace, ToMaxText, Tree, plan_to_huggingface, plan_to_maxtext
from ckpttools.compare.conversion import name_like_maxtext

SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def hf(family):
    return GOLDEN / family / "hf"


def verify(built, source, *options):
    arguments = ["verify", built, "--against", source, "--no-progress", *options]
    return ckpt(*arguments)


def digest(path, *options):
    result = ckpt("hash", path, "--no-progress", "--parameters", *options)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()[-2]


@SCANS
@EVERY_FAMILY
def test_conversion_and_reverse_are_verified(tmp_path, family, scan):
    convert(tmp_path / "maxtext", family, scan=scan, carry=True)
    assert verify(tmp_path / "maxtext", hf(family)).exit_code == 0
    plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
    result = verify(tmp_path / "hf", tmp_path / "maxtext")
    assert result.exit_code == 0, result.output
    assert_every_bit_came_back(tmp_path / "hf", hf(family))


def assert_every_bit_came_back(built: Path, source: Path) -> None:
    """By safetensors' own reader; what lies beside the weights, too."""
    files = {path.name for path in source.iterdir()}
    assert {path.name for path in built.iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert (built / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = (load_file(location / "model.safetensors") for location in (built, source))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        assert ours[name].tobytes() == array.tobytes(), name


@EVERY_FAMILY
def test_all_layouts_have_the_same_digest(tmp_path, family):
    """Of the parameters, whatever is carried along."""
    built = [
        convert(tmp_path / str(scan), family, scan=scan, carry=True, text_only=False)
        for scan in (True, False)
    ]
    assert len({digest(hf(family), "--as", "maxtext"), *map(digest, built)}) == 1


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"pad_vocab": 300}, {"scan_axis": 0}],
    ids=lambda options: next(iter(options)),
)
def test_conversion_options_are_inferred_from_the_output(tmp_path, options):
    convert(tmp_path / "maxtext", "llama3.1", **options)
    result = verify(tmp_path / "maxtext", hf("llama3.1"))
    assert result.exit_code == 0, result.output


def test_declared_cast_is_verified(tmp_path):
    convert(tmp_path / "maxtext", "qwen3", dtype=DTYPES["float16"])
    assert verify(tmp_path / "maxtext", hf("qwen3")).exit_code == 1
    assert verify(tmp_path / "maxtext", hf("qwen3"), "--cast").exit_code == 0


def test_single_flipped_bit_is_found(tmp_path):
    item = convert(tmp_path / "maxtext", "llama3.1")
    data = item / "d" / "data"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    result = verify(tmp_path / "maxtext", hf("llama3.1"))
    assert result.exit_code == 1
    assert "1 element differs, at" in result.stdout


def test_another_rope_layout_is_a_difference(tmp_path):
    convert(tmp_path / "maxtext", "llama3.1", rope_layout="halves")
    assert verify(tmp_path / "maxtext", hf("llama3.1")).exit_code == 1
    assert verify(tmp_path / "maxtext", hf("llama3.1"), "--rope-layout", "halves").exit_code == 0


def test_dropped_arrays_are_named(tmp_path):
    """With the same patterns as in the conversion; what MaxText has no place for is told without."""
    tree = ckpttools.open(hf("llama3.1"))
    extra = Tree({**tree, ("model.extra.weight",): tree["model.norm.weight",]}, tree.metadata)
    write(extra, SafetensorsWriter(), tmp_path / "hf")
    shutil.copy(hf("llama3.1") / "config.json", tmp_path / "hf")
    source, drop = tmp_path / "hf", ("--drop", "*.extra.*")
    options = ToMaxText(drop=("*.extra.*",))
    plan_to_maxtext(source, options, Resources(jobs=2)).run(tmp_path / "maxtext")
    refused = verify(tmp_path / "maxtext", source)
    assert refused.exit_code == 1 and "model/extra/weight: missing" in refused.stdout.replace(".", "/")
    proved = verify(tmp_path / "maxtext", source, *drop)
    assert proved.exit_code == 0, proved.output
    left_out = len(ckpttools.open(hf("llama3.1")).arrays) - len(to_maxtext(tree, ToMaxText()).notes.dropped)
    assert f"because of --drop: {len(extra.arrays) - left_out} array" in proved.stdout
    assert digest(source, "--as", "maxtext", *drop) == digest(tmp_path / "maxtext")
    manifest = str(tmp_path / "m.json")
    digest(source, "--as", "maxtext", *drop, "--manifest", manifest)
    for location, more in ((source, drop), (tmp_path / "maxtext", ())):
        result = ckpt("verify", location, "--manifest", manifest, *more)
        assert result.exit_code == 0, result.output


def test_verify_reports_lost_learned_head(tmp_path):
    drop = "lm_head.weight"
    plan_to_maxtext(hf("llama3.1"), ToMaxText(drop=(drop,)), Resources(jobs=2)).run(tmp_path / "maxtext")
    for options in ((), ("--tied", "drop")):
        result = verify(tmp_path / "maxtext", hf("llama3.1"), *options)
        assert result.exit_code == 1, result.output
        assert "the output head differs from the embedding: 256 of 256 rows differ, by up to" in result.stdout
        assert "decoder/logits_dense/kernel: missing\n" in result.stdout
    result = verify(tmp_path / "maxtext", hf("llama3.1"), "--drop", drop)
    assert result.exit_code == 0, result.output
    assert "left out because of --drop: the output head, lm_head.weight\n" in result.stdout


def test_diff_reports_towers_that_maxtext_lacks(tmp_path):
    convert(tmp_path / "maxtext", "gemma3")
    result = verify(tmp_path / "maxtext", hf("gemma3"))
    assert result.exit_code == 1, result.output
    assert "23 arrays missing\n" in result.stdout
    assert "left out, as no model of the family computes with it: 11 arrays\n" in result.stdout
    dropped = "--drop", "vision_tower.*", "--drop", "multi_modal_projector.*"
    result = verify(tmp_path / "maxtext", hf("gemma3"), *dropped)
    assert result.exit_code == 0, result.output
    # Of the whole model, its pooling head.
    hashed = ckpt("hash", hf("gemma3"), "--as", "maxtext", "--no-progress")
    assert "11 arrays" in hashed.stderr and "11 arrays" not in hashed.stdout
    towers = ("--drop", "vision_tower.*", "--drop", "multi_modal_projector.*")
    assert digest(hf("gemma3"), "--as", "maxtext", *towers) == digest(tmp_path / "maxtext")


def test_verify_reports_carried_arrays_that_were_not_restored(tmp_path):
    convert(tmp_path / "maxtext", "gemma3", carry=True)
    options = ToHuggingFace(spelling="text")
    plan_to_huggingface(tmp_path / "maxtext", options, Resources(jobs=2)).run(tmp_path / "hf")
    result = verify(tmp_path / "hf", tmp_path / "maxtext")
    assert result.exit_code == 1, result.output
    assert "23 arrays missing\n" in result.stdout
    dropped = "--drop", "vision_tower.*", "--drop", "multi_modal_projector.*"
    result = verify(tmp_path / "hf", tmp_path / "maxtext", *dropped)
    assert result.exit_code == 0, result.output
    assert "left out because of --drop: 34 arrays\n" in result.stdout


@pytest.mark.parametrize("option", ["--family=llama", "--rope-layout=halves", "--tied=drop", "--drop=*"])
def test_ignored_options_are_refused(tmp_path, option):
    built, source, manifest = tmp_path / "maxtext", hf("qwen3"), str(tmp_path / "m.json")
    convert(built, "qwen3")
    digest(built, "--manifest", manifest)
    refused = [
        verify(built, built, option),
        verify(source, source, option),
        ckpt("verify", built, "--manifest", manifest, option),
        ckpt("hash", source, option),
        ckpt("hash", built, "--as", "maxtext", option),
    ]
    assert [item.exit_code for item in refused] == [2] * 5, [item.output for item in refused]


def test_conversion_is_compared_by_layer(tmp_path):
    convert(tmp_path / "maxtext", "qwen3")
    result = verify(tmp_path / "maxtext", hf("qwen3"), "--whole")
    assert result.exit_code == 2
    assert "leave out --whole" in result.stderr


def test_drop_is_refused_for_maxtext(tmp_path):
    convert(tmp_path / "maxtext", "qwen3")
    assert verify(hf("qwen3"), tmp_path / "maxtext", "--drop", "x").exit_code == 2


def test_another_model_differs(tmp_path):
    convert(tmp_path / "maxtext", "qwen3")
    shutil.copytree(hf("qwen3"), tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    result = verify(tmp_path / "maxtext", tmp_path / "hf")
    assert result.exit_code == 1, result.output


def test_hugging_face_arrays_get_maxtext_names(tmp_path):
    tree = ckpttools.open(convert(tmp_path / "maxtext", "qwen3"))
    named = name_like_maxtext(ckpttools.open(hf("qwen3"))).arrays
    kernel = named["decoder/layers_1/mlp/wi_0/kernel"].read()
    assert np.array_equal(
        kernel, tree["params", "params", "decoder", "layers", "mlp", "wi_0", "kernel"].read()[:, 1]
    )
