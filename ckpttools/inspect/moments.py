"""What can be said of numbers one block at a time: extremes, mean, spread, and those that are not normal.

Counts and extremes are exact. Sums are taken in rows of 1,024 numbers, in the dtype of the block, and the
rows in float64. A large mean costs no digits: spreads are then taken around each block's own, and blocks are
joined as Chan, Golub and LeVeque do (1979).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, sqrt

import numpy as np

from ckpttools.dtypes import DType
from ckpttools.inspect.elements import smallest_normal, wide, widen, widen_in_any_order
from ckpttools.inspect.extremes import Extremes, extremes
from ckpttools.ir.scratch import ALIGNMENT, Scratch
from ckpttools.ir.views import view_of
from ckpttools.region import Region, Shape, split_to

# Numbers calculated with at a time. What numpy does with shorter blocks is over so soon that handing the
# interpreter's lock from thread to thread takes longer: bfloat16 at 4.6 GB/s on two cores in blocks of 1 MiB,
# 4.8 to 6.3 of 2, 5.8 to 6.1 of 4, and 4.5 to 5.2 of 8 MiB, which leave the cache.
_BLOCK_BYTES = 4 << 20
# Where float32 is too narrow, so many numbers at a time become float64.
_PART = 1 << 17
# Numbers, their distances from the mean, indices of a table or what is finite; and the part in float64.
SCRATCH_BYTES = 4 * _BLOCK_BYTES + 2 * 8 * _PART + 8 * ALIGNMENT
_ROW = 1024
# A mean square so many times that of the mean loses no digits when this is taken off.
_SMALL_MEAN = 64
# Between these magnitudes the squares that float32 loses are too small to be seen in the sum.
_NARROW_LEAST, _NARROW_MOST = 2.0**-40, 2.0**60


@dataclass(frozen=True, slots=True)
class Moments:
    """What was found in some elements. Adds up.

    Attributes:
        elements, finite: how many in all, and how many that are neither NaN nor infinite.
        min, max: of the finite ones, None where there are none; integers of integer dtypes.
        mean: of the finite ones.
        spread: sum of their squared distances from `mean`.
        zeros, subnormals, nan, inf: how many of each.
        first: index of the first NaN or infinite element in C order.
    """

    elements: int = 0
    finite: int = 0
    min: float | None = None
    max: float | None = None
    mean: float = 0.0
    spread: float = 0.0
    zeros: int = 0
    subnormals: int = 0
    nan: int = 0
    inf: int = 0
    first: Shape | None = None

    def __add__(self, other: Moments) -> Moments:
        finite = self.finite + other.finite
        apart, share = other.mean - self.mean, other.finite / max(1, finite)
        # An empty side has a mean of 0, which says nothing.
        mean = self.mean + apart * share if self.finite else other.mean
        between = apart * apart * share * self.finite if self.finite and other.finite else 0.0
        lows = [each.min for each in (self, other) if each.min is not None]
        highs = [each.max for each in (self, other) if each.max is not None]
        return Moments(
            elements=self.elements + other.elements,
            finite=finite,
            min=min(lows, default=None),
            max=max(highs, default=None),
            mean=mean,
            spread=self.spread + other.spread + between,
            zeros=self.zeros + other.zeros,
            subnormals=self.subnormals + other.subnormals,
            nan=self.nan + other.nan,
            inf=self.inf + other.inf,
            first=min((each.first for each in (self, other) if each.first is not None), default=None),
        )

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the finite elements, of the whole population."""
        return sqrt(self.spread / self.finite) if self.finite else None

    @property
    def norm(self) -> float | None:
        """L2 norm of the finite elements."""
        return sqrt(self.spread + self.finite * self.mean * self.mean) if self.finite else None


def moments(values: np.ndarray, region: Region, part: Region, dtype: DType, scratch: Scratch) -> Moments:
    """What is in a part of a piece.

    Args:
        values: carriers of `dtype`, of the shape of `region`.
        region: the piece that they are.
        part: a box within the region.
        dtype: of the elements.
        scratch: has `SCRATCH_BYTES`.
    """
    found, most = Moments(), _BLOCK_BYTES // wide(dtype).itemsize
    # NaN and what overflows are results here.
    with np.errstate(invalid="ignore", over="ignore"), scratch.take((most,), wide(dtype)) as numbers:
        for slab, block in blocks(values, region, part, most):
            x = numbers[: slab.size]
            seen = extremes(block, dtype)
            if seen is not None:
                widen_in_any_order(block, dtype, x)
                found += _finite(x, seen, dtype, scratch)
            else:
                widen(block, dtype, x.reshape(slab.shape))
                found += _with_integers(_block(x, slab, dtype, scratch), block, dtype)
    return found


def blocks(
    values: np.ndarray, region: Region, part: Region, most: int
) -> Iterator[tuple[Region, np.ndarray]]:
    """The part in slabs of at most `most` elements: where in the array, and the values."""
    for slab in split_to(part, most):
        yield slab, view_of(values, slab.relative_to(region))


def _block(x: np.ndarray, slab: Region, dtype: DType, scratch: Scratch) -> Moments:
    """Of one block; what is in `x` is lost."""
    # NaN and infinity are contagious: extremes that are finite say that all is.
    ends = _ends(x)
    if isfinite(ends.low) and isfinite(ends.high):
        return _finite(x, ends, dtype, scratch)
    with scratch.take(x.shape, np.dtype(bool)) as finite:
        np.isfinite(x, out=finite)
        kept = int(np.count_nonzero(finite))
        nan = int(np.count_nonzero(np.isnan(x)))
        inside = np.unravel_index(int(finite.argmin()), slab.shape)
        first = tuple(start + int(k) for start, k in zip(slab.start, inside, strict=True))
        with scratch.take((kept,), x.dtype) as left:
            np.compress(finite, x, out=left)
            rest = _finite(left, _ends(left), dtype, scratch) if kept else Moments()
    return replace(rest, elements=x.size, nan=nan, inf=x.size - kept - nan, first=first)


def _ends(x: np.ndarray) -> Extremes:
    """The extremes of numbers; which one is nearest to zero is not looked for."""
    return Extremes(float(x.min()), float(x.max()), smallest=0.0)


def _finite(x: np.ndarray, ends: Extremes, dtype: DType, scratch: Scratch) -> Moments:
    """Of finite numbers, at least one; none of a smaller magnitude than `ends.smallest`."""
    low, high, normal = ends.low, ends.high, smallest_normal(dtype)
    most = max(-low, high)
    with scratch.take(x.shape, x.dtype) as d:
        near_zero = ends.smallest == 0 or ends.smallest < normal
        zeros, subnormals = _near_zero(x, d, normal) if near_zero else (0, 0)
        if low == high:
            mean, spread = low, 0.0
        elif x.dtype == np.float64 or _NARROW_LEAST <= most <= _NARROW_MOST:
            mean, spread = _mean_and_spread(x, d)
        else:
            mean, spread = _mean_and_spread_in_parts(x, scratch)
    return Moments(x.size, x.size, low, high, mean, spread, zeros, subnormals)


def _near_zero(x: np.ndarray, d: np.ndarray, normal: float) -> tuple[int, int]:
    """How many zeros and how many subnormals."""
    np.absolute(x, out=d)
    least = float(d.min())
    if least > 0 and least >= normal:
        return 0, 0
    zeros = x.size - int(np.count_nonzero(d))
    return zeros, int(np.count_nonzero(d < normal)) - zeros if normal else 0


def _mean_and_spread(x: np.ndarray, d: np.ndarray) -> tuple[float, float]:
    ones = _ones(x.dtype)
    mean, squares = _dot(x, ones) / x.size, _dot(x, x)
    if _SMALL_MEAN * mean * mean * x.size < squares:
        return mean, squares - x.size * mean * mean
    centre = x.dtype.type(mean)
    np.subtract(x, centre, out=d)
    off = _dot(d, ones) / x.size
    spread = _dot(d, d) - x.size * off * off
    # Rounding may leave less than nothing; NaN stays.
    return float(centre) + off, 0.0 if spread < 0 else spread


def _mean_and_spread_in_parts(x: np.ndarray, scratch: Scratch) -> tuple[float, float]:
    """In float64, part after part."""
    found = Moments()
    with scratch.take((2, _PART), np.dtype(np.float64)) as (wider, distances):
        for start in range(0, x.size, _PART):
            part = wider[: min(_PART, x.size - start)]
            part[...] = x[start : start + _PART]
            mean, spread = _mean_and_spread(part, distances[: part.size])
            found += Moments(part.size, part.size, mean=mean, spread=spread)
    return found.mean, found.spread


@cache
def _ones(dtype: np.dtype[np.generic]) -> np.ndarray:
    return np.ones(_ROW, dtype)


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of a * b, in rows; `b` is as long as `a`, or one row."""
    whole = a.size // _ROW * _ROW
    rows = a[:whole].reshape(-1, _ROW)
    others = b if b.size == _ROW else b[:whole].reshape(-1, _ROW)
    total = float(np.vecdot(rows, others).sum(dtype=np.float64))
    if whole == a.size:
        return total
    rest = b[: a.size - whole] if b.size == _ROW else b[whole:]
    return total + float(np.vdot(a[whole:], rest))


def _with_integers(found: Moments, block: np.ndarray, dtype: DType) -> Moments:
    """Integers have integer extremes, which float64 rounds from 2**53 on."""
    if dtype.kind not in ("int", "uint", "bool") or found.min is None or found.max is None:
        return found
    if dtype.bits < 64:
        return replace(found, min=int(found.min), max=int(found.max))
    whole = block.view(dtype.numpy)
    return replace(found, min=int(whole.min()), max=int(whole.max()))
