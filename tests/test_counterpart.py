"""`ckpt verify` and `ckpt hash` between Hugging Face and MaxText: a conversion proves equal, nothing else."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from golden_data import FAMILIES, GOLDEN, SCAN_NAMES, convert

from ckpttools.cli.main import main
from ckpttools.convert import Resources
from ckpttools.counterpart import counterpart, in_maxtext_names
from ckpttools.dtypes import DTYPES
from ckpttools.formats.registry import open_tree
from ckpttools.maxtext_to_hf import ToHuggingFace, plan_to_huggingface

SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def hf(family):
    return GOLDEN / family / "hf"


def verify(made, source, *options):
    arguments = ["verify", made, "--against", source, "--no-progress", *options]
    return CliRunner().invoke(main, [str(each) for each in arguments])


def digest(path, *options):
    result = CliRunner().invoke(main, ["hash", str(path), "--no-progress", "--parameters", *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()[-2]


@SCANS
@EVERY_FAMILY
def test_a_conversion_and_its_way_back_are_proved(tmp_path, family, scan):
    convert(tmp_path / "maxtext", family, scan=scan, carry=True)
    assert verify(tmp_path / "maxtext", hf(family)).exit_code == 0
    plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
    result = verify(tmp_path / "hf", tmp_path / "maxtext")
    assert result.exit_code == 0, result.output


@EVERY_FAMILY
def test_one_digest_for_all_layouts(tmp_path, family):
    made = [convert(tmp_path / str(scan), family, scan=scan) for scan in (True, False)]
    assert len({digest(hf(family), "--as", "maxtext"), *map(digest, made)}) == 1


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"pad_vocab": 300}, {"scan_axis": 0}],
    ids=lambda options: next(iter(options)),
)
def test_the_options_of_a_conversion_are_told_from_what_it_made(tmp_path, options):
    convert(tmp_path / "maxtext", "llama3.1", **options)
    result = verify(tmp_path / "maxtext", hf("llama3.1"))
    assert result.exit_code == 0, result.output


def test_a_cast_is_proved_when_it_is_said(tmp_path):
    convert(tmp_path / "maxtext", "qwen3", dtype=DTYPES["float16"])
    assert verify(tmp_path / "maxtext", hf("qwen3")).exit_code == 1
    assert verify(tmp_path / "maxtext", hf("qwen3"), "--cast").exit_code == 0


def test_one_bit_is_found(tmp_path):
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


def test_another_model_is_refused(tmp_path):
    convert(tmp_path / "maxtext", "qwen3")
    shutil.copytree(hf("qwen3"), tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    result = verify(tmp_path / "maxtext", tmp_path / "hf")
    assert result.exit_code == 3
    assert "Traceback" not in result.output


def test_two_of_a_kind_need_no_counterpart(tmp_path):
    tree = open_tree(convert(tmp_path / "maxtext", "qwen3"))
    assert counterpart(tree, tree) is None
    named = in_maxtext_names(open_tree(hf("qwen3")))
    kernel = named["decoder/layers_1/mlp/wi_0/kernel"].read()
    assert np.array_equal(
        kernel, tree["params", "params", "decoder", "layers", "mlp", "wi_0", "kernel"].read()[:, 1]
    )
