"""A table: all rows of a model, bound to its sizes. Everything is accounted for, or nothing happens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from shlex import quote

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import padded, window
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import MappingError, ShapeError, UsageError
from ckpttools.core.region import Shape
from ckpttools.core.wording import option
from ckpttools.mapping.axes import Side
from ckpttools.mapping.coverage import Expected, check_coverage, require_countable
from ckpttools.mapping.factor import Factor, multiplied, product_of
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.flags import Flag, inferred_flags, refuse_open, seen_flags
from ckpttools.mapping.joining import joined, part_of
from ckpttools.mapping.keys import Key
from ckpttools.mapping.row import Row
from ckpttools.mapping.row_conversion import RowConversion
from ckpttools.mapping.sizes import Observation, Size, derive, lengths_of, require, sizes_from_keys, unify
from ckpttools.mapping.values import BoundOp
from ckpttools.mapping.whole_numbers import Recoded, Whole


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
    """A model in the names and layout of the other side.

    Attributes:
        arrays: target key -> lazy array.
        sizes: length of every axis.
        values: rows that change values.
        dropped: source keys that were left out on purpose.
        changed: target keys whose values were changed.
        altered: source keys from which they were made.
        cut: for each axis that was longer in the source than in the model, both lengths.
        surplus: source key -> the axis on which it was longer.
        unused: source keys that made nothing, where only what could be made was asked for.
        whole: target keys of whole numbers, by their rows.
        filled: source key -> array that the target side has none of, and the number it should be full of.
    """

    arrays: Mapping[str, LazyArray]
    sizes: Mapping[str, int]
    values: tuple[ValueNote, ...]
    dropped: tuple[str, ...]
    changed: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    surplus: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    filled: Mapping[str, tuple[LazyArray, float]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, LazyArray]:
        """The arrays that are no whole numbers by their rows."""
        return {key: array for key, array in self.arrays.items() if key not in self.whole}


@dataclass(frozen=True, slots=True)
class _Direction:
    """A row read one way: to the left, or back as its inverse."""

    row: Row
    inverse: bool

    @property
    def source(self) -> Side:
        return self.row.left if self.inverse else self.row.right

    @property
    def target(self) -> Side:
        return self.row.right if self.inverse else self.row.left

    @property
    def fills(self) -> bool:
        """Whether it makes arrays of which the source side has none."""
        return isinstance(self.row.op, Fill) and not self.inverse

    def conversion(self, sizes: Mapping[str, int], exact: Collection[DType] = ()) -> RowConversion:
        """The expressions that this makes; errors as `Table.to_left`.

        Args:
            sizes: lengths of axes.
            exact: the dtypes of source arrays of which nothing may be lost; none where that may be.
        """
        op = self.row.op.bound(sizes) if self.row.op else None
        if isinstance(op, Recoded):
            op = replace(op, name=str(self.target.key))
        if op and self.inverse:
            op = op.inverse()
        elif op and exact:
            op = _exact(op, self, exact)
        return RowConversion(self.source, self.target, sizes, op)

    def parts(self, arrays: Mapping[str, LazyArray], sizes: Mapping[str, int]) -> Mapping[str, LazyArray]:
        """The source arrays; where the row is of a part of them, that part."""
        if self.source.join is None:
            return arrays
        keys = [key for key in self.source.keys(sizes) if key in arrays]
        return {key: part_of(self.source, arrays[key], sizes) for key in keys}

    def dtypes(self, sizes: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> list[DType]:
        """The dtypes of the source arrays, each once."""
        return list(dict.fromkeys(arrays[key].dtype for key in self.source.keys(sizes)))


@dataclass(frozen=True, slots=True)
class _Settled:
    """What is known before arrays are compared with the rows.

    Attributes:
        arrays: source arrays, without those that are dropped.
        dropped: source keys that were left out on purpose.
        flags: all of them.
        directions: rows that the model has; `absent`: the others.
        sizes: axes whose length is known.
    """

    arrays: Mapping[str, LazyArray]
    dropped: tuple[str, ...]
    flags: Mapping[str, Flag]
    directions: list[_Direction]
    absent: list[_Direction]
    sizes: Mapping[str, Size]


@dataclass(frozen=True)
class Table:
    """Rows and the sizes they are bound to.

    Attributes:
        rows: all rows of the family; those that the flags exclude are kept for messages.
        sizes: lengths of axes that are known, and who says so.
        flags: which optional rows the model has, and who says so; what is not in here, is inferred from
            the names of the arrays.
        derived: axis -> formula over other axes.
        dropped: patterns of right keys that carry nothing and are left out.
        left_out: templates, and patterns, of right keys that the left side has no place for.
        padded: axis -> length that left arrays have on it at least, filled up with zeros.
        place: what is being mapped, for messages.
        is_configured: whether a configuration gives the number of layers.
        remedies: pattern of right keys that no row takes -> what to do about such.
    """

    rows: tuple[Row, ...]
    sizes: Mapping[str, Size]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    left_out: tuple[Key, ...] = ()
    padded: Mapping[str, int] = field(default_factory=dict)
    place: str = ""
    is_configured: bool = True
    remedies: Mapping[str, str] = field(default_factory=dict)

    def to_left(
        self, arrays: Mapping[str, LazyArray], drop: Collection[str] = (), *, exact: bool = False
    ) -> Mapped:
        """Left arrays as expressions of the right ones.

        Args:
            arrays: right key -> array.
            drop: patterns of right keys that the user leaves out on purpose.
            exact: stores changed values in float32 where the way back would not be exact otherwise.

        Raises:
            CoverageError: arrays that are missing, that no row takes, or of another shape; lists all.
            ShapeError: a size that neither the configuration nor a shape tells.
            UsageError: a pattern of `drop` that no array matches.
        """
        for pattern in drop:
            if not any(_matches(key, (pattern,)) for key in arrays):
                raise _unmatched(pattern, arrays, self.place)
        settled = self._settled(arrays, (*self.dropped, *self._left_out(), *drop))
        return self._padded(self._converted(settled, exact=exact))

    def to_left_partly(
        self,
        arrays: Mapping[str, LazyArray],
        beside: Mapping[str, LazyArray] | None = None,
        *,
        exact: bool = False,
    ) -> Mapped:
        """As many left arrays as the right ones make: what is missing or left over refuses nothing.

        An array of another shape than the model says is taken as it is, where its axes can be told.

        Args:
            arrays: right key -> array.
            beside: left key -> array of a model of the same sizes; for sizes that nothing else gives.
            exact: as of `to_left`, for arrays of 16 bits.

        Raises:
            ConfigError: the configuration contradicts itself.
        """
        seen = _observed(beside or {}, [row.left for row in self.rows], self.sizes)
        table = replace(self, sizes=unify(self.sizes, seen))
        return _made_partly(table._settled(arrays, (*self.dropped, *self._left_out())), exact)

    def to_right(self, arrays: Mapping[str, LazyArray], cut: Collection[str] = ()) -> Mapped:
        """Right arrays as expressions of the left ones; errors as `to_left`.

        Args:
            arrays: left key -> array.
            cut: axes on which left arrays may be longer than the model says; the surplus is left out.
        """
        kept, lengths, surplus = self._windowed(arrays, cut)
        settled = self._settled(kept, (), inverse=True)
        mapped = self._converted(settled, leave_out="ckpt select SRC DST --drop PATTERN first")
        return replace(mapped, cut=lengths, surplus=surplus)

    def known_of(
        self, arrays: Mapping[str, LazyArray], *, left: bool = False, cut: Collection[str] = ()
    ) -> tuple[Mapping[str, int], Mapping[str, bool]]:
        """Lengths of axes and flags of the model that has these arrays, as far as they are known.

        Args:
            arrays: key -> array.
            left: whether they are left ones.
            cut: axes on which these may be longer, as of `to_right`.
        """
        arrays = self._windowed(arrays, cut)[0] if left else arrays
        settled = self._settled(arrays, () if left else (*self.dropped, *self._left_out()), inverse=left)
        flags = {name: flag.value for name, flag in settled.flags.items() if flag.open_key is None}
        return lengths_of(settled.sizes), flags

    def require_fit(
        self, arrays: Mapping[str, LazyArray], *, left: bool = False, cut: Collection[str] = ()
    ) -> None:
        """Refuses arrays that are not those of the model; arguments as of `known_of`, errors as `to_left`."""
        arrays = self._windowed(arrays, cut)[0] if left else arrays
        drop = () if left else (*self.dropped, *self._left_out())
        self._require_covered(self._settled(arrays, drop, inverse=left))

    def left_out_of(self, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Of right arrays, those that the left side has no place for."""
        patterns = self._left_out()
        return {key: array for key, array in arrays.items() if _matches(key, patterns)}

    def _converted(self, settled: _Settled, *, exact: bool = False, leave_out: str = "") -> Mapped:
        self._require_covered(settled, leave_out)
        refuse_open(settled.flags, self.place)
        return _made(_filled_up(settled), exact)

    def _require_covered(self, settled: _Settled, leave_out: str = "") -> None:
        said, flags = settled.sizes, settled.flags
        sides = [each.source for each in settled.directions]
        axes = {axis for side in sides for axis in (*side.axes, *side.key.needs)}
        require(said, axes, _observed(settled.arrays, sides, said), self.place)
        kept = settled.arrays
        expected = [_expected(each, flags) for each in settled.directions if not each.fills]
        unwanted = [_expected(each, flags) for each in settled.absent]
        dropped, remedies = settled.dropped, self.remedies
        check_coverage(kept, expected, unwanted, said, self.place, dropped, remedies, leave_out)

    def _settled(
        self, arrays: Mapping[str, LazyArray], drop: tuple[str, ...], *, inverse: bool = False
    ) -> _Settled:
        all_directions = [_Direction(row, inverse) for row in self.rows]
        kept = {key: array for key, array in arrays.items() if not _matches(key, drop)}
        dropped = tuple(key for key in arrays if key not in kept)
        sides = [(each.row, each.source) for each in all_directions]
        undecided = {name for row in self.rows for name in row.flags} - self.flags.keys()
        lengths = lengths_of(self.sizes)
        flags = {**self.flags, **inferred_flags(sorted(undecided), sides, kept, lengths)}
        if not inverse:
            shown = sorted(name for name, flag in self.flags.items() if flag.by_arrays)
            flags |= seen_flags(shown, sides, kept, lengths)
        present = frozenset(name for name, flag in flags.items() if flag.value)
        directions = [each for each in all_directions if each.row.applies(present)]
        absent = [each for each in all_directions if not each.row.applies(present)]
        said = self._unified(kept, directions)
        if not self.is_configured:
            said = _without_layers(said, directions)
        directions = [each for each in directions if not _is_void(each.source, said)]
        return _Settled(kept, dropped, flags, directions, absent, said)

    def _left_out(self) -> tuple[str, ...]:
        """Patterns of the keys that the left side has no place for."""
        sizes = derive(self.sizes, self.derived, self.place)
        lengths = lengths_of(sizes)
        sides = [Side(key, ()) for key in self.left_out if key.needs <= lengths.keys()]
        require_countable(sides, sizes, self.place)
        return tuple(text for side in sides for text in side.keys(lengths))

    def _padded(self, mapped: Mapped) -> Mapped:
        """`mapped` with left arrays filled up with zeros on the axes that are to be longer."""
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
                        arrays[key] = padded(arrays[key], (*shape[:at], length, *shape[at + 1 :]))
        return replace(mapped, arrays=arrays)

    def _windowed(
        self, arrays: Mapping[str, LazyArray], cut: Collection[str]
    ) -> tuple[Mapping[str, LazyArray], dict[str, tuple[int, int]], dict[str, int]]:
        """The arrays without what they have too much on the axes to cut; what was cut by axis, by key."""
        kept = dict(arrays)
        lengths: dict[str, tuple[int, int]] = {}
        surplus: dict[str, int] = {}
        for axis in [axis for axis in cut if axis in self.sizes]:
            wanted = self.sizes[axis].length
            sides = [row.left for row in self.rows if (axis,) in row.left.groups]
            for side in [side for side in sides if not side.key.axes]:
                array = kept.get(str(side.key))
                at = side.groups.index((axis,))
                if array is None or len(array.shape) != len(side.groups) or array.shape[at] <= wanted:
                    continue
                lengths[axis] = (array.shape[at], wanted)
                shape = (*array.shape[:at], wanted, *array.shape[at + 1 :])
                kept[str(side.key)] = window(array, (0,) * len(shape), shape)
                surplus[str(side.key)] = at
        return kept, lengths, surplus

    def _unified(self, arrays: Mapping[str, LazyArray], directions: list[_Direction]) -> dict[str, Size]:
        """Sizes from the configuration, by formula, from shapes, and from the numbers in names."""
        sides = [each.source for each in directions]
        both = (side for each in directions for side in (each.source, each.target))
        known = {**self.sizes, **labelled_sizes(both)}
        sizes = derive(known, self.derived, self.place)
        sizes = unify(sizes, _observed(arrays, sides, sizes))
        sizes = derive(sizes_from_keys(sizes, arrays, sides), self.derived, self.place)
        return unify(sizes_from_keys(sizes, arrays, sides), _observed(arrays, sides, sizes))


def labelled_sizes(sides: Iterable[Side]) -> dict[str, Size]:
    """The axes that keys write as words."""
    return {
        field.axes[0]: Size(len(field.labels), f"the labels of {side.key}")
        for side in sides
        for field in side.key.fields
        if field.labels
    }


def _unmatched(pattern: str, keys: Iterable[str], place: str) -> UsageError:
    below = f"{pattern}.*"
    hint = f"`ckpt inspect tree {quote(place or 'SRC')} --flat` shows all names"
    if any(_matches(key, (below,)) for key in keys):
        hint = f"did you mean '{below}'?"
    return UsageError("nothing has a name that matches", place=place, got=pattern, hint=hint)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _without_layers(sizes: Mapping[str, Size], directions: Iterable[_Direction]) -> dict[str, Size]:
    """Without a configuration, a group of layers of which no name is there is a group of none."""
    keys = (side.key for each in directions for side in (each.source, each.target))
    axes = {axis for key in keys for axis in key.axes if axis not in sizes}
    return {**sizes, **{axis: Size(0, "no array is named after it") for axis in axes}}


def _is_void(side: Side, sizes: Mapping[str, Size]) -> bool:
    """Whether an axis has no coordinate: the model has no such arrays."""
    return any(axis in sizes and sizes[axis].length == 0 for axis in side.axes)


def _expected(direction: _Direction, flags: Mapping[str, Flag]) -> Expected:
    """Who says that the row is, or is not, part of the model, and what may be chosen instead."""
    deciding = [flags[name] for name in sorted(direction.row.flags) if flags[name].source]
    why = dict.fromkeys(flag.source for flag in deciding)
    remedies = dict.fromkeys(flag.remedy for flag in deciding if flag.remedy)
    return Expected(direction.source, "; ".join(why), "; ".join(remedies))


def _filled_up(settled: _Settled) -> _Settled:
    """With the right arrays that are in no file, where they are what is mapped and their shape is known."""
    sizes = lengths_of(settled.sizes)
    made: dict[str, LazyArray] = {}
    for each in settled.directions:
        known = {*each.source.axes, *each.source.key.needs} <= sizes.keys()
        if each.fills and known and isinstance(each.row.op, Fill):
            made |= dict.fromkeys(each.source.keys(sizes), each.row.op.array(each.source.shape(sizes)))
    return replace(settled, arrays={**made, **settled.arrays})


def _made(settled: _Settled, exact: bool) -> Mapped:
    """Every target array, once all is accounted for."""
    sizes, arrays = lengths_of(settled.sizes), settled.arrays
    made = _MadeArrays(sizes)
    notes: list[ValueNote] = []
    changed: set[str] = set()
    altered: set[str] = set()
    whole: set[str] = set()
    filled: dict[str, tuple[LazyArray, float]] = {}
    factors = _factors(settled.directions)
    for each in settled.directions:
        if isinstance(each.row.op, Factor) and each.inverse:
            notes.append(_product_note(each, arrays[next(each.source.keys(sizes))].dtype))
            continue
        if isinstance(each.row.op, Fill) and each.inverse:
            filled |= {key: (arrays[key], each.row.op.number) for key in each.source.keys(sizes)}
            continue
        parts = each.parts(arrays, sizes)
        if factor := factors.get(str(each.target.key)):
            parts = multiplied(each.source, factor.source, parts, arrays, sizes)
        conversion = each.conversion(sizes, each.dtypes(sizes, parts) if exact else ())
        own = _own(conversion, parts)
        made.add(each.target, own)
        if conversion.op:
            changed |= own.keys()
            altered |= set(each.source.keys(sizes))
            whole |= own.keys() if isinstance(each.row.op, Whole) else set()
            for dtype in each.dtypes(sizes, arrays):
                exactness = conversion.op.exactness(dtype)
                notes.append(ValueNote(str(each.target.key), exactness.exact, exactness.reason, dtype))
    return Mapped(
        made.arrays,
        sizes,
        tuple(notes),
        settled.dropped,
        frozenset(changed),
        frozenset(altered),
        whole=frozenset(whole),
        filled=filled,
    )


def _factors(directions: Iterable[_Direction]) -> dict[str, _Direction]:
    """Target keys of the arrays that source arrays without a target are multiplied into, with what they are.

    Raises:
        MappingError: no row makes such an array.
    """
    directions = list(directions)
    found = {
        product_of(str(each.target.key)): each
        for each in directions
        if isinstance(each.row.op, Factor) and each.inverse
    }
    if lost := found.keys() - {str(each.target.key) for each in directions}:
        raise MappingError(
            "no row makes the array that a factor is multiplied into", got=", ".join(sorted(lost))
        )
    return found


def _product_note(factor: _Direction, dtype: DType) -> ValueNote:
    """What becomes of a factor on the way to where it has no array."""
    reason = f"times {factor.source.key}: exact where that is 1 throughout, else rounded, at most 1 ulp off"
    return ValueNote(product_of(str(factor.target.key)), False, reason, dtype)


def _own(conversion: RowConversion, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """The target arrays of one row; an error names them."""
    key, sizes = conversion.target.key, conversion.sizes
    try:
        return {
            key.format(index, sizes): conversion.at(index, arrays)
            for index in conversion.target.indices(sizes)
        }
    except ShapeError as error:
        raise error if error.place else error.at(str(key)) from error


class _MadeArrays:
    """Target arrays as rows make them; those of several parts once all are there."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.arrays: dict[str, LazyArray] = {}
        self._sizes = sizes
        self._parts: dict[str, list[tuple[Side, LazyArray]]] = {}

    def add(self, target: Side, own: Mapping[str, LazyArray]) -> None:
        if target.join is None:
            self.arrays.update(own)
            return
        for key, array in own.items():
            parts = self._parts.setdefault(key, [])
            parts.append((target, array))
            if len(parts) == len(target.parts):
                self.arrays[key] = joined(parts, self._sizes)


def _made_partly(settled: _Settled, exact: bool) -> Mapped:
    """Every target array whose sources are all there."""
    sizes = lengths_of(settled.sizes)
    arrays, made, used = _filled_up(settled).arrays, _MadeArrays(sizes), set[str]()
    for each in settled.directions:
        if not {*each.source.axes, *each.source.key.needs, *each.target.key.needs} <= sizes.keys():
            continue
        for index in each.target.indices(sizes):
            keys = list(RowConversion(each.source, each.target, sizes).source_keys(index))
            shapes = {arrays[key].shape if key in arrays else None for key in keys}
            own = _own_sizes(each.source, shapes.pop(), sizes) if len(shapes) == 1 else None
            if own is not None:
                parts = each.parts(arrays, own)
                dtype = parts[keys[0]].dtype
                conversion = each.conversion(own, [dtype] if exact and dtype.bits == 16 else ())
                made.add(each.target, {each.target.key.format(index, sizes): conversion.at(index, parts)})
                used.update(keys)
    unused = tuple(key for key in settled.arrays if key not in used)
    return Mapped(made.arrays, sizes, (), settled.dropped, unused=unused)


def _own_sizes(side: Side, shape: Shape | None, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
    """The lengths with which a side has a shape: outermost axes may differ from `sizes`; None without any."""
    if shape is None or len(shape) != len(side.groups):
        return None
    if side.join is not None:
        return sizes if side.shape(sizes) == shape else None
    own = dict(sizes)
    for group, length in zip(side.groups, shape, strict=True):
        own[group[0]] = length // prod(sizes[axis] for axis in group[1:])
    return own if side.shape(own) == shape else None


def _exact(op: BoundOp, direction: _Direction, dtypes: Collection[DType]) -> BoundOp:
    """The op, or the wider one that is exact.

    Raises:
        UsageError: neither is, for values of one of these dtypes.
    """
    candidates = (op, op.widened())
    found = next((each for each in candidates if all(each.exactness(d).exact for d in dtypes)), None)
    if found is not None:
        return found
    lossy = next(dtype for dtype in dtypes if not op.widened().exactness(dtype).exact)
    raise UsageError(
        "these values cannot be stored so that the way back is exact",
        place=str(direction.target.key),
        got=f"{lossy}, {op.exactness(lossy).reason}",
        wanted="values of 16 bits or fewer",
        hint=f"leave {option('exact', True)} out",
    )


def _observed(
    arrays: Mapping[str, LazyArray], sides: Iterable[Side], sizes: Mapping[str, Size]
) -> list[Observation]:
    """The first array of each side: coordinate 0 of every axis."""
    found: list[Observation] = []
    known = lengths_of(sizes)
    for side in sides:
        axes = side.key.axes
        lengths = {**dict.fromkeys(axes, 1), **known}
        if side.key.needs <= lengths.keys():
            key = side.key.format(dict.fromkeys(axes, 0), lengths)
            if key in arrays:
                found.append(_observation(key, side, arrays[key].shape))
    return found


def _observation(key: str, side: Side, shape: Shape) -> Observation:
    """What an array tells of its axes: of one on which several parts lie, nothing."""
    at = side.join.at if side.join is not None and len(shape) == len(side.groups) else len(shape)
    groups = tuple(group for k, group in enumerate(side.groups) if k != at)
    return Observation(key, groups, (*shape[:at], *shape[at + 1 :]))
