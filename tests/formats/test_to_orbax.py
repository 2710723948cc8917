"""`ckpt convert to-orbax` and `to-zarr3`: from any format, and from Orbax to Orbax, with nothing lost."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import command_line
from support.golden_data import golden_arrays, golden_checkpoint, golden_leaves, leaves_by_package
from support.internals import OrbaxWriter, ZarrWriter
from support.locations import HF
from support.safetensors_files import packed
from support.stored_trees import EVERYTHING, STEP, array, write

import ckpttools
from ckpttools import DTYPES, Metadata, Tree
from ckpttools.testing.strategies import assert_same

run = partial(command_line.run, "convert")

STORAGE = {
    "default": [],
    "zarr2": ["--zarr2"],
    "files": ["--no-ocdbt"],
    "files-zarr2-zstd": ["--no-ocdbt", "--zarr2", "--compression", "zstd:1"],
    "zstd": ["--compression", "zstd"],
    "many": ["--target-data-file-size", "1kB"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run directory with every kind of leaf."""
    location = tmp_path_factory.mktemp("source") / "run"
    write(EVERYTHING, OrbaxWriter(step=None), location)
    return location


class TestOrbaxToOrbax:
    @pytest.mark.parametrize("options", STORAGE.values(), ids=STORAGE)
    def test_conversion_keeps_every_leaf(self, source, tmp_path, options):
        run("to-orbax", source, tmp_path / "out", *options)
        back = ckpttools.open(tmp_path / "out")
        assert_same(back, EVERYTHING)
        assert list(back) == list(EVERYTHING)
        assert back.metadata.key_impls == EVERYTHING.metadata.key_impls

    def test_tree_metadata_is_unchanged(self, source, tmp_path):
        run("to-orbax", source, tmp_path / "out")
        ours, theirs = (
            json.loads((location / str(STEP) / "items" / "_METADATA").read_bytes())
            for location in (source, tmp_path / "out")
        )
        assert ours == theirs

    @pytest.mark.parametrize("scan", [True, False])
    def test_orbax_checkpoint_converts_to_orbax(self, tmp_path, scan):
        run("to-orbax", golden_checkpoint(scan), tmp_path / "out", "--no-ocdbt", "--compression", "zstd")
        tree = ckpttools.open(tmp_path / "out")
        assert leaves_by_package(tree) == golden_leaves("llama3.1", scan)
        assert tree.metadata.custom == ckpttools.open(golden_checkpoint(scan)).metadata.custom

    def test_step_and_item_options_are_applied(self, source, tmp_path):
        run("to-orbax", source, tmp_path / "out", "--step", STEP, "--as-step", 12, "--item", "state")
        assert (tmp_path / "out" / "12" / "state" / "_METADATA").is_file()
        assert ckpttools.open(tmp_path / "out").metadata.step == 12

    def test_step_of_the_source_is_kept(self, source, tmp_path):
        run("to-orbax", source, tmp_path / "out")
        assert [location.name for location in (tmp_path / "out").iterdir()] == [str(STEP)]

    def test_dtype_option_casts_floats(self, tmp_path):
        run("to-orbax", golden_checkpoint(True), tmp_path / "out", "--dtype", "float32")
        dtypes = {item.dtype.name for item in ckpttools.open(tmp_path / "out").arrays.values()}
        assert dtypes == {"float32", "int64"}


class TestZarr:
    @pytest.mark.parametrize("options", [[], ["--compression", "zstd:9"]], ids=str)
    def test_remap_round_trip_restores_the_tree(self, source, tmp_path, options):
        run("to-zarr3", source, tmp_path / "z", *options)
        assert_same(ckpttools.open(tmp_path / "z"), EVERYTHING)
        run("to-orbax", tmp_path / "z", tmp_path / "back")
        back = ckpttools.open(tmp_path / "back")
        assert_same(back, EVERYTHING)
        assert list(back) == list(EVERYTHING)

    def test_orbax_checkpoint_converts_to_zarr(self, tmp_path):
        run("to-zarr3", golden_checkpoint(True), tmp_path / "z")
        tree = ckpttools.open(tmp_path / "z")
        assert leaves_by_package(tree) == golden_leaves("llama3.1", True)
        assert len(tree.arrays) == len(golden_arrays("llama3.1", True))


@pytest.mark.parametrize("options", STORAGE.values(), ids=STORAGE)
def test_hf_to_maxtext_writes_every_layout(tmp_path, options):
    run("hf-to-maxtext", HF, tmp_path / "out", *options)
    assert leaves_by_package(ckpttools.open(tmp_path / "out")) == golden_leaves("llama3.1", True)


def test_safetensors_convert_to_orbax(tmp_path):
    run("to-orbax", HF, tmp_path / "out")
    assert (tmp_path / "out" / "0" / "items" / "manifest.ocdbt").is_file()
    ours, theirs = ckpttools.open(tmp_path / "out"), ckpttools.open(HF)
    assert leaves_by_package(ours) == leaves_by_package(theirs)


class TestMessages:
    def test_unknown_compression_is_refused(self, source, tmp_path):
        output = run("to-orbax", source, tmp_path / "out", "--compression", "lz4", code=2)
        assert "none, zstd or zstd:LEVEL" in output

    def test_target_size_without_ocdbt_is_refused(self, source, tmp_path):
        options = ("--no-ocdbt", "--target-data-file-size", "1GB")
        output = run("to-orbax", source, tmp_path / "out", *options, code=2)
        assert "a target size for data files does not apply" in output

    def test_invalid_item_is_refused(self, source, tmp_path):
        assert "cannot be the name of an item" in run(
            "to-orbax", source, tmp_path / "out", "--item", "a/b", code=2
        )

    def test_backslash_without_ocdbt_is_refused(self, tmp_path):
        """Orbax looks for `a/b` there."""
        write(Tree({("a\\b",): array("float32", 2)}, Metadata(step=0)), OrbaxWriter(), tmp_path / "in")
        output = run("to-orbax", tmp_path / "in", tmp_path / "out", "--no-ocdbt", code=3)
        assert "invalid directory names" in output
        assert not (tmp_path / "out").exists()
        run("to-orbax", tmp_path / "in", tmp_path / "out")
        assert list(ckpttools.open(tmp_path / "out")) == [("a\\b",)]

    def test_arrays_without_elements_are_refused(self, tmp_path):
        write(Tree({("w",): array("float32", 0)}, Metadata(step=0)), ZarrWriter(), tmp_path / "z")
        output = run("to-orbax", tmp_path / "z", tmp_path / "out", code=3)
        assert "without elements" in output
        assert "w: [0]" in output
        assert not (tmp_path / "out.partial").exists()

    def test_dry_run_writes_nothing(self, source, tmp_path):
        assert "Dry run" in run("to-zarr3", source, tmp_path / "out", "--dry-run")
        assert list(tmp_path.iterdir()) == []


def test_suggested_cast_of_small_floats_works(tmp_path):
    tensors = {"w": ("F6_E2M3", [4], bytes(3)), "v": ("F32", [1], bytes(4))}
    (tmp_path / "model.safetensors").write_bytes(packed(tensors))
    output = run("to-orbax", tmp_path / "model.safetensors", tmp_path / "out", code=3)
    assert "zarr v3 does not support float6_e2m3fn" in output
    run("to-orbax", tmp_path / "model.safetensors", tmp_path / "out", "--dtype", "bfloat16")
    assert ckpttools.open(tmp_path / "out").arrays["w",].dtype is DTYPES["bfloat16"]


class TestItemName:
    """The copy restores with the same call as the source."""

    @pytest.mark.parametrize("how", [(), ("--no-ocdbt",), ("--compression", "zstd"), ("--zarr2",)])
    @pytest.mark.parametrize("below", [(), ("7",), ("7", "default")])
    def test_default_item_is_kept(self, below, how, tmp_path):
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            manager.save(7, args=ocp.args.StandardSave({"w": np.ones(4)}))
        run("to-orbax", tmp_path.joinpath("run", *below), tmp_path / "out", *how)
        with ocp.CheckpointManager(tmp_path / "out") as manager:
            assert np.array_equal(manager.restore(7, args=ocp.args.StandardRestore())["w"], np.ones(4))

    @pytest.mark.parametrize("name", ["state", "params", "items"])
    def test_named_item_is_kept(self, name, tmp_path):
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            manager.save(7, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave({"w": np.ones(4)})}))
        run("to-orbax", tmp_path / "run", tmp_path / "out")
        run("to-orbax", tmp_path / "run", tmp_path / "other", "--item", "other")
        assert (tmp_path / "out" / "7" / name / "_METADATA").is_file()
        assert (tmp_path / "other" / "7" / "other" / "_METADATA").is_file()
        with ocp.CheckpointManager(tmp_path / "out") as manager:
            restored = manager.restore(7, args=ocp.args.Composite(**{name: ocp.args.PyTreeRestore()}))
        assert np.array_equal(restored[name]["w"], np.ones(4))

    @pytest.mark.parametrize("level", ["run", "step"])
    def test_item_of_a_step_without_a_number_is_kept(self, level, tmp_path):
        ocp.v1.save(tmp_path / "saved", {"w": np.ones(4)})
        run("to-orbax", tmp_path / "saved", tmp_path / "out", "--level", level)
        (item,) = (tmp_path / "out").rglob("_METADATA")
        assert item.parent.name == "state"
        assert np.array_equal(ocp.v1.load(item.parent.parent)["w"], np.ones(4))
