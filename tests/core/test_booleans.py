"""Bytes that are no booleans, and names that are others': refused with the name, in whatever is read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.command_line import run
from support.internals import OrbaxWriter, SafetensorsWriter, ZarrWriter, keystr

import ckpttools
from ckpttools import DTYPES, FormatError, Metadata, Tree
from ckpttools.testing.conformance import write
from ckpttools.testing.strategies import noise, stored

BOOL, F32 = DTYPES["bool"], DTYPES["float32"]


@pytest.fixture
def odd(tmp_path):
    """Safetensors with a mask of which one byte is 2."""
    location = tmp_path / "odd"
    tree = Tree({("mask",): stored(np.ones((8, 8), np.uint8), BOOL), ("w",): stored(noise((8, 8), F32), F32)})
    write(tree, SafetensorsWriter(), location)
    file = location / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = data.index(b"\1" * 64)
    data[start + 13] = 2
    file.write_bytes(data)
    return location


def orbax_of(odd, location):
    """The same in Orbax, as another program wrote it."""
    tree = ckpttools.open(odd)
    whole = {**tree.leaves, ("mask",): stored(np.ones((8, 8), np.uint8), BOOL)}
    write(Tree(whole, Metadata(step=0)), OrbaxWriter(step=0), location)
    (file,) = (location / "0" / "items" / "d").glob("data*")
    data = file.read_bytes()
    at = data.index(b"\1" * 64)
    file.write_bytes(data[:at] + b"\1" * 13 + b"\2" + b"\1" * 50 + data[at + 64 :])
    return location


def test_commands_name_the_array_with_invalid_booleans(odd, tmp_path):
    orbax = orbax_of(odd, tmp_path / "orbax")
    # An interrupted conversion keeps what it has written, for the same command.
    outs = [tmp_path / f"out-{number}" for number in range(8)]
    for words in (
        ("convert", "to-orbax", odd, outs[0]),
        ("convert", "to-orbax", odd, outs[1], "--reference"),
        ("convert", "to-orbax", odd, outs[2], "--compression", "zstd"),
        ("convert", "to-zarr3", odd, outs[3]),
        ("convert", "to-safetensors", orbax, outs[4]),
        ("select", orbax, outs[5], "--drop", "w"),
        ("select", orbax, outs[6], "--drop", "w", "--copy"),
        ("cast", odd, outs[7], "--dtype-map", "mask=uint8"),
        ("inspect", "stats", odd),
        ("hash", orbax),
        ("diff", odd, orbax),
        ("verify", odd, "--against", orbax),
    ):
        output = run(*words, code=3)
        assert "an array of booleans has a byte that is not a boolean" in output, words
        assert "mask" in output and "0 or 1 in every byte" in output, words
    assert not any(out.exists() for out in outs)


def test_invalid_boolean_error_names_the_file(odd, tmp_path):
    orbax = orbax_of(odd, tmp_path / "orbax")
    for location, file in ((odd, "odd/model.safetensors"), (orbax, "/d/")):
        mask = ckpttools.open(location).arrays["mask",]
        for read in (mask.read, lambda m=mask: m[1, 2:6], lambda m=mask: np.asarray(m)):
            with pytest.raises(FormatError, match="a byte that is not a boolean") as error:
                read()
            assert file in error.value.location
        assert mask[0].all()


def test_valid_booleans_are_accepted(tmp_path):
    tree = Tree({("mask",): stored(noise((8, 8), BOOL), BOOL)}, Metadata(step=0))
    for writer in (OrbaxWriter(), ZarrWriter(), SafetensorsWriter()):
        write(tree, writer, tmp_path / writer.name)
        got = ckpttools.open(tmp_path / writer.name)
        assert got.arrays["mask",].read().tobytes() == tree.arrays["mask",].read().tobytes()


class TestNames:
    @pytest.mark.parametrize(
        "path",
        [("a/",), ("/a",), ("a//b",), ("",), ("a", ""), ("a", "", "b"), ("", "a"), ("a", "b/")],
        ids=str,
    )
    @pytest.mark.parametrize("writer", [OrbaxWriter(), OrbaxWriter(ocdbt=False), ZarrWriter()], ids=str)
    def test_empty_name_parts_are_refused(self, path, writer):
        tree = Tree({path: stored(noise((2,), F32), F32)}, Metadata(step=0))
        with pytest.raises(FormatError) as error:
            writer.layout(tree, 1 << 20)
        assert json.dumps(path) in error.value.message or f"in {keystr(path)}" in error.value.message

    def test_tensorstore_confuses_trailing_slash_names(self, tmp_path):
        """Why: what was written as `a/` is read as `a`."""
        import tensorstore as ts

        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}", "path": "a/"}}
        spec |= {"metadata": {"shape": [2], "data_type": "int8"}}
        ts.open(spec, create=True, open=True).result().write(np.array([1, 2], np.int8)).result()
        spec["kvstore"] = spec["kvstore"] | {"path": "a"}
        assert ts.open(spec, open=True).result().read().result().tolist() == [1, 2]

    @pytest.mark.parametrize("name", ["hf", "ocdbt.process_0"])
    def test_item_directory_names_are_refused(self, name):
        tree = Tree({(name,): stored(noise((2,), F32), F32)}, Metadata(step=0))
        with pytest.raises(FormatError, match=name):
            OrbaxWriter(ocdbt=False).layout(tree, 1 << 20)
        OrbaxWriter().layout(tree, 1 << 20)
