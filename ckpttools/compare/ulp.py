"""Deviations of floating-point numbers of up to 32 bits, in float32: several times as fast as float64.

Because float32 rounds, close decisions are recalculated in float64: the largest deviations, and the elements
within the tolerances.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from ckpttools.array.elements import widen
from ckpttools.array.scratch import Scratch
from ckpttools.compare.deviation import Deviation, Tolerances
from ckpttools.compare.distances import as_doubles, coarser, steps_into
from ckpttools.core.dtypes import DType

IN_FLOAT32 = ("float16", "bfloat16", "float32")
"""Dtypes that float32 can represent, with the layout that `steps_into` needs."""

# Relative errors of float32 results here are less than 2**-22 ...
_HAIR = 2.0**-20
# ... and absolute errors of subnormal results are less than this.
_LEAST = 2.0**-140
# If more elements than this are close, the general method is used.
_MOST = 1 << 15
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)

Sides = tuple[np.ndarray, np.ndarray]
Dtypes = tuple[DType, DType]
"""Elements of both sides."""


def deviation_in_float32(
    sides: Sides, dtypes: Dtypes, tolerances: Tolerances, scratch: Scratch
) -> Deviation | None:
    """Return the deviation of consecutive elements; None if float32 is not precise enough.

    Args:
        sides: 1-d carriers of both sides, with at least one element.
        dtypes: Dtypes of both sides, among `IN_FLOAT32`.
        tolerances: Deviations that do not count in `beyond`.
        scratch: Memory of 32 bytes per element.
    """
    size = sides[0].size
    with (
        scratch.take((3, size), _FLOAT32) as (x, y, gap),
        scratch.take((size,), _BOOL) as mask,
        scratch.take((size,), coarser(*dtypes).carrier) as steps,
        np.errstate(invalid="ignore", over="ignore"),
    ):
        widen(sides[0], dtypes[0], x)
        widen(sides[1], dtypes[1], y)
        limit = float(np.absolute(np.subtract(x, y, out=gap), out=gap).max())
        if not isfinite(limit) or not _can_be_rounded(dtypes, x, y):
            return None
        # Different numbers always have a nonzero difference, thanks to subnormal numbers.
        if not limit:
            return Deviation()
        _steps(steps, sides, dtypes, (x, y), scratch)
        magnitudes = np.maximum(np.absolute(x, out=x), np.absolute(y, out=y), out=x)
        np.not_equal(gap, 0, out=mask)
        differing, first = int(np.count_nonzero(mask)), int(mask.argmax())
        beyond: int | None = differing
        if tolerances.any:
            beyond = _beyond(mask, gap, magnitudes, steps, y, sides, dtypes, tolerances, scratch)
            first = int(mask.argmax()) if beyond else first
        largest = _largest(mask, gap, limit, np.divide(gap, magnitudes, out=y), sides, dtypes)
        if beyond is None or largest is None:
            return None
        return Deviation(
            differing=differing,
            beyond=beyond,
            max_abs=largest[0],
            max_rel=largest[1],
            max_ulp=int(steps.max()),
            first=(first,),
        )


def _can_be_rounded(dtypes: Dtypes, *sides: np.ndarray) -> bool:
    """Return whether all numbers are within the range of the coarser dtype."""
    room = coarser(*dtypes).beyond_range
    return dtypes[0] == dtypes[1] or all(max(-float(side.min()), float(side.max())) < room for side in sides)


def _steps(
    out: np.ndarray,
    carriers: Sides,
    dtypes: Dtypes,
    values: Sides,
    scratch: Scratch,
) -> None:
    """Compute the steps between numbers in the coarser dtype; `values` are the elements in float32."""
    dtype = coarser(*dtypes)
    if dtypes[0] == dtypes[1]:
        steps_into(out, carriers[0], carriers[1], dtype, scratch)
        return
    with scratch.take((2, out.size), dtype.carrier) as sides:
        for k, side in enumerate(sides):
            if dtypes[k] == dtype:
                side[...] = carriers[k]
            elif dtype.name == "float16":
                side.view(np.float16)[...] = values[k]
            else:
                _to_bfloat16(values[k], side, scratch)
        steps_into(out, sides[0], sides[1], dtype, scratch)


def _to_bfloat16(values: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    """Round finite float32 numbers to nearest even, and write them as carriers."""
    bits = values.view(np.uint32)
    with scratch.take(bits.shape, bits.dtype) as rounded:
        # Rounds to nearest even: adds half of the last kept place, minus the smallest step if that place is
        # even.
        np.bitwise_and(np.right_shift(bits, 16, out=rounded), 1, out=rounded)
        np.add(np.add(rounded, 0x7FFF, out=rounded), bits, out=rounded)
        np.right_shift(rounded, 16, out=out, casting="unsafe")


def _largest(
    mask: np.ndarray, gap: np.ndarray, limit: float, relative: np.ndarray, sides: Sides, dtypes: Dtypes
) -> tuple[float, float] | None:
    """Return the largest absolute and relative difference; None if there are too many candidates.

    Args:
        mask: Overwritten.
        gap, limit: The differences, and the largest of them.
        relative: The relative differences; NaN, from 0 and 0, is ignored.
    """
    ends = (gap, limit), (relative, float(np.fmax.reduce(relative)))
    locations = [np.flatnonzero(np.greater_equal(item, end * (1 - _HAIR), out=mask)) for item, end in ends]
    farthest = np.concatenate(locations)
    if farthest.size > _MOST:
        return None
    apart, size = _exactly(farthest, sides, dtypes)
    return float(apart.max()), float((apart / size).max())


def _beyond(
    mask: np.ndarray,
    gap: np.ndarray,
    size: np.ndarray,
    steps: np.ndarray,
    bound: np.ndarray,
    sides: Sides,
    dtypes: Dtypes,
    tolerances: Tolerances,
    scratch: Scratch,
) -> int | None:
    """Return the number of elements that exceed the tolerances; None if float32 leaves too many in doubt.

    Args:
        mask: Receives the elements that exceed the tolerances.
        bound: Overwritten.
    """
    with scratch.take(mask.shape, _BOOL) as sure:
        np.add(np.multiply(size, tolerances.rtol, out=bound), tolerances.atol, out=bound)
        np.multiply(bound, 1 + _HAIR, out=bound)
        np.greater(gap, np.add(bound, _LEAST, out=bound), out=sure)
        np.multiply(bound, 1 - 3 * _HAIR, out=bound)
        np.maximum(np.subtract(bound, 4 * _LEAST, out=bound), 0, out=bound)
        np.greater(gap, bound, out=mask)
        if tolerances.ulp:
            mask &= np.greater(steps, tolerances.ulp)
        doubtful = np.flatnonzero(np.greater(mask, sure, out=sure))
    if doubtful.size > _MOST:
        return None
    apart, magnitude = _exactly(doubtful, sides, dtypes)
    mask[doubtful] &= apart > tolerances.atol + tolerances.rtol * magnitude
    return int(np.count_nonzero(mask))


def _exactly(locations: np.ndarray, sides: Sides, dtypes: Dtypes) -> Sides:
    """Return |a - b| and max(|a|, |b|) of a few elements, in float64."""
    x, y = (as_doubles(item[locations], dtype) for item, dtype in zip(sides, dtypes, strict=True))
    return np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
