"""Measure the deviation of two blocks of elements."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.compare.deviation import EXACT, Deviation, Tolerances
from ckpttools.compare.distances import as_doubles, steps_between
from ckpttools.compare.ulp import IN_FLOAT32, deviation_in_float32
from ckpttools.core.dtypes import DType

# Bytes that are compared at once, of each side. With shorter blocks, workers wait for the interpreter lock:
# bfloat16 ran at 1.9 GB/s on two cores with 512 KiB, 2.4 with 1 MiB, and 2.6 with 2 MiB.
_BLOCK_BYTES = 1 << 20
# Number of elements that are converted to float64 at once, in at most a dozen arrays.
_PART = 1 << 15
# Memory for `deviation_in_float32`, and for the positions of differing elements in a block.
SCRATCH_BYTES = 20 << 20


def deviation(
    a: np.ndarray,
    b: np.ndarray,
    dtypes: tuple[DType, DType],
    tolerances: Tolerances = EXACT,
    scratch: Scratch | None = None,
) -> Deviation:
    """Measure two blocks of at most about `block_elements`.

    Args:
        a, b: Carriers of the dtypes, of the same shape and in C order. The index `first` is relative to them.
        dtypes: Dtypes of `a` and `b`.
        tolerances: Deviations that do not count in `beyond`.
        scratch: Memory of `SCRATCH_BYTES`. Without it, memory is allocated and freed, which takes three times
            as long.
    """
    left, right = a.reshape(-1), b.reshape(-1)
    locations, other_bits = None, 0
    if dtypes[0] == dtypes[1]:
        unequal = _unequal_bits(left, right)
        other_bits = int(np.count_nonzero(unequal))
        # Extracting elements costs as much as comparing twice as many.
        if 2 * other_bits < unequal.size:
            locations = np.flatnonzero(unequal)
            left, right = left[locations], right[locations]
    if not left.size:
        return Deviation(a.size)
    result = _of_elements(left, right, dtypes, tolerances, scratch or Scratch(SCRATCH_BYTES))
    if result.first is not None:
        (where,) = result.first if locations is None else (locations[result.first[0]],)
        result = replace(result, first=tuple(map(int, np.unravel_index(where, a.shape))))
    return replace(result, elements=a.size, other_bits=max(0, other_bits - result.differing))


def block_elements(dtypes: tuple[DType, DType]) -> int:
    """Return the number of elements to pass to `deviation` at once."""
    return _BLOCK_BYTES // max(dtype.itemsize for dtype in dtypes)


def _unequal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "c":
        return np.asarray(a != b)
    halves = (item.view(np.uint64).reshape(-1, 2) for item in (a, b))
    return np.asarray(np.not_equal(*halves).any(axis=-1))


def _of_elements(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances, scratch: Scratch
) -> Deviation:
    """Measure elements one by one."""
    if all(dtype.name in IN_FLOAT32 for dtype in dtypes):
        result = deviation_in_float32((a, b), dtypes, tolerances, scratch)
        if result is not None:
            return result
    total = Deviation()
    for start in range(0, a.size, _PART):
        part = _of_part(a[start : start + _PART], b[start : start + _PART], dtypes, tolerances)
        total += replace(part, first=(part.first[0] + start,)) if part.first else part
    return total


def _of_part(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances) -> Deviation:
    """Measure a few consecutive elements in float64."""
    x, y = (as_doubles(item, dtype) for item, dtype in zip((a, b), dtypes, strict=True))
    steps = steps_between(a, b, dtypes)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nan = np.isnan(x), np.isnan(y)
        if steps is not None and dtypes[0].is_whole:
            # float64 cannot represent all 64-bit integers exactly.
            unequal, gap = steps != 0, steps.astype(np.float64)
        else:
            unequal, gap = (x != y) & ~(nan[0] & nan[1]), np.abs(x - y)
        one_nan = nan[0] != nan[1]
        size = np.maximum(np.abs(x), np.abs(y))
        compared = unequal & ~one_nan
        # Infinite complex numbers may have the same direction without being equal.
        gap[compared & np.isnan(gap)] = inf
        near = compared & np.isfinite(gap) & (gap <= tolerances.atol + tolerances.rtol * size)
        if steps is not None and tolerances.ulp:
            near |= compared & np.isfinite(gap) & (steps <= tolerances.ulp)
        relative = np.where(np.isfinite(gap), gap / size, inf)
    beyond = unequal & ~near
    differing, first = int(np.count_nonzero(unequal)), beyond if beyond.any() else unequal
    return Deviation(
        differing=differing,
        beyond=int(np.count_nonzero(beyond)),
        nan=int(np.count_nonzero(one_nan)),
        max_abs=_largest(gap, compared),
        max_rel=_largest(relative, compared),
        max_ulp=None if steps is None else int(steps.max(where=compared, initial=0)),
        first=(int(first.argmax()),) if differing else None,
    )


def _largest(values: np.ndarray, where: np.ndarray) -> float:
    return float(values.max(where=where, initial=0.0))
