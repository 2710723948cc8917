"""Every array name is written so that it can be read back, or is refused before anything is written."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.internals import Constant

import ckpttools
from ckpttools import DTYPES, CheckpointError, Empty, Metadata, Text, Tree

FORMATS = {
    "orbax": {"format": "orbax"},
    "orbax-step": {"format": "orbax", "level": "step"},
    "orbax-item": {"format": "orbax", "level": "item"},
    "orbax-zarr2": {"format": "orbax", "level": "item", "zarr3": False},
    "orbax-files": {"format": "orbax", "ocdbt": False},
    "orbax-files-item": {"format": "orbax", "level": "item", "ocdbt": False},
    "orbax-files-zarr2": {"format": "orbax", "level": "item", "ocdbt": False, "zarr3": False},
    "zarr3": {"format": "zarr3"},
    "safetensors": {"format": "safetensors"},
}
# Names that a file or directory of some format has, or that file systems, URLs and shells treat specially.
RESERVED = (
    *("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "_strings.json", "array_metadatas", "process_0"),
    *("commit_success.txt", "manifest.ocdbt", "ocdbt.process_0", "d", "data", "index", "orbax.checkpoint"),
    *("zarr.json", ".zarray", ".zgroup", ".zattrs", "c", "0", "0.0", "c.0", "metadata.json", ".metadata"),
    *("checkpoint", "checkpoint_10", "checkpoints", "step_10", "100", "items", "default", "hf", "metrics"),
    *("config.json", "model.safetensors", "model.safetensors.index.json", "__metadata__", "__0_0.distcp"),
    *("latest", "x.pt", "x.msgpack", "x.partial", "x.orbax-checkpoint-tmp", "__lock", "ckpttools.tree"),
    *("", ".", "..", "...", "a..", ".a", " ", "a ", "a/", "/a", "a//b", "a/b", "a\\b", "a.b", "CON", "nul"),
    *("x" * 255, "x" * 256, "é" * 128, "a" * 2000, "a\0b", "a\nb", "\x1b[31m", "\ud800", "A", "a", "é", "𝔘"),
    *("*", "?", "[a]", "%2e", "~", "$HOME", "-rf", "a'b", 'a"b', "<b>"),
)
NAMES = st.one_of(st.sampled_from(RESERVED), st.text(max_size=5))
PATHS = st.lists(st.one_of(NAMES, NAMES, st.integers(0, 2)), min_size=1, max_size=3).map(tuple)


def array(number, *shape):
    return Constant(shape, DTYPES["float32"], np.float32(number).tobytes())


@st.composite
def trees(draw):
    """Draw trees of up to three leaves: an array, then arrays of other shapes, strings and empty nodes."""
    paths = draw(st.lists(PATHS, min_size=1, max_size=3, unique=True))
    others = (array(2), array(3, 2, 3), Text("text"), Empty("Dict"))
    leaves = {path: draw(st.sampled_from(others)) for path in paths[1:]}
    return Tree({paths[0]: array(1, 2), **leaves}, Metadata())


def check_round_trip(tree, format, location):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ckpttools.save(tree, location / "out", **FORMATS[format])
        except CheckpointError:
            assert not (location / "out").exists()
            return False
        got = ckpttools.open(location / "out")
    assert set(got.leaves) == set(tree.leaves)
    for path, leaf in tree.leaves.items():
        if path in tree.arrays:
            assert np.array_equal(got.arrays[path].read(), tree.arrays[path].read()), path
        else:
            assert got.leaves[path] == leaf, path
    return True


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=20)
@given(tree=trees())
@example(tree=Tree({("a" * 2000, "b" * 2000, "c" * 2000): array(1, 2)}))
@example(tree=Tree({("a",) * 250: array(1, 2)}))
@example(tree=Tree({("a",): array(1, 2), ("a", "b"): array(2)}))
@example(tree=Tree({("a", 0): array(1, 2), ("a", "0"): array(2)}))
def test_written_tree_reads_back_unchanged(format, tree, tmp_path_factory):
    check_round_trip(tree, format, tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("format", ["orbax-files-item", "zarr3"])
@pytest.mark.parametrize("name", RESERVED, ids=lambda name: ascii(name[:20]))
def test_reserved_names_read_back_in_every_position(name, format, tmp_path_factory):
    for paths in (
        [(name,)],
        [(name,), ("b",)],
        [(name, "w"), ("b",)],
        [("p", name), ("b",)],
        [("p", name, "w")],
    ):
        tree = Tree({path: array(number, 2) for number, path in enumerate(paths)})
        check_round_trip(tree, format, tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("format", ["zarr3", "orbax", "safetensors"])
@pytest.mark.parametrize("name", ["_METADATA", "checkpoint", "config.json", "zarr.json", "..", "_METADATA/w"])
def test_remap_to_a_reserved_name_reads_back(name, format, tmp_path):
    values = {"a": np.ones((2, 2), np.float32), "b": np.zeros((2, 2), np.float32)}
    (tmp_path / "model").mkdir()
    save_file(values, tmp_path / "model" / "model.safetensors")
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[rules]]\nfrom = "a"\nto = "{name}"\n')
    done = ckpt("remap", tmp_path / "model", tmp_path / "out", "--map", rules, "--to", format)
    if done.exit_code:
        assert done.exit_code in (2, 3) and "Error:" in done.output, done.output
        return
    tree = ckpttools.open(tmp_path / "out")
    assert len(tree.arrays) == 2 and all(item.read().sum() in (0, 4) for item in tree.arrays.values())
    assert ckpt("hash", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "manifest.ocdbt", "ocdbt.process_0", ".metadata"])
def test_doctor_recognizes_zarr_with_reserved_keys(name, tmp_path):
    tree = Tree({(name, "w"): array(1, 2), ("b",): array(2, 2)})
    ckpttools.save(tree, tmp_path / "out", format="zarr3")
    report = ckpt("doctor", tmp_path / "out")
    assert report.exit_code == 0 and "_CHECKPOINT_METADATA" not in report.output, report.output
    listing = ckpt("inspect", "tree", tmp_path / "out").output
    assert "zarr3" in listing and "several kinds" not in listing, listing
