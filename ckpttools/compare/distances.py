"""The distance of numbers of any dtype: in float64, and in steps between representable numbers."""

from __future__ import annotations

import numpy as np

from ckpttools.array.elements import wide, widen
from ckpttools.array.scratch import Scratch
from ckpttools.core.dtypes import DTYPES, DType


def as_doubles(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert elements to float64, or to complex128 if they are complex. 64-bit integers are rounded."""
    # Some NaN values cause numpy warnings.
    with np.errstate(invalid="ignore"):
        if dtype.kind == "complex":
            return carriers.view(dtype.numpy).astype(np.complex128)
        narrow = np.empty(carriers.shape, wide(dtype))
        widen(carriers, dtype, narrow)
        return narrow.astype(np.float64, copy=False)


def coarser(a: DType, b: DType) -> DType:
    """Return the floating-point dtype that rounds more; `a` if both round alike."""
    return b if b.epsilon > a.epsilon else a


def steps_between(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType]) -> np.ndarray | None:
    """Return the number of steps of the coarser dtype between the elements. The result for NaN is arbitrary.

    The distance to a number outside this dtype's range is larger than any distance within the range.
    """
    kinds = {"int" if dtype.is_whole else dtype.kind for dtype in dtypes}
    if kinds == {"float"}:
        dtype = coarser(*dtypes)
        sides = (_rounded(item, own, dtype) for item, own in zip((a, b), dtypes, strict=True))
        steps = _between(*(_ranks(side, dtype) for side in sides))
        for item, own in zip((a, b), dtypes, strict=True):
            if own != dtype:
                size = np.abs(as_doubles(item, own))
                steps[(size >= dtype.beyond_range) & np.isfinite(size)] = 1 << dtype.bits
        return steps
    if kinds == {"int"} and (dtypes[0] == dtypes[1] or "uint64" not in (d.name for d in dtypes)):
        return _between(*(_integers(item, own) for item, own in zip((a, b), dtypes, strict=True)))
    if kinds == {"complex"} and dtypes[0] == dtypes[1]:
        part = DTYPES["float32" if dtypes[0].name == "complex64" else "float64"]
        halves = [_ranks(item.view(part.carrier).reshape(-1, 2), part) for item in (a, b)]
        return np.asarray(_between(*halves).max(axis=-1))
    return None


def steps_into(out: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: DType, scratch: Scratch) -> None:
    """Compute `steps_between` several times as fast, in unsigned integers of the elements' width.

    Args:
        out: Carriers of the dtype, which are overwritten.
        a, b: 1-d carriers of a dtype with a sign bit followed by ordered magnitudes, without NaN.
        dtype: Dtype of the elements.
        scratch: Memory for twice the elements of `a`.
    """
    signed = np.dtype(f"<i{dtype.itemsize}")
    with scratch.take((2, a.size), signed) as (one, other):
        sign = out.view(signed)
        for carriers, ranks in ((a, one), (b, other)):
            # Negative numbers get negative ranks, by magnitude.
            np.right_shift(carriers.view(signed), dtype.bits - 1, out=sign)
            np.bitwise_and(sign, np.iinfo(signed).max, out=ranks)
            np.bitwise_xor(ranks, carriers.view(signed), out=ranks)
            np.subtract(ranks, sign, out=ranks)
        np.maximum(one, other, out=sign)
        np.subtract(sign, np.minimum(one, other, out=one), out=sign)


def _ranks(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the ranks of floating-point numbers; 0 and -0 have rank 0."""
    if dtype.bits == 64:
        signed, lowest = carriers.view(np.int64), np.iinfo(np.int64).min
        return np.asarray(np.where(signed < 0, lowest - signed, signed))
    locations: np.ndarray = carriers.astype(np.int64)
    if dtype.layout is not None and not dtype.layout.sign:
        return locations
    sign = 1 << (dtype.bits - 1)
    return np.asarray(np.where(locations >= sign, sign - locations, locations))


def _integers(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.kind == "bool":
        return np.asarray(carriers != 0).astype(np.int64)
    values = carriers.view(dtype.numpy)
    return np.asarray(values if dtype.name == "uint64" else values.astype(np.int64))


def _between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| as unsigned integers, since signed integers can overflow."""
    apart: np.ndarray = np.where(a > b, a - b, b - a)
    return apart.view(np.uint64)


def _rounded(carriers: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    if dtype == to:
        return carriers
    from ckpttools.mapping.values import round_constant

    return round_constant(carriers.view(dtype.numpy), to).view(to.carrier)
