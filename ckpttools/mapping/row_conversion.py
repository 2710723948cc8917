"""One direction of a row: target arrays as expressions of source arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import concat, elementwise, relayout, stack, take, window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.core.text import sample_names
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup
from ckpttools.mapping.row import Row
from ckpttools.mapping.values import BoundOp


@dataclass(frozen=True, slots=True)
class _Rearrangement:
    """The rearrangement of a source array into its part of a target.

    Attributes:
        taken: Axes that move into the key, which are moved to the front.
        split, order, merge: As for `relayout`.
    """

    taken: AxisGroup
    split: tuple[Shape, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]


@dataclass(frozen=True)
class RowConversion:
    """One direction of a row for the sizes of a model: target arrays as expressions of source arrays.

    Attributes:
        source, target: The two sides.
        sizes: The length of every axis.
        op: The value op, or None.
    """

    source: Side
    target: Side
    sizes: Mapping[str, int]
    op: BoundOp | None = None

    def at(self, index: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> LazyArray:
        """Return the target array at `index`, a coordinate for each axis of the target's key.

        Raises:
            ShapeError: Arrays that are stacked differ in shape or dtype.
        """
        try:
            body = self._stack(dict(index), self._stacked_axes, arrays)
        except ShapeError as error:
            differences = self._differences(index, arrays)
            raise error if differences is None else differences from error
        if self._groups == self.target.groups:
            return body
        split = tuple((self.sizes[axis],) for axis in self.target.array_axes)
        merge = tuple(len(group) for group in self.target.groups)
        return relayout(body, split, tuple(range(len(split))), merge)

    def _differences(self, index: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> ShapeError | None:
        """Return an error that names the source arrays which differ from most others, or None."""
        kinds: dict[str, list[str]] = {}
        for key in self.source_keys(index):
            kinds.setdefault(f"{arrays[key].dtype}{list(arrays[key].shape)}", []).append(key)
        usual, *others = sorted(kinds, key=lambda kind: -len(kinds[kind]))
        if not others:
            return None
        return ShapeError(
            "layers cannot be stacked, because these arrays differ in shape or dtype from the others: "
            + sample_names([key for kind in others for key in kinds[kind]]),
            got="; ".join(f"{sample_names(kinds[kind])}: {kind}" for kind in others),
            expected=f"{usual}, as {sample_names(kinds[usual])}",
            hint=f"if only dtypes differ, cast them with {option('dtype')}",
        )

    def source_keys(self, index: Mapping[str, int]) -> Iterator[str]:
        """Yield the keys of all source arrays of the target array at `index`."""
        lengths = {**self.sizes, **dict.fromkeys(index, 1)}
        for inner in self.source.indices(lengths):
            yield self.source.key.format({**inner, **index}, self.sizes)

    @cached_property
    def _stacked_axes(self) -> AxisGroup:
        """Return the axes that move from the key into the array."""
        return tuple(axis for axis in self.target.array_axes if axis in self.source.key.axes)

    @cached_property
    def _groups(self) -> tuple[AxisGroup, ...]:
        """Return the target's groups.

        A group that merges a stacked axis with other axes is split into single axes.
        """
        mixed = any(len(g) > 1 and set(g) & set(self._stacked_axes) for g in self.target.groups)
        return tuple((axis,) for axis in self.target.array_axes) if mixed else self.target.groups

    def _stack(self, index: dict[str, int], axes: AxisGroup, arrays: Mapping[str, LazyArray]) -> LazyArray:
        if not axes:
            return self._single(index, arrays)
        axis, *rest = axes
        parts = [self._stack({**index, axis: i}, tuple(rest), arrays) for i in range(self.sizes[axis])]
        outer = self._stacked_axes[: -len(axes)]
        return stack(parts, [g for g in self._groups if g[0] not in outer].index((axis,)))

    def _single(self, index: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> LazyArray:
        """Return the contribution of a single source array.

        The axes in the key are selected; the other axes are in order.
        """
        array = arrays[self.source.key.format(index, self.sizes)]
        if self.op is not None:
            array = elementwise(array, self.op)
        moves = self._moves
        array = relayout(array, moves.split, moves.order, moves.merge)
        for axis in moves.taken:
            array = take(array, 0, index[axis])
        return array

    @cached_property
    def _moves(self) -> _Rearrangement:
        """How axes are taken, split, transposed and merged, from the source's to the target's."""
        taken = tuple(axis for axis in self.source.array_axes if axis in self.target.key.axes)
        unmoved = tuple(g for g in self._groups if not set(g) & set(self._stacked_axes))
        numbers = self.source.array_axes
        split = tuple(tuple(self.sizes[axis] for axis in group) for group in self.source.groups)
        order = tuple(numbers.index(axis) for group in ((taken,), unmoved) for g in group for axis in g)
        return _Rearrangement(taken, split, order, (*(1 for _ in taken), *map(len, unmoved)))


def with_parts(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Link the rows that are parts of the same array; parts must have the same flags."""
    rows = tuple(rows)
    parts: dict[object, list[AxisGroup]] = {}
    for row in rows:
        for side in (row.left, row.right):
            if side.join is not None:
                parts.setdefault(_array(row, side), []).append(side.parts[0])
    last_numbers: dict[object, int] = {}

    def known(row: Row, side: Side) -> Side:
        if side.join is None:
            return side
        array = _array(row, side)
        last_numbers[array] = last_numbers.get(array, -1) + 1
        return replace(side, join=replace(side.join, parts=tuple(parts[array]), number=last_numbers[array]))

    return tuple(replace(row, left=known(row, row.left), right=known(row, row.right)) for row in rows)


def _array(row: Row, side: Side) -> object:
    """Return the properties that all rows of an array's parts share."""
    assert side.join is not None
    outside = side.groups[side.join.at][: side.join.depth]
    other_groups = side.groups[: side.join.at], side.groups[side.join.at + 1 :]
    return side is row.left, side.key, outside, other_groups, row.when, row.unless


def part_of(side: Side, array: LazyArray, sizes: Mapping[str, int]) -> LazyArray:
    """Return the part of a joined array that belongs to one side."""
    if side.join is None:
        return array
    at, number = side.join.at, side.join.number
    lengths = _lengths(side, sizes)
    outside = array.shape[at] // sum(lengths)
    split_array = _split_axis(array, at, (outside, sum(lengths)))
    start = [0] * len(split_array.shape)
    start[at + 1] = sum(lengths[:number])
    own = window(split_array, tuple(start), _with(split_array.shape, at + 1, lengths[number]))
    return _merge_axes(own, at, 2)


def join_parts(parts: Sequence[tuple[Side, LazyArray]], sizes: Mapping[str, int]) -> LazyArray:
    """Join all parts of an array, which may be given in any order."""
    side = parts[0][0]
    assert side.join is not None
    at = side.join.at
    split_parts = []
    for item, array in sorted(parts, key=_number):
        own = _lengths(item, sizes)[_number((item, array))]
        split_parts.append(_split_axis(array, at, (array.shape[at] // own, own)))
    return _merge_axes(concat(split_parts, at + 1), at, 2)


def _number(part: tuple[Side, LazyArray]) -> int:
    join = part[0].join
    return join.number if join is not None else 0


def _lengths(side: Side, sizes: Mapping[str, int]) -> list[int]:
    return [prod(sizes[axis] for axis in part) for part in side.parts]


def _split_axis(array: LazyArray, at: int, lengths: Shape) -> LazyArray:
    """Split one axis of an array in place."""
    split = [lengths if axis == at else (length,) for axis, length in enumerate(array.shape)]
    rank = len(array.shape) + len(lengths) - 1
    return relayout(array, split, range(rank), [1] * rank)


def _merge_axes(array: LazyArray, at: int, count: int) -> LazyArray:
    """Merge `count` axes of an array from `at` on."""
    rank = len(array.shape)
    merge = [*[1] * at, count, *[1] * (rank - at - count)]
    return relayout(array, [(length,) for length in array.shape], range(rank), merge)


def _with(shape: Shape, at: int, length: int) -> Shape:
    return (*shape[:at], length, *shape[at + 1 :])
