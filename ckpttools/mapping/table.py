"""A table: all rows of a model, bound to its sizes. A conversion accounts for every array or is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from functools import cached_property
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import pad_array, window
from ckpttools.array.patterns import match_names
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError, UsageError
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.build import BoundTable, Direction, Mapped, build, build_partly, pad_to_shape
from ckpttools.mapping.coverage import ExpectedArray, check_coverage, require_countable
from ckpttools.mapping.flags import Flag, inferred_flags, observed_flags, refuse_open
from ckpttools.mapping.keys import Key
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import (
    Size,
    derive,
    label_counts,
    lengths_of,
    observed,
    require,
    sizes_from_keys,
    unify,
)
from ckpttools.mapping.values import Fill


@dataclass(frozen=True)
class Table:
    """Rows, and the sizes that they are bound to.

    Attributes:
        rows: All rows of the family; rows excluded by flags are kept for messages.
        sizes: The known lengths of axes, with their origins.
        flags: The known flags, with their origins; other flags are inferred from array names.
        derived: Axis -> formula over other axes.
        dropped: Patterns of right keys without information, which are left out.
        left_out: Templates and patterns of right keys without a counterpart on the left side.
        padded: Axis -> minimum length of left arrays, which are padded with zeros.
        location: The mapped checkpoint, for messages.
        is_configured: Whether a configuration gives the number of layers.
        remedies: Pattern of right keys without a row -> what to do about them.
    """

    rows: tuple[Row, ...]
    sizes: Mapping[str, Size]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    left_out: tuple[Key, ...] = ()
    padded: Mapping[str, int] = field(default_factory=dict)
    location: str = ""
    is_configured: bool = True
    remedies: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _true(self) -> frozenset[str]:
        return frozenset(name for name, flag in self.flags.items() if flag.value)

    def has(self, row: Row) -> bool:
        """Return whether the model has a row, as far as the flags decide."""
        return row.applies(self._true)

    def to_left(
        self, arrays: Mapping[str, LazyArray], drop: Collection[str] = (), *, exact: bool = False
    ) -> Mapped:
        """Return left arrays as expressions of the right arrays.

        Args:
            arrays: Right key -> array.
            drop: Patterns of right keys that the user leaves out.
            exact: Whether to store changed values in float32 if the reverse conversion would otherwise be
                inexact.

        Raises:
            CoverageError: Arrays are missing, have no row, or have another shape. The message lists them.
            ShapeError: A size is given neither by the configuration nor by a shape.
            UsageError: No array matches a pattern of `drop`.
        """
        for pattern in drop:
            if not match_names(arrays, (pattern,)):
                raise _unmatched_pattern_error(pattern, arrays, self.location)
        bound = self._bind_rows(arrays, (*self.dropped, *self._unmatched_patterns(), *drop))
        return self._pad(self._convert(bound, exact=exact))

    def to_left_partly(
        self,
        arrays: Mapping[str, LazyArray],
        known_left: Mapping[str, LazyArray] | None = None,
        *,
        exact: bool = False,
    ) -> Mapped:
        """Return as many left arrays as the right arrays allow; some may be missing or unused.

        An array whose shape differs from the model's is used unchanged, if its axes can be inferred.

        Args:
            arrays: Right key -> array.
            known_left: Left key -> array of a model with the same sizes, for sizes that are otherwise
                unknown.
            exact: As for `to_left`, but only for 16-bit arrays.

        Raises:
            ConfigError: The configuration contradicts itself.
        """
        observations = observed(known_left or {}, [row.left for row in self.rows], self.sizes)
        table = replace(self, sizes=unify(self.sizes, observations))
        return build_partly(table._bind_rows(arrays, (*self.dropped, *self._unmatched_patterns())), exact)

    def to_right(self, arrays: Mapping[str, LazyArray], cut: Collection[str] = ()) -> Mapped:
        """Return right arrays as expressions of the left arrays; raises the errors of `to_left`.

        Args:
            arrays: Left key -> array.
            cut: Axes on which left arrays may be longer than in the model; the surplus is left out.
        """
        cropped, lengths, extra = self._crop(arrays, cut)
        bound = self._bind_rows(cropped, (), inverse=True)
        mapped = self._convert(bound, leave_out=f"{action('select', 'SRC', 'DST', drop=['PATTERN'])} first")
        return replace(mapped, cut=lengths, extra=extra)

    def infer_known(
        self, arrays: Mapping[str, LazyArray], *, left: bool = False, cut: Collection[str] = ()
    ) -> tuple[Mapping[str, int], Mapping[str, bool]]:
        """Return the known axis lengths and flags of the model that has these arrays.

        Args:
            arrays: Key -> array.
            left: Whether the arrays are left arrays.
            cut: Axes on which arrays may be longer, as for `to_right`.
        """
        arrays = self._crop(arrays, cut)[0] if left else arrays
        bound = self._bind_rows(
            arrays, () if left else (*self.dropped, *self._unmatched_patterns()), inverse=left
        )
        flags = {name: flag.value for name, flag in bound.flags.items() if flag.open_key is None}
        return lengths_of(bound.sizes), flags

    def require_fit(
        self, arrays: Mapping[str, LazyArray], *, left: bool = False, cut: Collection[str] = ()
    ) -> None:
        """Refuse arrays that do not fit the model.

        The arguments are as for `infer_known`, the errors as for `to_left`.
        """
        arrays = self._crop(arrays, cut)[0] if left else arrays
        drop = () if left else (*self.dropped, *self._unmatched_patterns())
        self._require_covered(self._bind_rows(arrays, drop, inverse=left))

    def unmatched_right(self, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Return the right arrays without a counterpart on the left side."""
        return {key: arrays[key] for key in match_names(arrays, self._unmatched_patterns())}

    def _convert(self, bound: BoundTable, *, exact: bool = False, leave_out: str = "") -> Mapped:
        self._require_covered(bound, leave_out)
        refuse_open(bound.flags, self.location)
        return build(pad_to_shape(bound), exact)

    def _require_covered(self, bound: BoundTable, leave_out: str = "") -> None:
        sizes, flags = bound.sizes, bound.flags
        sides = [direction.source for direction in bound.directions]
        axes = {axis for side in sides for axis in (*side.axes, *side.key.needs)}
        require(sizes, axes, observed(bound.arrays, sides, sizes), self.location)
        arrays = bound.arrays
        expected = [_expected(direction, flags) for direction in bound.directions if not direction.fills]
        unwanted = [_expected(item, flags) for item in bound.absent]
        dropped, remedies = bound.dropped, self.remedies
        check_coverage(arrays, expected, unwanted, sizes, self.location, dropped, remedies, leave_out)

    def _bind_rows(
        self, arrays: Mapping[str, LazyArray], drop: tuple[str, ...], *, inverse: bool = False
    ) -> BoundTable:
        all_directions = [Direction(row, inverse) for row in self.rows]
        dropped = dict.fromkeys(match_names(arrays, drop))
        kept = {key: array for key, array in arrays.items() if key not in dropped}
        sides = [(direction.row, direction.source) for direction in all_directions]
        undecided = {name for row in self.rows for name in row.flags} - self.flags.keys()
        lengths = lengths_of(self.sizes)
        flags = {**self.flags, **inferred_flags(sorted(undecided), sides, kept, lengths)}
        if not inverse:
            flag_names = sorted(name for name, flag in self.flags.items() if flag.by_arrays)
            flags |= observed_flags(flag_names, sides, kept, lengths)
        present = frozenset(name for name, flag in flags.items() if flag.value)
        directions = [direction for direction in all_directions if direction.row.applies(present)]
        absent = [direction for direction in all_directions if not direction.row.applies(present)]
        sizes = self._unify_sizes(kept, directions)
        if not self.is_configured:
            sizes = _without_layers(sizes, directions)
        directions = [direction for direction in directions if not _is_empty(direction.source, sizes)]
        return BoundTable(kept, (*dropped,), flags, directions, absent, sizes)

    def _unmatched_patterns(self) -> tuple[str, ...]:
        """Return the patterns of keys without a counterpart on the left side."""
        sizes = derive(self.sizes, self.derived, self.location)
        lengths = lengths_of(sizes)
        sides = [Side(key, ()) for key in self.left_out if key.needs <= lengths.keys()]
        require_countable(sides, sizes, self.location)
        return tuple(text for side in sides for text in side.keys(lengths))

    def _pad(self, mapped: Mapped) -> Mapped:
        """Pad left arrays with zeros on the axes that must be longer."""
        if not self.padded:
            return mapped
        arrays = dict(mapped.arrays)
        for row in self.rows:
            for axis, length in self.padded.items():
                if (axis,) not in row.left.groups:
                    continue
                at = row.left.groups.index((axis,))
                for key in row.left.keys(mapped.sizes):
                    if key in arrays:
                        shape = arrays[key].shape
                        arrays[key] = pad_array(arrays[key], (*shape[:at], length, *shape[at + 1 :]))
        return replace(mapped, arrays=arrays)

    def _crop(
        self, arrays: Mapping[str, LazyArray], cut: Collection[str]
    ) -> tuple[Mapping[str, LazyArray], dict[str, tuple[int, int]], dict[str, int]]:
        """Crop the arrays on the axes to cut; also return the cut lengths by axis, and the cropped keys."""
        kept = dict(arrays)
        lengths: dict[str, tuple[int, int]] = {}
        extra: dict[str, int] = {}
        for axis in [axis for axis in cut if axis in self.sizes]:
            expected = self.sizes[axis].length
            sides = [row.left for row in self.rows if (axis,) in row.left.groups]
            for side in [side for side in sides if not side.key.axes]:
                array = kept.get(str(side.key))
                at = side.groups.index((axis,))
                if array is None or len(array.shape) != len(side.groups) or array.shape[at] <= expected:
                    continue
                lengths[axis] = (array.shape[at], expected)
                shape = (*array.shape[:at], expected, *array.shape[at + 1 :])
                kept[str(side.key)] = window(array, (0,) * len(shape), shape)
                extra[str(side.key)] = at
        return kept, lengths, extra

    def _unify_sizes(self, arrays: Mapping[str, LazyArray], directions: list[Direction]) -> dict[str, Size]:
        """Collect sizes from the configuration, formulas, shapes, and numbers in names."""
        sides = [direction.source for direction in directions]
        both = (side for direction in directions for side in (direction.source, direction.target))
        known = {**self.sizes, **label_counts(both)}
        sizes = derive(known, self.derived, self.location)
        sizes = unify(sizes, observed(arrays, sides, sizes))
        sizes = derive(sizes_from_keys(sizes, arrays, sides), self.derived, self.location)
        return unify(sizes_from_keys(sizes, arrays, sides), observed(arrays, sides, sizes))


def _unmatched_pattern_error(pattern: str, keys: Iterable[str], location: str) -> UsageError:
    below = f"{pattern}.*"
    hint = f"{action('inspect.names', location or 'SRC')} shows all names"
    if match_names(keys, (below,)):
        hint = f"did you mean '{below}'?"
    return UsageError("no array name matches the pattern", location=location, got=pattern, hint=hint)


def _without_layers(sizes: Mapping[str, Size], directions: Iterable[Direction]) -> dict[str, Size]:
    """Without a configuration, set the length of layer groups that have no keys to 0."""
    keys = (side.key for direction in directions for side in (direction.source, direction.target))
    axes = {axis for key in keys for axis in key.axes if axis not in sizes}
    return {**sizes, **{axis: Size(0, "no array name contains it") for axis in axes}}


def _is_empty(side: Side, sizes: Mapping[str, Size]) -> bool:
    """Return whether an axis has length 0, so that the model has no such arrays."""
    return any(axis in sizes and sizes[axis].length == 0 for axis in side.axes)


def _expected(direction: Direction, flags: Mapping[str, Flag]) -> ExpectedArray:
    """Explain why the row is or is not part of the model, and list the alternatives."""
    deciding = [flags[name] for name in sorted(direction.row.flags) if flags[name].source]
    sources = dict.fromkeys(flag.source for flag in deciding)
    remedies = dict.fromkeys(flag.remedy for flag in deciding if flag.remedy)
    return ExpectedArray(direction.source, "; ".join(sources), "; ".join(remedies))


# The largest models have 100,000 arrays.
_MAX_NAMES = 10_000_000


def right_shapes(table: Table) -> dict[str, Shape]:
    """Return the right keys and shapes of a model whose sizes the table knows.

    Raises:
        ShapeError: A size is unknown, or the number of layers or experts is implausibly large.
    """
    rows = [*filter(table.has, table.rows)]
    known = {**table.sizes, **label_counts(side for row in rows for side in (row.left, row.right))}
    rows = [row for row in rows if not isinstance(row.op, Fill)]
    known_sides = [row.right for row in rows if all(known[a].length for a in row.right.axes if a in known)]
    sizes = require(
        known, {axis for side in known_sides for axis in (*side.axes, *side.key.needs)}, (), table.location
    )
    names = sum(prod(sizes[axis] for axis in side.key.axes) for side in known_sides)
    if names > _MAX_NAMES:
        raise ShapeError(
            "these sizes give an implausibly large number of arrays",
            location=table.location,
            got=f"{names:,} arrays",
            expected=f"at most {_MAX_NAMES:,}",
        )
    return {key: side.shape(sizes) for side in known_sides for key in side.keys(sizes)}
