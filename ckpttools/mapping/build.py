"""Build target arrays as expressions of source arrays, once every source array is accounted for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import MappingError, ShapeError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.factor import Factor, multiply_array, multiply_factors
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.row import Row
from ckpttools.mapping.row_conversion import RowConversion, join_parts, part_of
from ckpttools.mapping.sizes import Size, lengths_of
from ckpttools.mapping.values import BoundOp, BoundRecode, Fill, Whole


@dataclass(frozen=True, slots=True)
class Direction:
    """A row read in one direction: right to left, or left to right as its inverse."""

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
        """Return whether the row creates arrays that the source side does not have."""
        return isinstance(self.row.op, Fill) and not self.inverse

    def conversion(self, sizes: Mapping[str, int], exact: Collection[DType] = ()) -> RowConversion:
        """Return the row's conversion at these sizes; raises the errors of `Table.to_left`.

        Args:
            sizes: Lengths of axes.
            exact: Dtypes of source arrays that must be converted without loss; empty if loss is allowed.
        """
        op = self.row.op.bound(sizes) if self.row.op else None
        if isinstance(op, BoundRecode):
            op = replace(op, name=str(self.target.key))
        if op and self.inverse:
            op = op.inverse()
        elif op and exact:
            op = _exact(op, self, exact)
        return RowConversion(self.source, self.target, sizes, op)

    def parts(self, arrays: Mapping[str, LazyArray], sizes: Mapping[str, int]) -> Mapping[str, LazyArray]:
        """Return the source arrays, or only the row's part of them."""
        if self.source.join is None:
            return arrays
        keys = [key for key in self.source.keys(sizes) if key in arrays]
        return {key: part_of(self.source, arrays[key], sizes) for key in keys}

    def dtypes(self, sizes: Mapping[str, int], arrays: Mapping[str, LazyArray]) -> list[DType]:
        """Return the distinct dtypes of the source arrays."""
        return list(dict.fromkeys(arrays[key].dtype for key in self.source.keys(sizes)))


@dataclass(frozen=True, slots=True)
class BoundTable:
    """A table bound to a model: everything that is known before arrays are compared with the rows.

    Attributes:
        arrays: Source arrays, without dropped ones.
        dropped: Source keys that were left out on purpose.
        flags: All flags of the model.
        directions, absent: Rows that the model has, and all other rows.
        sizes: The known lengths of axes.
    """

    arrays: Mapping[str, LazyArray]
    dropped: tuple[str, ...]
    flags: Mapping[str, Flag]
    directions: list[Direction]
    absent: list[Direction]
    sizes: Mapping[str, Size]


def _exact(op: BoundOp, direction: Direction, dtypes: Collection[DType]) -> BoundOp:
    """Return the op, or its wider variant if only that is exact.

    Raises:
        UsageError: Neither is exact for values of one of these dtypes.
    """
    candidates = (op, op.widened())
    exact_op = next(
        (candidate for candidate in candidates if all(candidate.exactness(d).exact for d in dtypes)), None
    )
    if exact_op is not None:
        return exact_op
    lossy = next(dtype for dtype in dtypes if not op.widened().exactness(dtype).exact)
    raise UsageError(
        "these values cannot be stored so that the reverse conversion is exact",
        location=str(direction.target.key),
        got=f"{lossy}, {op.exactness(lossy).reason}",
        expected="values of 16 bits or fewer",
        hint=f"leave {option('exact', True)} out",
    )


def build(bound: BoundTable, exact: bool) -> Mapped:
    """Build every target array, after checking that all arrays are accounted for."""
    sizes, arrays = lengths_of(bound.sizes), bound.arrays
    builder = _ArrayBuilder(sizes)
    notes: list[ValueNote] = []
    changed: set[str] = set()
    altered: set[str] = set()
    complete_keys: set[str] = set()
    filled: dict[str, tuple[LazyArray, float]] = {}
    factors = _factors(bound.directions)
    for direction in bound.directions:
        if isinstance(direction.row.op, Factor) and direction.inverse:
            notes.append(_product_note(direction, arrays[next(direction.source.keys(sizes))].dtype))
            continue
        if isinstance(direction.row.op, Fill) and direction.inverse:
            filled |= {key: (arrays[key], direction.row.op.number) for key in direction.source.keys(sizes)}
            continue
        parts = direction.parts(arrays, sizes)
        if factor := factors.get(str(direction.target.key)):
            parts = multiply_array(direction.source, factor.source, parts, arrays, sizes)
        conversion = direction.conversion(sizes, direction.dtypes(sizes, parts) if exact else ())
        own = _row_arrays(conversion, parts)
        builder.add(direction.target, own)
        if conversion.op:
            changed |= own.keys()
            altered |= set(direction.source.keys(sizes))
            complete_keys |= own.keys() if isinstance(direction.row.op, Whole) else set()
            for dtype in direction.dtypes(sizes, arrays):
                exactness = conversion.op.exactness(dtype)
                notes.append(ValueNote(str(direction.target.key), exactness.exact, exactness.reason, dtype))
    return Mapped(
        builder.arrays,
        sizes,
        tuple(notes),
        bound.dropped,
        frozenset(changed),
        frozenset(altered),
        whole=frozenset(complete_keys),
        filled=filled,
    )


def build_partly(bound: BoundTable, exact: bool) -> Mapped:
    """Build every target array whose sources are all present."""
    sizes = lengths_of(bound.sizes)
    arrays, builder, used = pad_to_shape(bound).arrays, _ArrayBuilder(sizes), set[str]()
    for direction in bound.directions:
        if (
            not {*direction.source.axes, *direction.source.key.needs, *direction.target.key.needs}
            <= sizes.keys()
        ):
            continue
        for index in direction.target.indices(sizes):
            keys = list(RowConversion(direction.source, direction.target, sizes).source_keys(index))
            shapes = {arrays[key].shape if key in arrays else None for key in keys}
            own = _sizes_from_shape(direction.source, shapes.pop(), sizes) if len(shapes) == 1 else None
            if own is not None:
                parts = direction.parts(arrays, own)
                dtype = parts[keys[0]].dtype
                conversion = direction.conversion(own, [dtype] if exact and dtype.bits == 16 else ())
                builder.add(
                    direction.target, {direction.target.key.format(index, sizes): conversion.at(index, parts)}
                )
                used.update(keys)
    unused = tuple(key for key in bound.arrays if key not in used)
    return Mapped(builder.arrays, sizes, (), bound.dropped, unused=unused)


def pad_to_shape(bound: BoundTable) -> BoundTable:
    """Add the mapped right arrays that no file contains and whose shape is known."""
    sizes = lengths_of(bound.sizes)
    padding: dict[str, LazyArray] = {}
    for direction in bound.directions:
        known = {*direction.source.axes, *direction.source.key.needs} <= sizes.keys()
        if direction.fills and known and isinstance(direction.row.op, Fill):
            padding |= dict.fromkeys(
                direction.source.keys(sizes), direction.row.op.array(direction.source.shape(sizes))
            )
    return replace(bound, arrays={**padding, **bound.arrays})


class _ArrayBuilder:
    """Builds target arrays from rows; arrays of several parts are built once all parts are present."""

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
                self.arrays[key] = join_parts(parts, self._sizes)


def _factors(directions: Iterable[Direction]) -> dict[str, Direction]:
    """Map the target keys of arrays that absorb a factor to a description of the product.

    A factor is a source array without a target.

    Raises:
        MappingError: No row produces such an array.
    """
    directions = list(directions)
    factors = {
        multiply_factors(str(direction.target.key)): direction
        for direction in directions
        if isinstance(direction.row.op, Factor) and direction.inverse
    }
    if lost := factors.keys() - {str(direction.target.key) for direction in directions}:
        raise MappingError("no row produces the array that absorbs a factor", got=", ".join(sorted(lost)))
    return factors


def _product_note(factor: Direction, dtype: DType) -> ValueNote:
    """Describe the conversion of a factor into a product on the side that has no array for it."""
    reason = f"times {factor.source.key}: exact if all factors are 1, else rounded, off by at most 1 ulp"
    return ValueNote(multiply_factors(str(factor.target.key)), False, reason, dtype)


def _row_arrays(conversion: RowConversion, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Build the target arrays of a row; errors name the arrays."""
    key, sizes = conversion.target.key, conversion.sizes
    try:
        return {
            key.format(index, sizes): conversion.at(index, arrays)
            for index in conversion.target.indices(sizes)
        }
    except ShapeError as error:
        raise error if error.location else error.at(str(key)) from error


def _sizes_from_shape(side: Side, shape: Shape | None, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
    """Infer the lengths for which a side has a shape; None if there are none.

    The outermost axes may differ from `sizes`.
    """
    if shape is None or len(shape) != len(side.groups):
        return None
    if side.join is not None:
        return sizes if side.shape(sizes) == shape else None
    own = dict(sizes)
    for group, length in zip(side.groups, shape, strict=True):
        own[group[0]] = length // prod(sizes[axis] for axis in group[1:])
    return own if side.shape(own) == shape else None


@dataclass(frozen=True, slots=True)
class ValueNote:
    """The effect of a row on values.

    Attributes:
        key: The target key, with axes in braces.
        exact: Whether the reverse conversion restores the original bits.
        reason: Why the bits are not restored, or the exceptions.
        dtype: The dtype that this applies to.
    """

    key: str
    exact: bool
    reason: str
    dtype: DType


def notes_of(values: Iterable[ValueNote]) -> Notes:
    """Return notes for the plan and the receipt on whether values convert back exactly."""
    notes = [(item.exact, Note(item.key, item.reason)) for item in values]
    inexact = tuple(note for exact, note in notes if not exact)
    return Notes(inexact, tuple(note for exact, note in notes if exact))


@dataclass(frozen=True)
class Mapped:
    """A model with the names and layout of the other side.

    Attributes:
        arrays: Target key -> lazy array.
        sizes: The length of every axis.
        values: Rows that change values.
        dropped: Source keys that were left out on purpose.
        changed: Target keys whose values were changed.
        altered: Source keys of the changed arrays.
        cut: Axis that was longer in the source than in the model -> both lengths.
        extra: Source key -> the axis on which its array was longer.
        unused: Source keys that no target uses, in a partial conversion.
        whole: Target keys of integer arrays, according to their rows.
        filled: Source key -> its array without a counterpart on the target side, and the expected value of
            its elements.
    """

    arrays: Mapping[str, LazyArray]
    sizes: Mapping[str, int]
    values: tuple[ValueNote, ...]
    dropped: tuple[str, ...]
    changed: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    filled: Mapping[str, tuple[LazyArray, float]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, LazyArray]:
        """Return the arrays except those that are integer arrays according to their rows."""
        return {key: array for key, array in self.arrays.items() if key not in self.whole}
