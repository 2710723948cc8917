"""Extremes of floating-point numbers, told from their bit patterns without making numbers of them.

IEEE 754 orders the patterns of one sign by magnitude: as integers with a sign the least and the largest
positive number are where one looks for them, as integers without one the least and the largest negative.
Statistics of bfloat16 go at 6.1 GB/s (two cores) instead of 5.6, together with the widening in any order that
this allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ckpttools.dtypes import DType

# Dtypes laid out as IEEE 754 says: the sign, then an exponent of which all ones is no number.
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}


@dataclass(frozen=True, slots=True)
class Extremes:
    """Of finite numbers.

    Attributes:
        low, high: the least and the largest.
        smallest: the magnitude of the one nearest to zero.
    """

    low: float
    high: float
    smallest: float


def extremes(carriers: np.ndarray, dtype: DType) -> Extremes | None:
    """The extremes of at least one element; None if one is NaN or infinite, or the dtype has another layout.

    Args:
        carriers: of any shape and strides.
        dtype: of the elements.
    """
    infinity = _EXPONENT.get(dtype.name)
    if infinity is None:
        return None
    sign = 1 << (dtype.bits - 1)
    signed = carriers.view(f"<i{dtype.itemsize}")
    first, last = int(carriers.min()), int(carriers.max())
    least, most = int(signed.min()), int(signed.max())
    # Patterns of magnitudes, the smallest and the largest, of positive and of negative numbers. Without a
    # sign negative numbers come last; with one they come first, the nearest to zero in front.
    positive = (first, most) if first < sign else None
    negative = (least + sign, last - sign) if last >= sign else None
    if any(side is not None and side[1] >= infinity for side in (positive, negative)):
        return None
    number = partial(_number, dtype)
    match positive, negative:
        case (near, far), None:
            return Extremes(number(near), number(far), number(near))
        case None, (near, far):
            return Extremes(-number(far), -number(near), number(near))
        case (near, far), (other, low):
            return Extremes(-number(low), number(far), number(min(near, other)))
    raise ValueError("no elements have no extremes")


def _number(dtype: DType, pattern: int) -> float:
    return float(np.array(pattern, dtype.carrier).view(dtype.numpy))
