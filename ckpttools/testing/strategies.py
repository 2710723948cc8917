"""Hypothesis strategies for the package's data types, each lazy array with its expected contents.

Plug-ins and forks test their own formats and rows with these; the package itself does not import this
module.

Values inside a draw come from functions of `draw` or from cached strategies, because hypothesis validates
every new strategy when it is first used, which took four fifths of the time of the array tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from hypothesis import strategies as st

from ckpttools.array.lazy import LazyArray
from ckpttools.array.mean import mean
from ckpttools.array.nodes import Chunked, Constant, Stored, concat, elementwise, relayout, stack, take
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Region, Shape, grid_cell, grid_indices
from ckpttools.mapping.values import Cast
from ckpttools.stores.memory import Bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


_Thing = TypeVar("_Thing")
WHOLE = tuple(dtype for dtype in DTYPES.values() if not dtype.packed)
PACKED = tuple(dtype for dtype in DTYPES.values() if dtype.packed)
_SIDES = (1, 1, 2, 3, 5, 7)
_FLOATS = ("bfloat16", "float8_e4m3fn", "float32", "float64")
# Larger arrays are not nested further, because every node may add axes and elements to its source.
_MAX_AXES, _MAX_ELEMENTS = 6, 400


class Known(NamedTuple):
    """A lazy array and its expected contents, as unsigned carriers."""

    array: LazyArray
    truth: np.ndarray


@cache
def shapes(min_rank: int = 0, max_rank: int = 5, limit: int = 2000) -> st.SearchStrategy[Shape]:
    """Return shapes with at most `limit` elements, mostly with odd lengths and some of length one."""
    sides = st.lists(st.sampled_from(_SIDES), min_size=min_rank, max_size=max_rank)
    return sides.map(tuple).filter(lambda shape: prod(shape) <= limit)


def regions(shape: Sequence[int], empty: bool = False) -> st.SearchStrategy[Region]:
    """Return regions of an array of `shape`, including full axes and single coordinates; optionally empty."""
    return _regions(tuple(shape), empty)


@cache
@st.composite
def _regions(draw: st.DrawFn, shape: Shape, empty: bool) -> Region:
    starts: list[int] = []
    stops: list[int] = []
    for length in shape:
        start = draw(st.integers(0, length if empty else length - 1))
        stop = draw(st.integers(start if empty else start + 1, length))
        is_complete = draw(st.booleans())
        starts.append(0 if is_complete else start)
        stops.append(length if is_complete else stop)
    return Region(tuple(starts), tuple(stops))


def chunk_shapes(shape: Sequence[int], max_excess: int = 0) -> st.SearchStrategy[Shape]:
    """Return chunk shapes for an array of `shape`, up to `max_excess` longer than the array on each axis."""
    return _chunk_shapes(tuple(shape), max_excess)


@cache
def _chunk_shapes(shape: Shape, max_excess: int) -> st.SearchStrategy[Shape]:
    return st.tuples(*(st.integers(1, length + max_excess) for length in shape))


_one_of = cache(st.sampled_from)
_in_any_order = cache(st.permutations)


def tilings(shape: Sequence[int]) -> st.SearchStrategy[list[Region]]:
    """Return all cells of a random grid over `shape`, in random order."""
    grids = chunk_shapes(shape).map(
        lambda chunk: [grid_cell(shape, chunk, index) for index in grid_indices(shape, chunk)]
    )
    return st.builds(shuffled, grids, st.integers(0, 1 << 32))


def shuffled(things: Sequence[_Thing], seed: int) -> list[_Thing]:
    """Shuffle items with a seed; zero, the simplest example, keeps their order.

    `st.permutations` draws one number per item, which takes longer than most of the tested code.
    """
    return random.Random(seed).sample(things, len(things)) if seed else list(things)


@cache
def dtypes(packed: bool = False) -> st.SearchStrategy[DType]:
    """Return dtypes, including those of less than a byte only if `packed` is set."""
    return st.sampled_from((*WHOLE, *PACKED) if packed else WHOLE)


def noise(shape: Sequence[int], dtype: DType, seed: int = 0) -> np.ndarray:
    """Return random bits of `dtype` as unsigned carriers; the unused bits of an element are zero."""
    raw = np.random.default_rng(seed).integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    if dtype.packed or dtype.kind == "bool":
        raw &= np.uint8(1 if dtype.kind == "bool" else (1 << dtype.bits) - 1)
    return raw.view(dtype.carrier).reshape(shape)


def file_bytes(truth: np.ndarray, dtype: DType) -> bytes:
    """Return the bytes of an array in a file: in C order, with elements of less than a byte packed."""
    flat = np.ascontiguousarray(truth).reshape(-1)
    if not dtype.packed:
        return flat.tobytes()
    bits = np.unpackbits(flat.view(np.uint8)[:, None], axis=1, bitorder="little")[:, : dtype.bits]
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def stored(truth: np.ndarray, dtype: DType, path: str = "memory", lead: int = 0, tail: int = 0) -> Stored:
    """Return an array in its own file, with `lead` bytes before it and `tail` bytes after it."""
    data = b"\xa5" * lead + file_bytes(truth, dtype) + b"\x5a" * tail
    return Stored(truth.shape, dtype, Bytes(path, data), lead)


def chunked(truth: np.ndarray, dtype: DType, chunk: Shape) -> Chunked:
    """Return an array as a grid of chunks, each in its own file; padding beyond the edges is random."""
    parts: dict[Shape, Stored] = {}
    cells = list(grid_indices(truth.shape, chunk))
    all_chunks = noise((len(cells), *chunk), dtype, seed=1)
    for number, index in enumerate(cells):
        cell = grid_cell(truth.shape, chunk, index)
        full_chunk = all_chunks[number, ...]
        full_chunk[tuple(slice(0, n) for n in cell.shape)] = truth[cell.slices]
        parts[index] = stored(full_chunk, dtype, "/".join(map(str, index)))
    return Chunked(truth.shape, dtype, chunk, partial(_part, parts))


def _part(parts: Mapping[Shape, Stored], index: Shape) -> Stored:
    return parts[index]


def _leaf(draw: st.DrawFn, shape: Shape, dtype: DType) -> Known:
    """Draw an array without inputs."""
    kind = draw(_one_of(("stored", "stored", "chunked", "constant")))
    if kind == "constant":
        element = noise((1,), dtype, draw(st.integers(0, 99)))
        return Known(Constant(shape, dtype, element.tobytes()), np.broadcast_to(element[0], shape))
    truth = noise(shape, dtype, draw(st.integers(0, 99)))
    if kind == "chunked" and not dtype.packed:
        return Known(
            chunked(truth, dtype, draw(chunk_shapes(shape, max_excess=2 * (len(shape) <= 3)))), truth
        )
    return Known(stored(truth, dtype, lead=draw(st.integers(0, 9)), tail=1), truth)


@cache
@st.composite
def lazy_arrays(
    draw: st.DrawFn,
    depth: int = 3,
    shape: Shape | None = None,
    dtype: DType | None = None,
    packed: bool = True,
    values: bool = True,
) -> Known:
    """Draw nested expressions of all kinds of nodes, at most `depth` deep.

    Args:
        draw: Provided by hypothesis.
        depth: Maximum number of nodes above a leaf.
        shape: Shape of the array; None for any.
        dtype: Dtype of the array; None for any.
        packed: Whether a drawn dtype may have elements of less than a byte.
        values: Whether to include elementwise functions (only exact casts, so that expected values are
            simple).
    """
    shape = draw(shapes(limit=300)) if shape is None else shape
    dtype = draw(dtypes(packed)) if dtype is None else dtype
    return _array(draw, depth, values, shape, dtype)


def _array(draw: st.DrawFn, depth: int, values: bool, shape: Shape, dtype: DType) -> Known:
    kinds = ["leaf"]
    if depth > 0 and len(shape) <= _MAX_AXES and prod(shape) <= _MAX_ELEMENTS:
        kinds += ["take", "relayout", "relayout"]
        kinds += ["stack"] if shape else []
        kinds += ["concat"] if shape and shape[0] > 1 else []
        kinds += ["cast"] if values and dtype.name in ("float32", "float64") else []
        kinds += ["mean"] if values and dtype.name in ("float32", "float64") else []
    kind = draw(_one_of(tuple(kinds)))
    inner = partial(_array, draw, depth - 1, values)
    if kind == "leaf":
        return _leaf(draw, shape, dtype)
    if kind == "take":
        axis = draw(st.integers(0, len(shape)))
        length = draw(st.integers(1, 3))
        source = inner((*shape[:axis], length, *shape[axis:]), dtype)
        index = draw(st.integers(0, length - 1))
        return Known(take(source.array, axis, index), np.take(source.truth, index, axis))
    if kind == "stack":
        axis = draw(st.integers(0, len(shape) - 1))
        part = (*shape[:axis], *shape[axis + 1 :])
        parts = [inner(part, dtype) for _ in range(shape[axis])]
        stacked = stack([item.array for item in parts], axis)
        return Known(stacked, np.stack([item.truth for item in parts], axis))
    if kind == "concat":
        cut = draw(st.integers(1, shape[0] - 1))
        parts = [inner((length, *shape[1:]), dtype) for length in (cut, shape[0] - cut)]
        joined = concat([item.array for item in parts], 0)
        return Known(joined, np.concatenate([item.truth for item in parts]))
    if kind == "mean":
        parts = [inner(shape, DTYPES[draw(_one_of(_FLOATS))]) for _ in range(draw(st.integers(1, 3)))]
        return _mean(parts, dtype)
    if kind == "cast":
        source = inner(shape, DTYPES["bfloat16"])
        with np.errstate(invalid="ignore"):
            cast = source.truth.view(DTYPES["bfloat16"].numpy).astype(dtype.numpy)
        return Known(elementwise(source.array, Cast(dtype, DTYPES["bfloat16"])), cast.view(dtype.carrier))
    return _draw_relayout(draw, shape, dtype, inner)


def _mean(parts: Sequence[Known], dtype: DType) -> Known:
    """Return a weighted mean with the weights 2/2, 3/2 and so on; every NaN has the same bits."""
    terms = [part.truth.view(part.array.dtype.numpy) for part in parts]
    with np.errstate(all="ignore"):
        result, wide = (_weighted_sum_of(terms, item) for item in (dtype.numpy, np.dtype(np.float64)))
        result = np.where(np.isfinite(result), result, wide).astype(dtype.numpy)
    result[np.isnan(result)] = np.nan
    array = mean([part.array for part in parts], range(2, len(parts) + 2), 2, dtype)
    return Known(array, result.view(dtype.carrier))


def _weighted_sum_of(terms: Sequence[np.ndarray], dtype: np.dtype[np.generic]) -> np.ndarray:
    total = np.zeros((), dtype)
    for k, item in enumerate(terms):
        term = item.astype(dtype) * dtype.type(k + 2)
        total = total + term if k else term
    return np.asarray(total / dtype.type(2))


def _draw_relayout(
    draw: st.DrawFn, shape: Shape, dtype: DType, inner: Callable[[Shape, DType], Known]
) -> Known:
    """Draw a permutation of atoms that produces `shape`: its atoms first, then an order, then source axes."""
    groups = [_factors(draw, length) for length in shape]
    lengths = [length for group in groups for length in group]
    source_of = draw(_in_any_order(range(len(lengths))))
    atoms = [0] * len(lengths)
    for number, length in zip(source_of, lengths, strict=True):
        atoms[number] = length
    split = _draw_groups(draw, tuple(atoms))
    source = inner(tuple(map(prod, split)), dtype)
    array = relayout(source.array, split, source_of, [len(group) for group in groups])
    return Known(array, source.truth.reshape(atoms).transpose(source_of).reshape(shape))


@cache
@st.composite
def relaid_arrays(draw: st.DrawFn) -> Known:
    """Return a permutation of the atoms of a contiguously stored array."""
    dtype = draw(dtypes(packed=True))
    return _draw_relayout(draw, draw(shapes(limit=300)), dtype, partial(_leaf, draw))


@cache
@st.composite
def factors(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    """Return integers whose product is `number`, sometimes including ones; for one, sometimes empty."""
    return _factors(draw, number)


def _factors(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    if number == 1 and draw(st.booleans()):
        return ()
    first = draw(_one_of(_divisors(number)))
    if draw(st.booleans()):
        return (first, number // first)
    return (number,)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


@cache
@st.composite
def groupings(draw: st.DrawFn, items: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return `items` in order in groups of one to three, sometimes with an empty group in front."""
    return _draw_groups(draw, items)


def _draw_groups(draw: st.DrawFn, items: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = [()] * draw(st.integers(0, 1))
    return (*groups, *_divide_into_groups(draw, items))


def _divide_into_groups(draw: st.DrawFn, items: Sequence[_Thing]) -> list[tuple[_Thing, ...]]:
    """Divide `items` in order into groups of one to three."""
    groups: list[tuple[_Thing, ...]] = []
    rest = tuple(items)
    while rest:
        count = draw(st.integers(1, min(3, len(rest))))
        groups.append(rest[:count])
        rest = rest[count:]
    return groups


@dataclass(frozen=True)
class Statement:
    """The text of a row, and the sizes of its axes.

    Attributes:
        left, left_axes, right, right_axes: Names and axes of the two sides.
        sizes: Length of every axis.
    """

    left: str
    left_axes: str
    right: str
    right_axes: str
    sizes: Mapping[str, int]

    @property
    def text(self) -> str:
        """The row as text for `ckpttools.mapping.row.row`."""
        return f"{self.left}: {self.left_axes} <-> {self.right}: {self.right_axes}"


@cache
@st.composite
def statements(draw: st.DrawFn, most_axes: int = 5) -> Statement:
    """Return rows of every kind: axes in the key or array of a side, single or merged, in any order."""
    names = draw(_in_any_order(("layer", "heads", "pair", "half", "embed", "expert")))
    axes = names[: draw(st.integers(0, most_axes))]
    sizes = {axis: draw(st.integers(1, 4)) for axis in axes}
    left, left_axes = _side(draw, "left", axes, sizes)
    right, right_axes = _side(draw, "right", axes, sizes)
    return Statement(left, left_axes, right, right_axes, sizes)


def _side(draw: st.DrawFn, name: str, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, str]:
    order = [axes[k] for k in draw(_in_any_order(range(len(axes))))]
    in_key = draw(st.integers(0, min(3, len(order))))
    key = name
    for group in _divide_into_groups(draw, order[:in_key]):
        count = prod(sizes[axis] for axis in group)
        style = draw(_one_of(("plain", "offset", "labels"))) if len(group) == 1 else "plain"
        suffix = {"plain": "", "offset": "+3", "labels": ":" + ",".join(_random_names(count))}[style]
        key += ".at_{" + " ".join(group) + suffix + "}"
    groups = _divide_into_groups(draw, order[in_key:])
    return key, " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def _random_names(count: int) -> list[str]:
    return ["".join(letters) for letters in itertools.islice(itertools.product("qkv", repeat=3), count)]


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
    leaf = st.one_of(_arrays(dtypes), *([_other_leaves()] if structure else []))
    inner = st.recursive(leaf, lambda below: _nodes(below, structure), max_leaves=most_leaves)
    return st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4)


@cache
def _arrays(dtypes: tuple[DType, ...]) -> st.SearchStrategy[LazyArray]:
    return st.builds(
        _seeded_array, shapes(max_rank=4, limit=400), st.sampled_from(dtypes), st.integers(0, 99)
    )


def _seeded_array(shape: Shape, dtype: DType, seed: int) -> LazyArray:
    # Some formats do not support empty arrays, so every array has an element.
    shape = shape if prod(shape) else (1,)
    return stored(noise(shape, dtype, seed), dtype)


def _other_leaves() -> st.SearchStrategy[Leaf]:
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
