"""Mean and spread of finite numbers.

Rows of 1,024 numbers are summed in the dtype of the numbers, and the sums of rows in float64. A large mean
costs no precision, because spreads are then computed around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from math import frexp, hypot, sqrt

import numpy as np

from ckpttools.array.scratch import ALIGNMENT, Scratch

Numbers = Sequence[np.ndarray]
"""1-d arrays of the same dtype, float32 or float64, that are treated as one sequence."""
Spread = tuple[int, float, float]
"""Count and mean of numbers, and the root of the sum of their squared deviations."""

_ROW = 1024
# Number of elements converted to float64 at a time, if the dtype is too narrow.
_PART = 1 << 17
# Memory for numbers in float64, and their distances from the mean.
SCRATCH_BYTES = 2 * 8 * _PART + 2 * ALIGNMENT
"""Scratch bytes of `spread`, in addition to the size of the numbers."""
# If the mean square is more than this multiple of the squared mean, subtracting the latter loses no digits.
_SMALL_MEAN = 64
# If the largest magnitude is between these bounds, squares that underflow are too small to change the sum,
# and sums of rows do not overflow.
_SQUARED = {
    np.dtype(np.float32): (2.0**-40, 2.0**56),
    np.dtype(np.float64): (2.0**-400, 2.0**480),
}


def spread(xs: Numbers, ends: tuple[float, float], scratch: Scratch) -> Spread:
    """Return the count, mean and spread of one or more finite numbers.

    Args:
        xs: The numbers.
        ends: Minimum and maximum of the numbers.
        scratch: Memory of `SCRATCH_BYTES` plus the size of the numbers.
    """
    low, high = ends
    if low == high:
        return sum(x.size for x in xs), low, 0.0
    limit, least_square, most_square = max(-low, high), *_SQUARED[xs[0].dtype]
    if least_square <= limit <= most_square:
        return _spread(xs, scratch)
    # Scale the numbers to nearly 1 by a power of two, which loses no digits.
    exponent = frexp(limit)[1]
    result: Spread = (0, 0.0, 0.0)
    with scratch.take((_PART,), np.dtype(np.float64)) as wider:
        for x in xs:
            for start in range(0, x.size, _PART):
                part = wider[: min(_PART, x.size - start)]
                part[...] = x[start : start + _PART]
                result = combined(result, _spread((np.ldexp(part, -exponent, out=part),), scratch))
    size, mean, root = result
    return size, float(np.ldexp(mean, exponent)), float(np.ldexp(root, exponent))


def combined(a: Spread, b: Spread) -> Spread:
    """Combine two spreads, as in Chan, Golub and LeVeque (1979)."""
    if not a[0] or not b[0]:
        return a if a[0] else b
    size, apart = a[0] + b[0], b[1] - a[1]
    share = b[0] / size
    return size, a[1] + apart * share, hypot(a[2], b[2], apart * sqrt(share * a[0]))


def _spread(xs: Numbers, scratch: Scratch) -> Spread:
    size = sum(x.size for x in xs)
    total, squares = _sums(xs)
    mean = total / size
    if _SMALL_MEAN * mean * mean * size < squares:
        return size, mean, sqrt(squares - size * mean * mean)
    center = xs[0].dtype.type(mean)
    with ExitStack() as stack:
        distances = [stack.enter_context(scratch.take(x.shape, x.dtype)) for x in xs]
        total, squares = _sums([np.subtract(x, center, out=d) for x, d in zip(xs, distances, strict=True)])
    off = total / size
    left = squares - size * off * off
    # Rounding may make the difference negative.
    return size, float(center) + off, sqrt(max(0.0, left))


def _sums(xs: Numbers) -> tuple[float, float]:
    """Return the sum and the sum of squares."""
    total, squares, ones = 0.0, 0.0, _ones(xs[0].dtype)
    for x in xs:
        whole = x.size // _ROW * _ROW
        rows = x[:whole].reshape(-1, _ROW)
        total += float(np.add.reduce(np.vecdot(rows, ones), dtype=np.float64))
        squares += float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64))
        if whole < x.size:
            rest = x[whole:]
            total += float(np.vdot(rest, ones[: rest.size]))
            squares += float(np.vdot(rest, rest))
    return total, squares


@cache
def _ones(dtype: np.dtype[np.generic]) -> np.ndarray:
    return np.ones(_ROW, dtype)
