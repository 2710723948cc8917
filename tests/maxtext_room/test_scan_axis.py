"""Where all lengths are equal, shapes do not show on which axis layers are stacked: it is known, or asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import ended, run, succeed
from support.golden_data import leaves_by_package
from support.hf_models import write_llama
from support.trees import lazy

import ckpttools
from ckpttools import FormatError, Tree, UnstackLayers
from ckpttools.maxtext.layers import LayerNotes, with_layer_notes

# As many layers as anything else has.
SQUARE = {
    "num_hidden_layers": 4,
    "hidden_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 4,
    "vocab_size": 8,
}
AXES = pytest.mark.parametrize("axis", [0, 1])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("square") / "hf"
    write_llama(directory, dtype="float32", **SQUARE)
    return directory


@pytest.fixture(scope="module", params=[0, 1])
def stacked(request, model, tmp_path_factory) -> tuple[int, Path]:
    location = tmp_path_factory.mktemp("stacked") / "out"
    run("convert", "hf-to-maxtext", model, location, "--scan-axis", request.param)
    return request.param, location


@pytest.fixture(scope="module")
def single(model, tmp_path_factory) -> Path:
    location = tmp_path_factory.mktemp("single") / "out"
    run("convert", "hf-to-maxtext", model, location, "--no-scan")
    return location


@pytest.fixture
def foreign(stacked, tmp_path) -> tuple[int, Path]:
    """The same as somebody else writes it, who notes nothing."""
    axis, location = stacked
    tree = ckpttools.open(location)
    ckpttools.save(with_layer_notes(tree, LayerNotes()), tmp_path / "foreign")
    return axis, tmp_path / "foreign"


class TestRecordedScanAxis:
    def test_unstack_uses_the_recorded_scan_axis(self, stacked, single, tmp_path):
        run("unstack", stacked[1], tmp_path / "single")
        assert leaves_by_package(ckpttools.open(tmp_path / "single")) == leaves_by_package(
            ckpttools.open(single)
        )

    def test_maxtext_to_hf_uses_the_recorded_scan_axis(self, stacked, model, tmp_path):
        run("convert", "maxtext-to-hf", stacked[1], tmp_path / "hf")
        expected, built = (load_file(item / "model.safetensors") for item in (model, tmp_path / "hf"))
        assert expected.keys() == built.keys()
        assert all((expected[name] == built[name]).all() for name in expected)

    def test_comparisons_detect_the_scan_axis(self, stacked, single, model):
        assert "equal" in succeed("diff", stacked[1], single, "--no-progress").output
        succeed("verify", stacked[1], "--against", single, "--no-progress")
        succeed("verify", stacked[1], "--against", model, "--no-progress")
        one, other = (ckpttools.hash(item) for item in (stacked[1], single))
        assert (one.parameters, one.remarks) == (other.parameters, ())

    def test_stack_records_the_scan_axis(self, single, tmp_path):
        for axis in (0, 1):
            run("stack", single, tmp_path / f"stacked{axis}", "--scan-axis", axis)
            run("unstack", tmp_path / f"stacked{axis}", tmp_path / f"single{axis}")
            built = ckpttools.open(tmp_path / f"single{axis}")
            assert leaves_by_package(built) == leaves_by_package(ckpttools.open(single))

    def test_inspect_shows_the_recorded_scan_axis(self, stacked):
        report = ckpttools.inspect(stacked[1])
        assert report.scan_axis == stacked[0]
        assert "open-scan-axis" not in [warning.name for warning in report.warnings]

    def test_scan_axis_is_recorded_only_if_ambiguous(self, tmp_path):
        write_llama(tmp_path / "hf", vocab_size=8)
        run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "out", "--scan-axis", 0)
        assert ckpttools.open(tmp_path / "out").metadata.custom == {"scan_layers": True}


class TestUnknownScanAxis:
    def test_writing_requires_an_explicit_scan_axis(self, foreign, tmp_path):
        for words in (("unstack",), ("convert", "maxtext-to-hf")):
            told = run(*words, foreign[1], tmp_path / "out", code=3)
            assert "array shapes do not show the axis on which layers are stacked" in told
            assert "--scan-axis 1 if MaxText wrote it with its own param_scan_axis" in told
            assert not (tmp_path / "out").exists()

    def test_explicit_scan_axis_is_used(self, foreign, single, model, tmp_path):
        axis, location = foreign
        run("unstack", location, tmp_path / "single", "--scan-axis", axis)
        assert leaves_by_package(ckpttools.open(tmp_path / "single")) == leaves_by_package(
            ckpttools.open(single)
        )
        run("convert", "maxtext-to-hf", location, tmp_path / "hf", "--scan-axis", axis)
        expected, built = (load_file(item / "model.safetensors") for item in (model, tmp_path / "hf"))
        assert all((expected[name] == built[name]).all() for name in expected)

    def test_comparison_reports_assumed_scan_axis(self, foreign, single, model):
        axis, location = foreign
        declared = (
            "array shapes do not show the axis on which layers are stacked; assumed 1, MaxText's default"
        )
        code = 0 if axis == 1 else 1
        for words in (("diff", location, single), ("verify", location, "--against", single)):
            assert declared in " ".join(ended(*words, code=code).output.split())
        output = ended("verify", model, "--against", location, code=code).output
        assert declared in " ".join(output.split())
        assert declared in " ".join(succeed("hash", location, "--no-progress").output.split())
        assert declared in " ".join(succeed("inspect", "tree", location).output.split())


def test_selected_arrays_keep_their_scan_axis(tmp_path):
    """All of one query may have its layers anywhere; the whole model shows where they are."""
    write_llama(tmp_path / "hf", vocab_size=8)
    run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "out", "--scan-axis", 0)
    run("select", tmp_path / "out", tmp_path / "query", "--keep", "*query*")
    run("unstack", tmp_path / "query", tmp_path / "single")
    run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "whole", "--no-scan")
    expected = leaves_by_package(ckpttools.open(tmp_path / "whole"))
    built = leaves_by_package(ckpttools.open(tmp_path / "single"))
    assert built == {name: expected[name] for name in built} != {}


@AXES
def test_routers_with_as_many_experts_as_layers_round_trip(axis):
    """What is on axis 0 whatever the scan axis is found by the axis that the user says."""
    values = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    path = ("params", "params", "decoder", "moe_layers", "DeepSeekMoeBlock_0", "MoeBlock_0", "gate")
    kernel = np.arange(8.0, dtype=np.float32).reshape(2, 2, 2)
    aux = ("nnx_aux", "model", *path[2:], "bias")
    tree = Tree({(*path, "kernel"): lazy(kernel), aux: lazy(values)})
    with pytest.raises(FormatError, match="the axis on which"):
        UnstackLayers()(tree)
    built = UnstackLayers(axis)(tree).tree
    for layer in range(2):
        key = f"moe_layers_{layer}"
        assert (built.arrays[(*aux[:3], key, *aux[4:])].read() == values[layer]).all()
        assert (built.arrays[(*path[:3], key, *path[4:], "kernel")].read() == kernel.take(layer, axis)).all()
