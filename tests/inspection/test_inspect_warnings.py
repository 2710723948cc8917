"""`ckpttools.inspection.tree`: each cause planted is named, and nothing is said where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orbax_items import LITTLE, sharded, values_of, write_item, zarr3

from ckpttools.array import storage
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked, Constant
from ckpttools.array.tree import Metadata, Path, Tree
from ckpttools.core.dtypes import DTYPES
from ckpttools.formats.registry import open_tree, storage_of
from ckpttools.inspection.advice import advice
from ckpttools.inspection.chunks import inspect_chunks
from ckpttools.inspection.tree import TreeWarning, inspect_tree, warnings_of

LENGTHS = st.integers(1, 1 << 12)
LAYER: Path = ("params", "params", "decoder", "layers", "mlp", "wi_0", "kernel")
MIB = 1 << 20


def chunked(*shape: int, chunk: tuple[int, ...], dtype: str = "bfloat16") -> Chunked:
    """An array in chunks that nobody reads."""

    def part(index: tuple[int, ...]) -> LazyArray:
        raise AssertionError("a warning must not look at chunks")

    return Chunked(shape, DTYPES[dtype], chunk, part)


def small(dtype: str = "bfloat16") -> Constant:
    return Constant((4, 2), DTYPES[dtype], bytes(DTYPES[dtype].itemsize))


def declared(
    leaves: Mapping[Path, LazyArray], unfinished: Mapping[str, str] | None = None, **metadata: Any
) -> tuple[TreeWarning, ...]:
    """All but the warning that one small array does not show its axis of layers: see test_scan_axis.py."""
    tree = Tree(leaves, Metadata("orbax", step=4, **metadata))
    return tuple(item for item in warnings_of(tree, unfinished or {}) if item.name != "open-scan-axis")


def test_ordinary_trees_have_no_warnings():
    assert declared({LAYER: small(), ("step",): small("int32")}, custom={"scan_layers": True}) == ()
    assert declared({}) == ()


def test_an_unfinished_step():
    (warning,) = declared({("a",): small()}, {"5": "no _METADATA"})
    assert warning == TreeWarning("unfinished-step", "5, beside step 4, is an unfinished save: no _METADATA")


class TestScanLayers:
    def test_missing_in_a_stacked_tree(self):
        (warning,) = declared({LAYER: small()})
        assert warning.name == "no-scan-layers"
        assert "scan_layers=true" in warning.text

    def test_missing_in_an_unstacked_tree(self):
        (warning,) = declared({("params", "params", "decoder", "layers_0", "norm", "scale"): small()})
        assert "scan_layers=false" in warning.text

    def test_no_matter_in_other_trees(self):
        assert declared({("weights",): small()}) == ()

    def test_contradicted_by_the_arrays(self):
        (warning,) = declared({LAYER: small()}, custom={"scan_layers": False})
        assert warning.name == "contradiction"
        assert "scan_layers=false" in warning.text


class TestGiantChunks:
    def test_a_leaf_in_one_giant_chunk(self):
        big, bigger = chunked(128, MIB, chunk=(128, MIB)), chunked(256, MIB, chunk=(256, MIB))
        (warning,) = declared({("a", "x"): big, ("a", "y"): bigger, ("b",): small()})
        assert (warning.name, warning.arrays) == ("giant-chunk", ("a/x", "a/y"))
        assert warning.text.startswith("2 arrays are one chunk each, a/y 0.5 GB:")

    @pytest.mark.parametrize("chunk", [(64, MIB), (128, MIB // 2)])
    def test_cut_in_two_it_is_none(self, chunk: tuple[int, ...]):
        assert declared({("a",): chunked(128, MIB, chunk=chunk)}) == ()

    def test_small_ones_do_not_matter(self):
        assert declared({("a",): chunked(64, MIB, chunk=(64, MIB))}) == ()


class TestFineChunks:
    def test_many_small_chunks(self):
        (warning,) = declared({("a",): chunked(2048, 1024, chunk=(2, 1024))})
        assert (warning.name, warning.arrays) == ("fine-chunks", ("a",))
        assert "a into 1,024 chunks of 4.1 kB" in warning.text

    def test_a_few_small_chunks(self):
        assert declared({("a",): chunked(2046, 1024, chunk=(2, 1024))}) == ()

    def test_many_large_chunks(self):
        assert declared({("a",): chunked(2048, 65536, chunk=(1, 65536))}) == ()


class TestMixedDtypes:
    def test_the_odd_ones_are_named(self):
        (warning,) = declared({("a",): small(), ("b",): small(), ("norm",): small("float32")})
        assert (warning.name, warning.arrays) == ("mixed-dtypes", ("norm",))
        assert warning.text == "parameters have mixed dtypes: 2 in bfloat16, 1 in float32"

    def test_optimizer_and_integers_may_be_other(self):
        leaves = {("a",): small(), ("table",): small("int32"), ("opt_state", 0, "mu"): small("float32")}
        assert declared(leaves) == ()


@given(
    st.dictionaries(
        st.sampled_from([(c,) for c in "abcd"]),
        st.tuples(LENGTHS, LENGTHS, LENGTHS, st.sampled_from((64, 512, 1 << 18))),
    )
)
def test_arrays_named_are_those_with_the_fault(sizes: dict[Path, tuple[int, int, int, int]]):
    """Independent arithmetic: bytes of the array, bytes and number of chunks."""
    arrays = {
        path: chunked(n, m << 6, chunk=(min(a, n), min(b, m << 6))) for path, (n, m, a, b) in sizes.items()
    }
    result = {warning.name: set(warning.arrays) for warning in declared(arrays)}
    giant, fine = set(), set()
    for (name,), array in arrays.items():
        (n, m), (a, b) = array.shape, array.chunk
        count = ((n + a - 1) // a) * ((m + b - 1) // b)
        if count == 1 and 2 * n * m >= 256 * MIB:
            giant.add(name)
        if 2 * a * b < 65536 and count >= 1024:
            fine.add(name)
    assert result == {name: names for name, names in (("giant-chunk", giant), ("fine-chunks", fine)) if names}


def test_advice_about_chunks_is_of_the_same_arrays(tmp_path, monkeypatch):
    """`inspect tree` warns and `inspect chunks` advises by one rule, of pieces where chunks are shards."""
    for name, value in (("GIANT", 400), ("FINE", 20), ("MANY", 10)):
        monkeypatch.setattr(storage, name, value)
    grids = {
        "giant": zarr3([LITTLE], [8, 16]),
        "one": zarr3([LITTLE], [1, 16]),
        "fine": zarr3([LITTLE], [1, 4]),
        "pieces": zarr3([sharded([1, 4], [LITTLE])], [4, 16]),
        "cut": zarr3([LITTLE], [4, 8]),
    }
    arrays = {
        (name,): (how, values_of(np.dtype("float32"), (1, 16) if name == "one" else (8, 16)))
        for name, how in grids.items()
    }
    tree = open_tree(write_item(tmp_path / "item", arrays))
    warned = {warning.name.partition("-")[0]: warning.arrays for warning in inspect_tree(tree).warnings}
    advised = {item.subject: item.paths for item in advice(inspect_chunks(tree, storage_of(tree)))}
    assert (warned["giant"], warned["fine"]) == (("giant",), ("fine", "pieces"))
    assert (advised["giant chunks"], advised["over-fine chunks"]) == (("giant",), ("fine", "pieces"))
