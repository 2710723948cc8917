"""Arrays that have several parts one after the other, each part with a row of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import concat, relayout, window
from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup
from ckpttools.mapping.row import Row


def with_parts(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, in which those of one array's parts know each other: parts have the same flags."""
    rows = tuple(rows)
    parts: dict[object, list[AxisGroup]] = {}
    for row in rows:
        for side in (row.left, row.right):
            if side.join is not None:
                parts.setdefault(_array(row, side), []).append(side.parts[0])
    seen: dict[object, int] = {}

    def known(row: Row, side: Side) -> Side:
        if side.join is None:
            return side
        array = _array(row, side)
        seen[array] = seen.get(array, -1) + 1
        return replace(side, join=replace(side.join, parts=tuple(parts[array]), number=seen[array]))

    return tuple(replace(row, left=known(row, row.left), right=known(row, row.right)) for row in rows)


def _array(row: Row, side: Side) -> object:
    """What the rows of one array's parts have in common."""
    assert side.join is not None
    outside = side.groups[side.join.at][: side.join.depth]
    others = side.groups[: side.join.at], side.groups[side.join.at + 1 :]
    return side is row.left, side.key, outside, others, row.when, row.unless


def part_of(side: Side, array: LazyArray, sizes: Mapping[str, int]) -> LazyArray:
    """The side's own part of its array."""
    if side.join is None:
        return array
    at, number = side.join.at, side.join.number
    lengths = _lengths(side, sizes)
    outside = array.shape[at] // sum(lengths)
    apart = _split(array, at, (outside, sum(lengths)))
    start = [0] * len(apart.shape)
    start[at + 1] = sum(lengths[:number])
    own = window(apart, tuple(start), _with(apart.shape, at + 1, lengths[number]))
    return _merged(own, at, 2)


def joined(parts: Sequence[tuple[Side, LazyArray]], sizes: Mapping[str, int]) -> LazyArray:
    """The array of which these are all parts, in any order."""
    side = parts[0][0]
    assert side.join is not None
    at = side.join.at
    apart = []
    for item, array in sorted(parts, key=_number):
        own = _lengths(item, sizes)[_number((item, array))]
        apart.append(_split(array, at, (array.shape[at] // own, own)))
    return _merged(concat(apart, at + 1), at, 2)


def _number(part: tuple[Side, LazyArray]) -> int:
    join = part[0].join
    return join.number if join is not None else 0


def _lengths(side: Side, sizes: Mapping[str, int]) -> list[int]:
    return [prod(sizes[axis] for axis in part) for part in side.parts]


def _split(array: LazyArray, at: int, lengths: Shape) -> LazyArray:
    """The array with an axis in its place taken apart."""
    split = [lengths if axis == at else (length,) for axis, length in enumerate(array.shape)]
    rank = len(array.shape) + len(lengths) - 1
    return relayout(array, split, range(rank), [1] * rank)


def _merged(array: LazyArray, at: int, count: int) -> LazyArray:
    """The array with `count` axes from `at` on merged into one."""
    rank = len(array.shape)
    merge = [*[1] * at, count, *[1] * (rank - at - count)]
    return relayout(array, [(length,) for length in array.shape], range(rank), merge)


def _with(shape: Shape, at: int, length: int) -> Shape:
    return (*shape[:at], length, *shape[at + 1 :])
