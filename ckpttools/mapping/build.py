"""Target arrays, as expressions of source arrays that are accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import MappingError, ShapeError
from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.direction import Direction, Settled
from ckpttools.mapping.factor import Factor, multiplied, product_of
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.joining import joined
from ckpttools.mapping.mapped import Mapped, ValueNote
from ckpttools.mapping.row_conversion import RowConversion
from ckpttools.mapping.sizes import lengths_of
from ckpttools.mapping.whole_numbers import Whole


def build(settled: Settled, exact: bool) -> Mapped:
    """Every target array, once all is accounted for."""
    sizes, arrays = lengths_of(settled.sizes), settled.arrays
    built = _MadeArrays(sizes)
    notes: list[ValueNote] = []
    changed: set[str] = set()
    altered: set[str] = set()
    whole: set[str] = set()
    filled: dict[str, tuple[LazyArray, float]] = {}
    factors = _factors(settled.directions)
    for direction in settled.directions:
        if isinstance(direction.row.op, Factor) and direction.inverse:
            notes.append(_product_note(direction, arrays[next(direction.source.keys(sizes))].dtype))
            continue
        if isinstance(direction.row.op, Fill) and direction.inverse:
            filled |= {key: (arrays[key], direction.row.op.number) for key in direction.source.keys(sizes)}
            continue
        parts = direction.parts(arrays, sizes)
        if factor := factors.get(str(direction.target.key)):
            parts = multiplied(direction.source, factor.source, parts, arrays, sizes)
        conversion = direction.conversion(sizes, direction.dtypes(sizes, parts) if exact else ())
        own = _own(conversion, parts)
        built.add(direction.target, own)
        if conversion.op:
            changed |= own.keys()
            altered |= set(direction.source.keys(sizes))
            whole |= own.keys() if isinstance(direction.row.op, Whole) else set()
            for dtype in direction.dtypes(sizes, arrays):
                exactness = conversion.op.exactness(dtype)
                notes.append(ValueNote(str(direction.target.key), exactness.exact, exactness.reason, dtype))
    return Mapped(
        built.arrays,
        sizes,
        tuple(notes),
        settled.dropped,
        frozenset(changed),
        frozenset(altered),
        whole=frozenset(whole),
        filled=filled,
    )


def build_partly(settled: Settled, exact: bool) -> Mapped:
    """Every target array whose sources are all there."""
    sizes = lengths_of(settled.sizes)
    arrays, built, used = filled_up(settled).arrays, _MadeArrays(sizes), set[str]()
    for direction in settled.directions:
        if (
            not {*direction.source.axes, *direction.source.key.needs, *direction.target.key.needs}
            <= sizes.keys()
        ):
            continue
        for index in direction.target.indices(sizes):
            keys = list(RowConversion(direction.source, direction.target, sizes).source_keys(index))
            shapes = {arrays[key].shape if key in arrays else None for key in keys}
            own = _own_sizes(direction.source, shapes.pop(), sizes) if len(shapes) == 1 else None
            if own is not None:
                parts = direction.parts(arrays, own)
                dtype = parts[keys[0]].dtype
                conversion = direction.conversion(own, [dtype] if exact and dtype.bits == 16 else ())
                built.add(
                    direction.target, {direction.target.key.format(index, sizes): conversion.at(index, parts)}
                )
                used.update(keys)
    unused = tuple(key for key in settled.arrays if key not in used)
    return Mapped(built.arrays, sizes, (), settled.dropped, unused=unused)


def filled_up(settled: Settled) -> Settled:
    """With the right arrays that are in no file, where they are what is mapped and their shape is known."""
    sizes = lengths_of(settled.sizes)
    built: dict[str, LazyArray] = {}
    for direction in settled.directions:
        known = {*direction.source.axes, *direction.source.key.needs} <= sizes.keys()
        if direction.fills and known and isinstance(direction.row.op, Fill):
            built |= dict.fromkeys(
                direction.source.keys(sizes), direction.row.op.array(direction.source.shape(sizes))
            )
    return replace(settled, arrays={**built, **settled.arrays})


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


def _factors(directions: Iterable[Direction]) -> dict[str, Direction]:
    """Target keys of the arrays that source arrays without a target are multiplied into, with what they are.

    Raises:
        MappingError: no row makes such an array.
    """
    directions = list(directions)
    result = {
        product_of(str(direction.target.key)): direction
        for direction in directions
        if isinstance(direction.row.op, Factor) and direction.inverse
    }
    if lost := result.keys() - {str(direction.target.key) for direction in directions}:
        raise MappingError(
            "no row makes the array that a factor is multiplied into", got=", ".join(sorted(lost))
        )
    return result


def _product_note(factor: Direction, dtype: DType) -> ValueNote:
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
        raise error if error.location else error.at(str(key)) from error


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
