"""Deviations of floating-point numbers of up to 32 bits, through float32: several times as fast as float64.

float32 rounds. So whatever is decided by a hair is calculated once more, in float64: which elements are the
farthest apart, and which lie within the tolerances.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from ckpttools.array.elements import widen
from ckpttools.array.scratch import Scratch
from ckpttools.compare.deviation import Deviation, Tolerances
from ckpttools.compare.distances import coarser, numbers, steps_into
from ckpttools.core.dtypes import DType

NARROW = ("float16", "bfloat16", "float32")
"""Dtypes that float32 holds, with the layout that `steps_into` wants."""

# What float32 calculates here is wrong by less than one in 2**22 ...
_HAIR = 2.0**-20
# ... or, among subnormal numbers, by less than this.
_LEAST = 2.0**-140
# More elements that lie so near go the usual way.
_MOST = 1 << 15
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)

Dtypes = tuple[DType, DType]
"""Those of the one side and of the other."""


def deviation_of_narrow(
    a: np.ndarray, b: np.ndarray, dtypes: Dtypes, tolerances: Tolerances, scratch: Scratch
) -> Deviation | None:
    """The deviation of elements in a row; None where float32 does not do.

    Args:
        a, b: carriers, 1-d, at least one.
        dtypes: of `a` and of `b`, among `NARROW`.
        tolerances: what `beyond` leaves out.
        scratch: has 32 bytes for every element.
    """
    with (
        scratch.take((3, a.size), _FLOAT32) as (x, y, gap),
        scratch.take((a.size,), _BOOL) as mask,
        scratch.take((a.size,), coarser(*dtypes).carrier) as steps,
        np.errstate(invalid="ignore", over="ignore"),
    ):
        widen(a, dtypes[0], x)
        widen(b, dtypes[1], y)
        np.absolute(np.subtract(x, y, out=gap), out=gap)
        most = float(gap.max())
        if not isfinite(most):
            return None
        # Numbers that differ have a difference that is not 0: subnormal numbers see to that.
        np.not_equal(gap, 0, out=mask)
        differing, first = int(np.count_nonzero(mask)), int(mask.argmax())
        if not differing:
            return Deviation()
        if dtypes[0] != dtypes[1] and not _within_range(coarser(*dtypes), x, y):
            return None
        _steps(steps, (a, b), dtypes, (x, y), scratch)
        size = np.maximum(np.absolute(x, out=x), np.absolute(y, out=y), out=x)
        beyond = differing
        if tolerances.any:
            doubtful = _beyond(mask, gap, size, steps, tolerances, y, scratch)
            if doubtful.size > _MOST:
                return None
            mask[doubtful] &= _is_beyond(a[doubtful], b[doubtful], dtypes, tolerances)
            beyond = int(np.count_nonzero(mask))
            first = int(mask.argmax()) if beyond else first
        relative = np.divide(gap, size, out=y)
        # 0 and 0 are no relative difference, but NaN.
        most_relative = float(np.fmax.reduce(relative))
        farthest = np.concatenate([_at_least(gap, most, mask), _at_least(relative, most_relative, mask)])
        if farthest.size > _MOST:
            return None
        largest = _largest(a[farthest], b[farthest], dtypes)
        return Deviation(
            differing=differing,
            beyond=beyond,
            max_abs=largest[0],
            max_rel=largest[1],
            max_ulp=int(steps.max()),
            first=(first,),
        )


def _within_range(dtype: DType, *sides: np.ndarray) -> bool:
    """Whether all numbers can be rounded to some of the dtype."""
    return all(max(-float(each.min()), float(each.max())) < dtype.beyond_range for each in sides)


def _steps(
    out: np.ndarray,
    carriers: tuple[np.ndarray, np.ndarray],
    dtypes: Dtypes,
    values: tuple[np.ndarray, np.ndarray],
    scratch: Scratch,
) -> None:
    """Steps from one number to the next, in the coarser dtype; `values` are the elements in float32."""
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
    """Finite numbers of float32 rounded to nearest even, as carriers."""
    bits = values.view(np.uint32)
    with scratch.take(bits.shape, bits.dtype) as rounded:
        # The half of the last place that stays, less the smallest step where that place is even.
        np.bitwise_and(np.right_shift(bits, 16, out=rounded), 1, out=rounded)
        np.add(np.add(rounded, 0x7FFF, out=rounded), bits, out=rounded)
        np.right_shift(rounded, 16, out=out, casting="unsafe")


def _at_least(values: np.ndarray, most: float, mask: np.ndarray) -> np.ndarray:
    """The places of all values that may be the largest."""
    places: np.ndarray = np.flatnonzero(np.greater_equal(values, most * (1 - _HAIR), out=mask))
    return places


def _largest(a: np.ndarray, b: np.ndarray, dtypes: Dtypes) -> tuple[float, float]:
    """The largest difference of a few elements, and the largest in proportion."""
    x, y = map(numbers, (a, b), dtypes)
    gap, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    return float(gap.max()), float((gap / size).max())


def _beyond(
    mask: np.ndarray,
    gap: np.ndarray,
    size: np.ndarray,
    steps: np.ndarray,
    tolerances: Tolerances,
    bound: np.ndarray,
    scratch: Scratch,
) -> np.ndarray:
    """Which elements are beyond the tolerances.

    Args:
        mask: gets those that may be.
        bound: overwritten.

    Returns:
        The places of those of which float32 cannot tell whether they are beyond `atol` and `rtol`.
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
        doubtful: np.ndarray = np.flatnonzero(np.greater(mask, sure, out=sure))
        return doubtful


def _is_beyond(a: np.ndarray, b: np.ndarray, dtypes: Dtypes, tolerances: Tolerances) -> np.ndarray:
    """Whether single elements are farther apart than `atol` and `rtol` allow."""
    x, y = map(numbers, (a, b), dtypes)
    allowed = tolerances.atol + tolerances.rtol * np.maximum(np.abs(x), np.abs(y))
    return np.asarray(np.abs(x - y) > allowed)
