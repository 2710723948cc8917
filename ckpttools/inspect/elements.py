"""Elements of any dtype as floating-point numbers to calculate with."""

from __future__ import annotations

from functools import cache

import numpy as np

from ckpttools.dtypes import DType


def wide(dtype: DType) -> np.dtype[np.generic]:
    """The dtype to calculate in: float32 holds every element of up to 16 bits, float64 nearly all others."""
    return np.dtype(np.float32 if dtype.bits <= 16 else np.float64)


def widen(values: np.ndarray, dtype: DType, out: np.ndarray) -> None:
    """out[...] = values: carriers of `dtype` become `wide(dtype)`, complex numbers their magnitude."""
    if dtype.name == "bfloat16":
        # Three times as fast as ml_dtypes' own.
        bits = out.view(np.uint32)
        bits[...] = values
        np.left_shift(bits, 16, out=bits)
    elif dtype.itemsize == 1:
        # Every carrier is an index of the table; "clip" only spares a look at each.
        table(dtype).take(values, out=out, mode="clip")
    elif dtype.kind == "complex":
        parts = values.view(dtype.numpy)
        np.hypot(parts.real, parts.imag, out=out, dtype=out.dtype)
    else:
        out[...] = values.view(dtype.numpy)


def widen_in_any_order(values: np.ndarray, dtype: DType, out: np.ndarray) -> None:
    """As `widen`, but the numbers may come in any order, which is faster for bfloat16.

    Args:
        values: carriers.
        dtype: of the elements.
        out: 1-d, of as many numbers.
    """
    if dtype.name != "bfloat16" or values.size % 2 or not values.flags.c_contiguous:
        widen(values, dtype, out.reshape(values.shape))
        return
    # Two elements are taken at once: the one in the lower half of 32 bits is shifted, the other masked.
    # 28 to 32 GB/s instead of 22 (one core, in the cache).
    pairs, bits = values.reshape(-1).view(np.uint32), out.view(np.uint32)
    np.left_shift(pairs, np.uint32(16), out=bits[: pairs.size])
    np.bitwise_and(pairs, np.uint32(0xFFFF0000), out=bits[pairs.size :])


@cache
def table(dtype: DType) -> np.ndarray:
    """The number that every carrier of a dtype of up to 16 bits stands for."""
    carriers = np.arange(1 << 8 * dtype.itemsize, dtype=dtype.carrier)
    if dtype.kind == "bool":
        return carriers.astype(bool).astype(np.float32)
    if dtype.packed:
        # Bits that an element lacks are zero in a sound file.
        carriers &= np.uint8((1 << dtype.bits) - 1)
    with np.errstate(invalid="ignore"):
        return carriers.view(dtype.numpy).astype(np.float32)


@cache
def smallest_normal(dtype: DType) -> float:
    """Magnitudes below it are subnormal; 0 for dtypes without such numbers."""
    if dtype.kind not in ("float", "complex"):
        return 0.0
    from ml_dtypes import finfo

    return float(finfo(dtype.numpy).smallest_normal)  # type: ignore[no-untyped-call]
