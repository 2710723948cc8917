"""Hypothesis strategies for trees, comparison of trees, and files that refuse to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import hypothesis.strategies as st

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Shape
from ckpttools.testing.strategies import noise, shapes, stored

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ReadRefusedError(AssertionError):
    """Data was read that must not be read."""


@dataclass(frozen=True)
class UnreadableFile:
    """A file of any size that uses no memory and cannot be read, for tests of planning.

    Attributes:
        path: Name for messages.
        size: Apparent size in bytes.
        version: Apparent version.
    """

    path: str
    size: int = 0
    version: str = "0"

    def read_into(self, offset: int, out: Buffer) -> None:
        """Raise an error that names the requested bytes."""
        count = memoryview(out).nbytes
        raise ReadRefusedError(f"{count} bytes of {self.path} were read, from {offset} on")


# Realistic names: some sort badly, and some are prefixes of others.
NAMES = ("kernel", "bias", "layers_9", "layers_10", "layers", "a", "A", "mu", "0", "weight_1")


@st.composite
def trees(
    draw: st.DrawFn,
    dtypes: Sequence[DType] = tuple(DTYPES.values()),
    *,
    structure: bool = True,
    most_leaves: int = 12,
) -> Tree:
    """Return a tree of small arrays.

    Args:
        draw: Provided by hypothesis.
        dtypes: Dtypes of the arrays.
        structure: Whether to include lists, empty leaves, strings and scalars.
        most_leaves: Approximate maximum number of leaves.
    """
    leaves = _flatten(draw(_nested(tuple(dtypes), structure, most_leaves)), ())
    if not any(isinstance(leaf, LazyArray) for leaf in leaves.values()):
        leaves["weight",] = draw(_arrays(tuple(dtypes)))
    scalars = [path for path, item in leaves.items() if _may_be_scalar(item)]
    chosen = draw(st.sets(st.sampled_from(scalars))) if scalars and structure else set()
    custom = draw(st.dictionaries(st.sampled_from(("scan_layers", "note")), st.booleans()))
    return Tree(leaves, Metadata(step=draw(st.integers(0, 99)), custom=custom, scalars=frozenset(chosen)))


def many_leaves(count: int, dtype: DType = DTYPES["float32"]) -> Tree:
    """Return a tree of `count` small arrays whose names sort badly as text."""
    leaves: dict[Path, Leaf] = {
        ("params", f"layers_{k}", "kernel"): stored(noise((3, 2), dtype, k), dtype) for k in range(count)
    }
    return Tree(leaves, Metadata(step=0))


@cache
def _nested(dtypes: tuple[DType, ...], structure: bool, most_leaves: int) -> st.SearchStrategy[object]:
    """Return a cached strategy, because validating a recursive strategy takes longer than a draw."""
    leaf = st.one_of(_arrays(dtypes), *([_others()] if structure else []))
    inner = st.recursive(leaf, lambda below: _nodes(below, structure), max_leaves=most_leaves)
    return st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4)


@cache
def _arrays(dtypes: tuple[DType, ...]) -> st.SearchStrategy[LazyArray]:
    return st.builds(_array, shapes(max_rank=4, limit=400), st.sampled_from(dtypes), st.integers(0, 99))


def _array(shape: Shape, dtype: DType, seed: int) -> LazyArray:
    # Some formats do not support empty arrays, so every array has an element.
    shape = shape if prod(shape) else (1,)
    return stored(noise(shape, dtype, seed), dtype)


def _others() -> st.SearchStrategy[Leaf]:
    kinds = st.sampled_from(("None", "Dict", "List"))
    return st.one_of(st.builds(Empty, kinds), st.builds(Text, st.text(max_size=8)))


def _nodes(below: st.SearchStrategy[object], structure: bool) -> st.SearchStrategy[object]:
    mappings = st.dictionaries(st.sampled_from(NAMES), below, min_size=1, max_size=3)
    return st.one_of(mappings, st.lists(below, min_size=1, max_size=3)) if structure else mappings


def _flatten(node: object, path: Path) -> dict[Path, Leaf]:
    if isinstance(node, Mapping):
        return {p: leaf for key, below in node.items() for p, leaf in _flatten(below, (*path, key)).items()}
    if isinstance(node, list):
        return {p: leaf for k, below in enumerate(node) for p, leaf in _flatten(below, (*path, k)).items()}
    assert isinstance(node, LazyArray | Empty | Text)
    return {path: node}


def _may_be_scalar(leaf: Leaf) -> bool:
    plain = ("int64", "float64", "bool")
    return isinstance(leaf, LazyArray) and leaf.shape == () and leaf.dtype.name in plain


def unambiguous(tree: Tree) -> bool:
    """Return whether all paths stay distinct when keys are joined with dots."""
    return len({dotted(path) for path in tree}) == len(tree)


def assert_same(got: Tree, expected: Tree) -> None:
    """Assert equal paths and key types, bit-identical leaves, and equal metadata that formats store."""
    assert set(got) == set(expected), sorted(map(keystr, set(got) ^ set(expected)))
    for path, leaf in expected.items():
        assert_same_leaf(got[path], leaf, path)
    assert got.metadata.scalars == expected.metadata.scalars
    assert dict(got.metadata.custom) == dict(expected.metadata.custom)
    assert got.metadata.step == expected.metadata.step


def assert_same_leaf(got: Leaf, expected: Leaf, path: Path) -> None:
    """Assert equal kinds and contents of two leaves."""
    if not isinstance(expected, LazyArray):
        assert got == expected, keystr(path)
        return
    assert isinstance(got, LazyArray), keystr(path)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), keystr(path)
    # Compare bytes, because NaN is not equal to itself.
    assert got.read().tobytes() == expected.read().tobytes(), keystr(path)
