"""A table: all rows of a model, bound to its sizes. Everything is accounted for, or nothing happens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpttools.dtypes import DType
from ckpttools.errors import UsageError
from ckpttools.ir.array import LazyArray
from ckpttools.mapping.axes import Side
from ckpttools.mapping.coverage import Expected, check_coverage
from ckpttools.mapping.row import Respelling, Row
from ckpttools.mapping.sizes import Observation, Size, require, unify


@dataclass(frozen=True, slots=True)
class Flag:
    """A yes or no that decides which rows a model has, and who says so."""

    value: bool
    source: str


@dataclass(frozen=True, slots=True)
class ValueNote:
    """What a row does to values, for the plan and the receipt.

    Attributes:
        key: the target key, axes in braces.
        exact: whether the way back gives the original bits.
        reason: why not, or which values are excepted.
        dtype: the dtype it was judged for.
    """

    key: str
    exact: bool
    reason: str
    dtype: DType


@dataclass(frozen=True)
class Mapped:
    """A model spelled the other way.

    Attributes:
        arrays: target key -> lazy array.
        sizes: length of every axis.
        values: rows that change values.
        dropped: source keys that were left out on purpose.
    """

    arrays: Mapping[str, LazyArray]
    sizes: Mapping[str, int]
    values: tuple[ValueNote, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Direction:
    """A row read one way."""

    source: Side
    target: Side
    row: Row
    inverse: bool


@dataclass(frozen=True)
class Table:
    """Rows and the sizes they are bound to.

    Attributes:
        rows: all rows of the family; those that the flags exclude are kept for messages.
        sizes: lengths of axes that are known, and who says so.
        flags: which optional rows the model has, and who says so.
        dropped: patterns of right keys that carry nothing and are left out.
        place: what is being mapped, for messages.
    """

    rows: tuple[Row, ...]
    sizes: Mapping[str, Size]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    place: str = ""

    def stacked(self, axis: str, at: int) -> Table:
        """The table of a model with scanned layers: `axis` moves from left keys into left arrays."""
        return replace(self, rows=tuple(row.stacked(axis, at) for row in self.rows))

    def to_left(self, arrays: Mapping[str, LazyArray], drop: Collection[str] = ()) -> Mapped:
        """Left arrays as expressions of the right ones.

        Args:
            arrays: right key -> array.
            drop: patterns of right keys that the user leaves out on purpose.

        Raises:
            CoverageError: arrays that are missing, that no row takes, or of another shape; lists all.
            ShapeError: a size that neither the configuration nor a shape tells.
            UsageError: a pattern of `drop` that no array matches.
        """
        for pattern in drop:
            if not any(_matches(key, (pattern,)) for key in arrays):
                raise UsageError("nothing has a name that matches", place=self.place, got=pattern)
        directions = [_Direction(row.right, row.left, row, False) for row in self.rows]
        return self._respelled(arrays, directions, (*self.dropped, *drop))

    def to_right(self, arrays: Mapping[str, LazyArray]) -> Mapped:
        """Right arrays as expressions of the left ones; errors as `to_left`."""
        directions = [_Direction(row.left, row.right, row, True) for row in self.rows]
        return self._respelled(arrays, directions, ())

    def _respelled(
        self, arrays: Mapping[str, LazyArray], all_directions: list[_Direction], drop: tuple[str, ...]
    ) -> Mapped:
        flags = frozenset(name for name, flag in self.flags.items() if flag.value)
        directions = [each for each in all_directions if each.row.applies(flags)]
        absent = [each for each in all_directions if not each.row.applies(flags)]
        kept = {key: array for key, array in arrays.items() if not _matches(key, drop)}
        dropped = tuple(key for key in arrays if key not in kept)
        said = self._unified(kept, [each.source for each in directions])
        expected = [Expected(each.source, self._why(each.row)) for each in directions]
        unwanted = [Expected(each.source, self._why(each.row)) for each in absent]
        check_coverage(kept, expected, unwanted, said, self.place, dropped)
        sizes = {axis: size.length for axis, size in said.items()}
        made: dict[str, LazyArray] = {}
        notes: list[ValueNote] = []
        for each in directions:
            respelling = _respelling(each, sizes)
            for index in each.target.indices(sizes):
                made[each.target.key.spell(index, sizes)] = respelling.at(index, kept)
            notes += _value_notes(each, respelling, kept)
        return Mapped(made, sizes, tuple(notes), dropped)

    def _why(self, row: Row) -> str:
        """Who says that the row is, or is not, part of the model; empty where nothing decides."""
        flag = self.flags.get(row.when or row.unless or "")
        return flag.source if flag else ""

    def _unified(self, arrays: Mapping[str, LazyArray], sides: list[Side]) -> dict[str, Size]:
        """Sizes from the configuration, then from the first array of each row that is there."""
        known = dict(self.sizes)
        for side in sides:
            for each in side.key.fields:
                if each.labels and len(each.axes) == 1:
                    known[each.axes[0]] = Size(len(each.labels), f"the labels of {side.key}")
        seen = list(_observed(arrays, sides))
        sizes = unify(known, seen)
        require(sizes, {axis for side in sides for axis in side.axes}, seen, self.place)
        return sizes


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _respelling(direction: _Direction, sizes: Mapping[str, int]) -> Respelling:
    op = direction.row.op.bound(sizes) if direction.row.op else None
    if op and direction.inverse:
        op = op.inverse()
    return Respelling(direction.source, direction.target, sizes, op)


def _value_notes(
    direction: _Direction, respelling: Respelling, arrays: Mapping[str, LazyArray]
) -> Iterator[ValueNote]:
    if respelling.op:
        dtype = arrays[next(direction.source.keys(respelling.sizes))].dtype
        exactness = respelling.op.exactness(dtype)
        yield ValueNote(str(direction.target.key), exactness.exact, exactness.reason, dtype)


def _observed(arrays: Mapping[str, LazyArray], sides: Iterable[Side]) -> Iterator[Observation]:
    """The first array of each side: coordinate 0 of every axis, which needs no size."""
    for side in sides:
        axes = side.key.axes
        key = side.key.spell(dict.fromkeys(axes, 0), dict.fromkeys(axes, 1))
        if key in arrays:
            yield Observation(key, side.groups, arrays[key].shape)
