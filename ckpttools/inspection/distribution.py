"""The distribution of an array's elements over magnitudes, from counts of their bit patterns.

For dtypes of up to 16 bits, each pattern is counted, so all results are exact. For wider dtypes, the first 16
bits are counted: powers of two are exact, and quantiles are as precise as those bits (7 bits of the mantissa
in float32, 4 in float64). Integers of 32 and 64 bits and magnitudes of complex numbers count as float64.
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
from ckpttools.inspection.moment_statistics import Moments, iter_blocks

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_PATTERNS = 1 << 16
# Up to this number of elements are sorted; more are counted in a table of all patterns.
_MAX_SORTED = 1 << 13
# Number of elements counted at a time.
_BLOCK = 1 << 19
# Memory for numbers, patterns as indices, and counts.
SCRATCH_BYTES = _BLOCK * (8 + 8) + _PATTERNS * 8 + 4 * ALIGNMENT


# Memory of an object with its quantiles, and of each of its bins. 20,000 arrays with 20 bins took 3.6 KiB
# each.
_BYTES, _BYTES_PER_BIN = 1024, 160


@dataclass(frozen=True, slots=True)
class Bin:
    """Number of finite elements with 2**exponent <= magnitude < 2**(exponent + 1), by sign."""

    exponent: int
    negative: int
    positive: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of an array's finite elements.

    Attributes:
        zeros: Number of elements below 2**`min_exponent`; the statistics have the number of exact zeros.
        min_exponent: Smallest exponent that is distinguished from zero: that of the dtype's smallest
            magnitude; -133 for float32, -1026 for dtypes converted to float64.
        bins: Bins of the other elements, smallest magnitudes first; empty bins are left out.
        quantiles: For each fraction, the smallest element that this fraction of the elements does not exceed.
        is_exact: Whether the quantiles are elements; otherwise they are midpoints of patterns with the same
            first bits.
    """

    zeros: int
    min_exponent: int
    bins: tuple[Bin, ...]
    quantiles: Mapping[float, float]
    is_exact: bool

    def _repr_html_(self) -> str:
        """Draw the bins from large negative to large positive magnitudes, with the zeros between them."""
        counts = [
            *((f"-2^{item.exponent}", item.negative) for item in reversed(self.bins)),
            ("0", self.zeros),
            *((f"2^{item.exponent}", item.positive) for item in self.bins),
        ]
        highest = max(count for _, count in counts) or 1
        bars = "".join(
            f'<rect x="{4 * number}" y="{30 - 30 * count / highest:.1f}" width="3" '
            f'height="{30 * count / highest:.1f}"><title>{label}: {count:,}</title></rect>'
            for number, (label, count) in enumerate(counts)
        )
        width = 4 * len(counts)
        return (
            f'<svg width="{width}" height="30" viewBox="0 0 {width} 30" fill="currentColor" role="img">'
            f"<title>distribution over powers of two</title>{bars}</svg>"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Occurring patterns and their counts, sorted by pattern."""

    patterns: np.ndarray
    times: np.ndarray


def count_patterns(values: np.ndarray, dtype: DType, scratch: Scratch) -> Counts:
    """Count the bit patterns of a piece.

    Args:
        values: Carriers of `dtype`, of any shape.
        dtype: Dtype of the elements.
        scratch: Memory of `SCRATCH_BYTES`.
    """
    index = np.dtype(np.int64)
    is_small = values.size <= _MAX_SORTED
    quiet = np.errstate(invalid="ignore", over="ignore")
    with quiet, scratch.take((min(_BLOCK, values.size),), index) as indices:
        if is_small:
            _patterns(values, dtype, indices.reshape(values.shape), scratch)
            return Counts(*np.unique(indices, return_counts=True))
        with scratch.take((_PATTERNS,), index) as counts:
            counts[...] = 0
            for _, block in iter_blocks(values, _BLOCK):
                block_indices = indices[: block.size]
                _patterns(block, dtype, block_indices.reshape(block.shape), scratch)
                # np.bincount takes 1.5 times as long, because it searches for extremes first.
                np.add.at(counts, block_indices, 1)
            patterns = np.flatnonzero(counts)
            return Counts(patterns, counts[patterns])


def _patterns(block: np.ndarray, dtype: DType, out: np.ndarray, scratch: Scratch) -> None:
    """Write the first 16 bits of every element, or all bits of smaller dtypes, to `out`."""
    if dtype.bits <= 16:
        out[...] = block
    elif dtype.is_float:
        np.right_shift(block, dtype.bits - 16, out=out, casting="unsafe")
    else:
        with scratch.take(block.shape, wide(dtype)) as numbers:
            widen(block, dtype, numbers)
            np.right_shift(numbers.view(np.uint64), 48, out=out, casting="unsafe")


def sum_counts(counts: Iterable[Counts]) -> Counts | None:
    """Return the sum of all counts; None if there are none."""
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

    Returns None if no element is finite, or if a magnitude exceeds float64, so that its pattern is unknown.
    """
    if result.min is None or result.max is None or not isfinite(result.max):
        return None
    values = _values(dtype)[counts.patterns]
    finite = np.isfinite(values)
    values, times = values[finite], counts.times[finite]
    quantiles = {
        share: min(max(item, result.min), result.max) + 0 for share, item in _quantiles(values, times)
    }
    zeros = int(times[values == 0].sum())
    return Distribution(zeros, _min_exponent(dtype), _bins(values, times), quantiles, dtype.bits <= 16)


@cache
def _values(dtype: DType) -> np.ndarray:
    """Return the number of every pattern: the midpoint of numbers with the same first bits, or zero."""
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
def _min_exponent(dtype: DType) -> int:
    """Return the exponent of the smallest magnitude whose pattern differs from zero."""
    values = _values(dtype)
    magnitudes = abs(values[np.isfinite(values) & (values != 0)])
    return int(np.frexp(magnitudes.min())[1]) - 1


def max_bytes_of(array: LazyArray) -> int:
    """Return the maximum memory of an array's distribution, in bytes."""
    return _BYTES + _BYTES_PER_BIN * min(array.size, max_bins(array.dtype))


@cache
def max_bins(dtype: DType) -> int:
    """Return the maximum number of bins: the exponents of a dtype."""
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
    cumulative = np.cumsum(times[order])
    ranks = [ceil(share * int(cumulative[-1])) for share in QUANTILES]
    yield from zip(QUANTILES, values[order[np.searchsorted(cumulative, ranks)]].tolist(), strict=True)
