"""Arithmetic of encoders: the largest magnitude of each block, floats of a few bits and back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckpttools.array.blockwise import NotFiniteError
from ckpttools.core.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy as np


def block_maxima(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block, in float32.

    Args:
        values: (rows, columns) of a floating-point dtype of at least 16 bits.
        block: rows and columns of a block; the last ones may be smaller.

    Raises:
        NotFiniteError: NaN or infinity is among them, also as a float64 that float32 cannot hold.
    """
    import numpy as np

    if values.dtype.itemsize == 8:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    # Magnitudes have the order of their patterns, NaN the last: whole numbers are compared at 8 GB/s, where
    # bfloat16 has no loop of its own.
    kind = np.dtype(f"u{values.dtype.itemsize}")
    patterns = values.view(kind) & kind.type((1 << 8 * kind.itemsize - 1) - 1)
    largest = _maxima(_maxima(patterns, 0, block[0]), 1, block[1]).view(values.dtype).astype(np.float32)
    if not np.isfinite(largest).all():
        raise NotFiniteError
    return largest


def _maxima(values: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The largest of every `size` neighbours on one axis of two, of fewer at the end."""
    import numpy as np

    length = values.shape[axis]
    whole = length // size * size
    head, tail = np.split(values, [whole], axis)
    split = (*head.shape[:axis], whole // size, size, *head.shape[axis + 1 :])
    result = head.reshape(split).max(axis + 1, initial=0)
    return result if whole == length else np.concatenate([result, tail.max(axis, keepdims=True)], axis)


def rounded_to_few_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats of a few bits, rounded once to nearest, ties to even; what is beyond their range is the largest.

    Args:
        values: float32, none of them NaN.
        dtype: such as "float8_e4m3fn".

    Returns:
        Codes of the shape of `values`, uint8.
    """
    import numpy as np

    bits = values.view(np.uint32)
    # Rounded to odd, the upper half knows of the lower one what rounding again has to know. Looking the code
    # up takes 1.5 ns an element with that, where ml_dtypes casts in 17.
    upper = bits & np.uint32(0xFFFF)
    upper += np.uint32(0xFFFF)
    upper |= bits
    upper >>= np.uint32(16)
    codes: np.ndarray = _codes(dtype)[upper]
    return codes


def numbers(codes: np.ndarray, dtype: str) -> np.ndarray:
    """What codes stand for, in float32; the arguments as of `rounded_to_few_bits`."""
    built: np.ndarray = _numbers(dtype).take(codes)
    return built


@cache
def _codes(dtype: str) -> np.ndarray:
    """The code of each float32 of which the lower half is zero, by its upper half."""
    import numpy as np

    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    limit = np.nanmax(np.abs(_numbers(dtype)))
    kept = np.clip(np.where(np.isnan(values), 0, values), -limit, limit)
    return kept.astype(DTYPES[dtype].numpy).view(np.uint8)


@cache
def _numbers(dtype: str) -> np.ndarray:
    import numpy as np

    codes = np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8)
    return codes.view(DTYPES[dtype].numpy).astype(np.float32)
