"""Conversion of values to another dtype, with counts of values that it cannot represent.

The counts, in the receipt of a run and in its `--json`:

    overflowed     became infinite, or NaN in a dtype without infinity
    saturated      became the largest or smallest value of a dtype without infinity and NaN
    underflowed    were not zero and became zero
    nan_lost       were NaN and became a number in a dtype without NaN
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckpttools.array.lazy import require_booleans
from ckpttools.array.rounding import as_float32, reusable_buffer, round_to
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.mapping.values import blockwise, round_constant

if TYPE_CHECKING:
    import numpy as np

# Number of bits of an int64 that a float64 cannot represent.
_SURPLUS_BITS = 11
# Number of elements rounded at a time: 1 MiB of float32.
_ROUNDED = 1 << 18


@dataclass(frozen=True, slots=True)
class Convert:
    """A conversion to another dtype, rounding to nearest even, including integers to floats and back.

    Out-of-range values become the nearest integer in range; NaN becomes 0.

    Attributes:
        to: The new dtype.
        name: The name of the array, for the message about bytes that are not booleans.
    """

    to: DType
    name: str = ""

    def result(self, dtype: DType) -> DType:
        return self.to

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> Mapping[str, int]:
        require_booleans(source.view(dtype.carrier), dtype, self.name)
        counts: Counter[str] = Counter()
        if dtype.name == "float32" and self.to.name == "bfloat16" and _are_flat(source, target):
            self._round(source.reshape(-1), target.reshape(-1), dtype, counts)
            return counts

        def convert(block: np.ndarray) -> np.ndarray:
            converted = self._convert(block, dtype)
            counts.update(self._count_losses(block, converted, dtype))
            return converted

        blockwise(source, target, dtype, self.to, convert)
        return counts

    def _round(self, source: np.ndarray, target: np.ndarray, dtype: DType, counts: Counter[str]) -> None:
        """Round values. This is the fast path for most means and merges."""
        import numpy as np

        for start in range(0, source.size, _ROUNDED):
            block = source[start : start + _ROUNDED].view(np.float32)
            rounded = target[start : start + _ROUNDED]
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                round_to(self.to, block, rounded)
            counts.update(self._count_losses(block, rounded.view(self.to.numpy), dtype))

    def _convert(self, block: np.ndarray, dtype: DType) -> np.ndarray:
        if self.to.is_float:
            whole = not dtype.is_float and self.to.bits < 64
            return round_constant(_as_float64(block, dtype) if whole else block, self.to)
        return _to_integers(block, dtype, self.to)

    def _count_losses(self, block: np.ndarray, converted: np.ndarray, dtype: DType) -> dict[str, int]:
        return (_count_float_losses if self.to.is_float else _count_integer_losses)(
            block, converted, dtype, self.to
        )


def is_lossless(dtype: DType, to: DType) -> bool:
    """Return whether `to` represents every value of an integer dtype."""
    if not dtype.is_whole:
        return dtype == to
    least, limit = dtype.limits
    if to.kind in ("int", "uint"):
        return to.limits[0] <= least and limit <= to.limits[1]
    # Some smaller dtypes have enough digits but not enough range.
    return dtype == to or (to.bits >= 16 and limit.bit_length() <= to.digits)


def _as_float64(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert integers to float64 so that rounding to a smaller dtype is correct to the last bit."""
    import numpy as np

    if dtype.bits < 64:
        return block.astype(np.float64)
    # Rounded to odd: float64's last bit records whether bits were cut off, which later decides ties.
    cut = block & block.dtype.type((1 << _SURPLUS_BITS) - 1) != 0
    odd = (block >> _SURPLUS_BITS | cut.astype(block.dtype)) << _SURPLUS_BITS
    limit = 1 << 53
    fits = (block <= limit) & (block >= -limit) if dtype.kind == "int" else block <= limit
    return np.where(fits, block, odd).astype(np.float64)


def _to_integers(block: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    import numpy as np

    least, limit = to.limits
    if not dtype.is_float:
        source = dtype.limits
        clipped: np.ndarray = np.clip(_plain(block, dtype), max(least, source[0]), min(limit, source[1]))
        return clipped.astype(to.numpy)
    wide = np.rint(block.astype(np.float64))
    inside: np.ndarray = np.where((wide > least) & (wide < limit), wide, 0).astype(_plain_dtype(to))
    inside[wide <= least] = least
    inside[wide >= limit] = limit
    return inside.astype(to.numpy)


def _plain(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert integers to a native numpy dtype."""
    return block.astype(_plain_dtype(dtype), copy=False)


def _plain_dtype(dtype: DType) -> np.dtype[np.generic]:
    return (DTYPES["int8"] if dtype.value_bits else dtype).numpy


def _count_float_losses(block: np.ndarray, converted: np.ndarray, dtype: DType, to: DType) -> dict[str, int]:
    import numpy as np

    if to.bits == 16 and (fewer := _underflowed(block, converted, dtype)) is not None:
        return {"underflowed": fewer} if fewer else {}
    counts = {"underflowed": _count(_is_zero(converted, to), lambda: _numbers(block, dtype) != 0)}
    if to.has_nan:
        before = np.isinf if to.has_infinity else np.isnan
        counts["overflowed"] = _count(_is_beyond(converted, to), lambda: ~before(_numbers(block, dtype)))
    else:
        source = _numbers(block, dtype)
        counts["saturated"] = _count(np.abs(source) >= _limit(to))
        counts["nan_lost"] = _count(np.isnan(source))
    return {name: count for name, count in counts.items() if count}


def _are_flat(*arrays: np.ndarray) -> bool:
    return all(array.flags.c_contiguous for array in arrays)


def _underflowed(block: np.ndarray, converted: np.ndarray, dtype: DType) -> int | None:
    """Count 16-bit values that became zero; None if some are infinite or NaN.

    Takes half as many passes as counting all outcomes.
    """
    import numpy as np

    bits = converted.view(np.uint16)
    magnitudes = np.bitwise_and(bits, 0x7FFF, out=reusable_buffer(bits.shape, bits.dtype))
    beyond = np.array(np.inf).astype(converted.dtype).view(np.uint16)
    if not magnitudes.size or magnitudes.max() >= beyond:
        return None
    if magnitudes.min():
        return 0
    zeros = np.flatnonzero(magnitudes == 0)
    return int(np.count_nonzero(_numbers(block.reshape(-1)[zeros], dtype)))


def _count_integer_losses(
    block: np.ndarray, converted: np.ndarray, dtype: DType, to: DType
) -> dict[str, int]:
    import numpy as np

    least, limit = to.limits
    if not dtype.is_float:
        source = _plain(block, dtype)
        beyond = _count((source < least) | (source > limit))
        return {"saturated": beyond} if beyond else {}
    numbers = np.rint(_numbers(block, dtype))
    counts = {
        # `limit` may not be a floating-point number, but this power of two is.
        "saturated": _count((numbers < least) | (numbers >= limit + 1)),
        "underflowed": _count(numbers == 0, lambda: _numbers(block, dtype) != 0),
        "nan_lost": _count(np.isnan(numbers)),
    }
    return {name: count for name, count in counts.items() if count}


def _is_zero(converted: np.ndarray, to: DType) -> np.ndarray:
    import numpy as np

    zero: np.ndarray
    if to.bits <= 8:
        zero = (_values(to) == 0)[converted.view(np.uint8)]
    elif to.bits == 16:
        # ml_dtypes compares one element at a time, and numpy first converts float16 to float32.
        zero = converted.view(np.uint16) << 1 == 0
    else:
        zero = converted == 0
    return zero


def _is_beyond(converted: np.ndarray, to: DType) -> np.ndarray:
    """Mark infinite values, or NaN in a dtype without infinity."""
    import numpy as np

    beyond: np.ndarray
    if to.bits <= 8:
        beyond = (np.isinf if to.has_infinity else np.isnan)(_values(to))[converted.view(np.uint8)]
    elif to.bits == 16:
        beyond = converted.view(np.uint16) & 0x7FFF == np.array(np.inf).astype(to.numpy).view(np.uint16)
    else:
        beyond = np.isinf(converted)
    return beyond


def _count(mask: np.ndarray, but: Callable[[], np.ndarray] | None = None) -> int:
    """Count the elements where `mask` is true and `but` is false; `but` is computed only if needed."""
    import numpy as np

    count = int(np.count_nonzero(mask))
    return int(np.count_nonzero(mask & but())) if count and but else count


def _numbers(block: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the values as float32, or as float64 for wider ones and integers."""
    import numpy as np

    if dtype.is_float and dtype.bits <= 8:
        # ml_dtypes converts one element at a time, which is 8 times slower than a lookup.
        values: np.ndarray = _values(dtype)[block.view(np.uint8)]
        return values
    is_small = dtype.is_float and dtype.bits <= 32
    return as_float32(block) if is_small else block.astype(np.float64, copy=False)


@cache
def _values(dtype: DType) -> np.ndarray:
    """Return the value of each byte in a dtype of at most 8 bits."""
    import numpy as np

    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)


def _limit(dtype: DType) -> float:
    """Return the midpoint between the largest number and the next larger one, which the dtype lacks."""
    import numpy as np

    second, largest = np.unique(np.abs(_values(dtype)[: 1 << dtype.bits]))[-2:]
    return float(largest + (largest - second) / 2)
