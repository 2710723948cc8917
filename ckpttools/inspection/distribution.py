"""The distribution of an array's elements over magnitudes, from counts of their bit patterns.

Dtypes of up to 16 bits are counted pattern by pattern, so everything follows exactly. Of wider ones the first
16 bits are counted: powers of two are exact, quantiles as fine as those bits (7 of the mantissa in float32, 4
in float64). Integers of 32 and 64 bits and magnitudes of complex numbers count as float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import ceil, isfinite

import numpy as np

from ckpttools.array.elements import table, wide, widen
from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import ALIGNMENT, Scratch
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.inspection.moments import Moments, in_blocks

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_PATTERNS = 1 << 16
# So many elements are sorted, more are counted in a table of all patterns.
_FEW = 1 << 13
# Elements counted at a time.
_BLOCK = 1 << 19
# Numbers, patterns as indices, and counts.
SCRATCH_BYTES = _BLOCK * (8 + 8) + _PATTERNS * 8 + 4 * ALIGNMENT


# An object with its quantiles, and each of its bins. 20,000 arrays with 20 bins took 3.6 KiB each.
_BYTES, _BYTES_PER_BIN = 1024, 160


@dataclass(frozen=True, slots=True)
class Bin:
    """Finite elements with 2**exponent <= magnitude < 2**(exponent + 1), by their sign."""

    exponent: int
    negative: int
    positive: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of an array's finite elements.

    Attributes:
        zeros: how many are below 2**`least`; statistics count how many of these are zero.
        least: smallest exponent that is distinguished from zero: that of the dtype's smallest magnitude;
            -133 for
            float32, -1026 for dtypes converted to float64.
        bins: the others, smallest magnitudes first; empty bins are left out.
        quantiles: fraction of the elements -> smallest element that this fraction does not exceed.
        exact: whether the quantiles are elements, or midpoints of patterns with the same first bits.
    """

    zeros: int
    least: int
    bins: tuple[Bin, ...]
    quantiles: Mapping[float, float]
    exact: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Patterns that occur and how often, both sorted by pattern."""

    patterns: np.ndarray
    times: np.ndarray


def count_patterns(values: np.ndarray, dtype: DType, scratch: Scratch) -> Counts:
    """Count the bit patterns of a piece.

    Args:
        values: carriers of `dtype`, of any shape.
        dtype: of the elements.
        scratch: has `SCRATCH_BYTES`.
    """
    index = np.dtype(np.int64)
    few = values.size <= _FEW
    quiet = np.errstate(invalid="ignore", over="ignore")
    with quiet, scratch.take((min(_BLOCK, values.size),), index) as indices:
        if few:
            _patterns(values, dtype, indices.reshape(values.shape), scratch)
            return Counts(*np.unique(indices, return_counts=True))
        with scratch.take((_PATTERNS,), index) as counts:
            counts[...] = 0
            for _, block in in_blocks(values, _BLOCK):
                mine = indices[: block.size]
                _patterns(block, dtype, mine.reshape(block.shape), scratch)
                # np.bincount takes half as long again: it looks for extremes first.
                np.add.at(counts, mine, 1)
            patterns = np.flatnonzero(counts)
            return Counts(patterns, counts[patterns])


def _patterns(block: np.ndarray, dtype: DType, out: np.ndarray, scratch: Scratch) -> None:
    """Return the first 16 bits of every element, or all bits of smaller dtypes."""
    if dtype.bits <= 16:
        out[...] = block
    elif dtype.is_float:
        np.right_shift(block, dtype.bits - 16, out=out, casting="unsafe")
    else:
        with scratch.take(block.shape, wide(dtype)) as numbers:
            widen(block, dtype, numbers)
            np.right_shift(numbers.view(np.uint64), 48, out=out, casting="unsafe")


def summed(counts: Iterable[Counts]) -> Counts | None:
    """Return all counts together; None where there are none."""
    rest = iter(counts)
    first = next(rest, None)
    total: np.ndarray | None = None
    for item in rest:
        if total is None and first is not None:
            total = np.zeros(_PATTERNS, np.int64)
            total[first.patterns] = first.times
        if total is not None:
            total[item.patterns] += item.times
    if total is None:
        return first
    patterns = np.flatnonzero(total)
    return Counts(patterns, total[patterns])


def distribution(counts: Counts, result: Moments, dtype: DType) -> Distribution | None:
    """Return the distribution of an array from the counts and its moments.

    None if nothing is finite, or a magnitude exceeds float64, whose patterns are then unknown.
    """
    if result.min is None or result.max is None or not isfinite(result.max):
        return None
    held = _values(dtype)[counts.patterns]
    finite = np.isfinite(held)
    held, times = held[finite], counts.times[finite]
    quantiles = {share: min(max(item, result.min), result.max) + 0 for share, item in _quantiles(held, times)}
    zeros = int(times[held == 0].sum())
    return Distribution(zeros, _least(dtype), _bins(held, times), quantiles, dtype.bits <= 16)


@cache
def _values(dtype: DType) -> np.ndarray:
    """Return the number of every pattern; the middle of those with the same first bits, or zero."""
    if dtype.bits <= 16:
        with np.errstate(invalid="ignore"):
            return table(dtype).astype(np.float64)
    base = dtype if dtype.is_float else DTYPES["float64"]
    shift = base.bits - 16
    starts = np.arange(_PATTERNS, dtype=base.carrier) << base.carrier.type(shift)
    zero = starts << base.carrier.type(1) == 0
    middles = np.where(zero, starts, starts + base.carrier.type(1 << (shift - 1)))
    with np.errstate(invalid="ignore"):
        values: np.ndarray = middles.view(base.numpy).astype(np.float64)
    return values


@cache
def _least(dtype: DType) -> int:
    """Return the exponent of the smallest magnitude whose pattern differs from zero."""
    values = _values(dtype)
    magnitudes = abs(values[np.isfinite(values) & (values != 0)])
    return int(np.frexp(magnitudes.min())[1]) - 1


def most_bytes(array: LazyArray) -> int:
    """Return bytes of memory that an array's distribution takes at most."""
    return _BYTES + _BYTES_PER_BIN * min(array.size, most_bins(array.dtype))


@cache
def most_bins(dtype: DType) -> int:
    """Exponents that numbers of a dtype have."""
    values = _values(dtype)
    return int(np.unique(np.frexp(values[np.isfinite(values) & (values != 0)])[1]).size)


def _bins(values: np.ndarray, times: np.ndarray) -> tuple[Bin, ...]:
    used = values != 0
    exponents, negative, times = np.frexp(values[used])[1] - 1, values[used] < 0, times[used]
    return tuple(
        Bin(int(item), int(times[at & negative].sum()), int(times[at & ~negative].sum()))
        for item in np.unique(exponents)
        for at in [exponents == item]
    )


def _quantiles(values: np.ndarray, times: np.ndarray) -> Iterator[tuple[float, float]]:
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(times[order])
    ranks = [ceil(share * int(upto[-1])) for share in QUANTILES]
    yield from zip(QUANTILES, values[order[np.searchsorted(upto, ranks)]].tolist(), strict=True)
