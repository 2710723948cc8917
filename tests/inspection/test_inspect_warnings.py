"""`ckpttools.inspection.tree`: each cause planted is named, and nothing is said where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Chunked, Constant, Path, advice, inspect_tree
from support.orbax_items import LITTLE, sharded, values_of, write_item, zarr3

import ckpttools
from ckpttools import DTYPES, LazyArray, Metadata, Tree
from ckpttools.array import storage
from ckpttools.formats.registry import storage_of
from ckpttools.inspection.chunks import inspect_chunks
from ckpttools.inspection.tree import TreeWarning, warnings_of

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


def test_unfinished_step_causes_a_warning():
    (warning,) = declared({("a",): small()}, {"5": "no _METADATA"})
    assert warning == TreeWarning("unfinished-step", "5, next to step 4, is an unfinished save: no _METADATA")


class TestScanLayers:
    def test_missing_scan_layers_in_stacked_tree_causes_a_warning(self):
        (warning,) = declared({LAYER: small()})
        assert warning.name == "no-scan-layers"
        assert "scan_layers=true" in warning.text

    def test_missing_scan_layers_in_unstacked_tree_causes_a_warning(self):
        (warning,) = declared({("params", "params", "decoder", "layers_0", "norm", "scale"): small()})
        assert "scan_layers=false" in warning.text

    def test_missing_scan_layers_in_other_trees_is_ignored(self):
        assert declared({("weights",): small()}) == ()

    def test_contradicting_scan_layers_causes_a_warning(self):
        (warning,) = declared({LAYER: small()}, custom={"scan_layers": False})
        assert warning.name == "contradiction"
        assert "scan_layers=false" in warning.text


class TestGiantChunks:
    def test_giant_chunks_cause_a_warning(self):
        big, bigger = chunked(128, MIB, chunk=(128, MIB)), chunked(256, MIB, chunk=(256, MIB))
        (warning,) = declared({("a", "x"): big, ("a", "y"): bigger, ("b",): small()})
        assert (warning.name, warning.arrays) == ("giant-chunk", ("a/x", "a/y"))
        assert warning.text.startswith("2 arrays are one chunk each, a/y 0.5 GB:")

    @pytest.mark.parametrize("chunk", [(64, MIB), (128, MIB // 2)])
    def test_array_in_two_chunks_has_no_warning(self, chunk: tuple[int, ...]):
        assert declared({("a",): chunked(128, MIB, chunk=chunk)}) == ()

    def test_small_single_chunk_has_no_warning(self):
        assert declared({("a",): chunked(64, MIB, chunk=(64, MIB))}) == ()


class TestFineChunks:
    def test_many_small_chunks_cause_a_warning(self):
        (warning,) = declared({("a",): chunked(2048, 1024, chunk=(2, 1024))})
        assert (warning.name, warning.arrays) == ("fine-chunks", ("a",))
        assert "a into 1,024 chunks of 4.1 kB" in warning.text

    def test_few_small_chunks_have_no_warning(self):
        assert declared({("a",): chunked(2046, 1024, chunk=(2, 1024))}) == ()

    def test_many_large_chunks_have_no_warning(self):
        assert declared({("a",): chunked(2048, 65536, chunk=(1, 65536))}) == ()


class TestMixedDtypes:
    def test_arrays_of_the_rarer_dtype_are_named(self):
        (warning,) = declared({("a",): small(), ("b",): small(), ("norm",): small("float32")})
        assert (warning.name, warning.arrays) == ("mixed-dtypes", ("norm",))
        assert warning.text == "parameters have mixed dtypes: 2 in bfloat16, 1 in float32"

    def test_optimizer_and_integer_dtypes_are_ignored(self):
        leaves = {("a",): small(), ("table",): small("int32"), ("opt_state", 0, "mu"): small("float32")}
        assert declared(leaves) == ()


@given(
    st.dictionaries(
        st.sampled_from([(c,) for c in "abcd"]),
        st.tuples(LENGTHS, LENGTHS, LENGTHS, st.sampled_from((64, 512, 1 << 18))),
    )
)
def test_warnings_name_exactly_the_affected_arrays(sizes: dict[Path, tuple[int, int, int, int]]):
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


def test_chunk_warnings_and_advice_name_the_same_arrays(tmp_path, monkeypatch):
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
    tree = ckpttools.open(write_item(tmp_path / "item", arrays))
    warned = {warning.name.partition("-")[0]: warning.arrays for warning in inspect_tree(tree).warnings}
    advised = {item.subject: item.paths for item in advice(inspect_chunks(tree, storage_of(tree)))}
    assert (warned["giant"], warned["fine"]) == (("giant",), ("fine", "pieces"))
    assert (advised["giant chunks"], advised["over-fine chunks"]) == (("giant",), ("fine", "pieces"))
