"""Encoders that quantize weights to FP8 blocks (as in DeepSeek V3) and to MXFP4 (as in gpt-oss)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckpttools.array.blockwise import NonFiniteError, error_sums
from ckpttools.array.rounding import as_float32
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType

if TYPE_CHECKING:
    import numpy as np


_FP8_CODE, _FP8_MAX = "float8_e4m3fn", 448.0
# Smaller scales would be subnormal, which devices flush to zero.
_FP8_MIN_SCALE = 2.0**-126
# Number of elements that are encoded at a time, whose float32 copies fit in a core's cache.
_TILE_ELEMENTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Fp8BlockEncoder:
    """Encodes FP8 like DeepSeek V3: E4M3 codes with a float32 scale for each block.

    A scale is the largest magnitude of its block divided by 448, the largest E4M3 number. Codes are values
    divided by their scale, rounded once to nearest even. Blocks of zeros have the scale 1.

    Attributes:
        rows, columns: Shape of a block.
    """

    rows: int = 128
    columns: int = 128

    @property
    def block(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def packed(self) -> int:
        return 1

    @property
    def code(self) -> DType:
        return DTYPES[_FP8_CODE]

    @property
    def scale(self) -> DType:
        return DTYPES["float32"]

    def scales(self, values: np.ndarray) -> np.ndarray:
        import numpy as np

        largest = block_maxima(values, self.block)
        scales = largest / np.float32(_FP8_MAX)
        np.maximum(scales, np.float32(_FP8_MIN_SCALE), out=scales)
        scales[largest == 0] = 1
        return scales.view("<u4")

    def codes(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        codes = np.empty(values.shape, np.uint8)
        for rows, columns, scale in self._strips(values.shape, scales.view("<f4")):
            quotients: np.ndarray = np.divide(as_float32(values[rows, columns]), scale)
            codes[rows, columns] = round_to_narrow_float(quotients, _FP8_CODE)
        return codes

    def decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        result = np.empty(codes.shape, np.float32)
        for rows, columns, scale in self._strips(codes.shape, scales.view("<f4")):
            np.multiply(decode_codes(codes[rows, columns], _FP8_CODE), scale, out=result[rows, columns])
        return result

    def lost(self, values: np.ndarray, decoded: np.ndarray) -> Mapping[str, float]:
        return error_sums(values, decoded)

    def _strips(
        self, shape: tuple[int, ...], scales: np.ndarray
    ) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield slices of rows and columns in one row of blocks, with the scale of each column."""
        import numpy as np

        high, wide = self.block
        across = max(1, _TILE_ELEMENTS // high // wide)
        for number, strip in enumerate(scales):
            rows = slice(number * high, min((number + 1) * high, shape[0]))
            for first in range(0, len(strip), across):
                columns = slice(first * wide, min((first + across) * wide, shape[1]))
                scale = np.repeat(strip[first : first + across], wide)[: columns.stop - columns.start]
                yield rows, columns, scale


def block_maxima(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the largest magnitude of each block, in float32.

    Args:
        values: Array (rows, columns) of a floating-point dtype with at least 16 bits.
        block: Rows and columns of a block; the last blocks may be smaller.

    Raises:
        NonFiniteError: The values contain NaN or infinity, or float64 values outside float32's range.
    """
    import numpy as np

    if values.dtype.itemsize == 8:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    # Magnitudes sort like their bit patterns, with NaN last. Integers are compared at 8 GB/s, whereas numpy
    # has no native loop for bfloat16.
    kind = np.dtype(f"u{values.dtype.itemsize}")
    patterns = values.view(kind) & kind.type((1 << 8 * kind.itemsize - 1) - 1)
    largest = _maxima(_maxima(patterns, 0, block[0]), 1, block[1]).view(values.dtype).astype(np.float32)
    if not np.isfinite(largest).all():
        raise NonFiniteError
    return largest


def _maxima(values: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Return the maximum of every `size` neighbors on one of two axes; the last group may be smaller."""
    import numpy as np

    length = values.shape[axis]
    full_length = length // size * size
    head, tail = np.split(values, [full_length], axis)
    split = (*head.shape[:axis], full_length // size, size, *head.shape[axis + 1 :])
    result = head.reshape(split).max(axis + 1, initial=0)
    return result if full_length == length else np.concatenate([result, tail.max(axis, keepdims=True)], axis)


def round_to_narrow_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round once to narrow floats, to nearest, ties to even, clipping out-of-range values.

    Args:
        values: Float32 values without NaN.
        dtype: A dtype such as "float8_e4m3fn".

    Returns:
        The codes as uint8, in the shape of `values`.
    """
    import numpy as np

    bits = values.view(np.uint32)
    # The upper half is rounded to odd, which keeps the information of the lower half that a second rounding
    # needs. A table lookup then takes 1.5 ns per element, compared to 17 ns for a cast in ml_dtypes.
    upper = bits & np.uint32(0xFFFF)
    upper += np.uint32(0xFFFF)
    upper |= bits
    upper >>= np.uint32(16)
    codes: np.ndarray = _codes(dtype)[upper]
    return codes


def decode_codes(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float32 values of codes; arguments as for `round_to_narrow_float`."""
    result: np.ndarray = _code_values(dtype).take(codes)
    return result


@cache
def _codes(dtype: str) -> np.ndarray:
    """Return the code of each float32 whose lower half is zero, indexed by its upper half."""
    import numpy as np

    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    limit = np.nanmax(np.abs(_code_values(dtype)))
    clipped = np.clip(np.where(np.isnan(values), 0, values), -limit, limit)
    return clipped.astype(DTYPES[dtype].numpy).view(np.uint8)


@cache
def _code_values(dtype: str) -> np.ndarray:
    import numpy as np

    codes = np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8)
    return codes.view(DTYPES[dtype].numpy).astype(np.float32)


GROUP = 32
_FP4_CODE, _FP4_MAX = "float4_e2m1fn", 6.0
# Exponents of scales: from a bias of 127 to the largest exponent for which every code is finite in bfloat16.
_EXPONENT_BIAS, _MIN_EXPONENT, _MAX_EXPONENT = 127, -127, 125


@dataclass(frozen=True, slots=True)
class Mxfp4Encoder:
    """Encodes MXFP4 like gpt-oss: two E2M1 codes per byte, and one exponent for 32 neighbors.

    The scale of a group is the smallest power of two that scales its values to at most 6, the largest E2M1
    number. Values are not clipped, and values that come from MXFP4 are preserved. Groups of zeros have the
    scale 1.
    """

    @property
    def block(self) -> tuple[int, int]:
        return 1, GROUP

    @property
    def packed(self) -> int:
        return 2

    @property
    def code(self) -> DType:
        return DTYPES["uint8"]

    @property
    def scale(self) -> DType:
        return DTYPES["uint8"]

    def scales(self, values: np.ndarray) -> np.ndarray:
        import numpy as np

        largest = block_maxima(values, self.block)
        # The maximum is m * 2**e with 0.5 <= m < 1, and 6 = 0.75 * 2**3.
        digits, exponents = np.frexp(largest)
        exponents = np.clip(exponents - 3 + (digits > _FP4_MAX / 8), _MIN_EXPONENT, _MAX_EXPONENT)
        result: np.ndarray = (np.where(largest == 0, 0, exponents) + _EXPONENT_BIAS).astype(np.uint8)
        return result

    def codes(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        packed = np.empty((values.shape[0], values.shape[1] // 2), np.uint8)
        for rows in self._strips(values.shape):
            wide = as_float32(values[rows])
            # These are powers of two, and therefore exact.
            factors = np.ldexp(np.float32(1), _EXPONENT_BIAS - scales[rows].astype(np.int32))
            scaled = np.multiply(wide.reshape(wide.shape[0], -1, GROUP), factors[..., None])
            codes = round_to_narrow_float(scaled.reshape(wide.shape), _FP4_CODE)
            packed[rows] = codes[:, ::2] | codes[:, 1::2] << 4
        return packed

    def decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        result = np.empty((codes.shape[0], codes.shape[1] * 2), np.float32)
        for rows in self._strips(result.shape):
            result[rows, ::2] = decode_codes(codes[rows] & 15, _FP4_CODE)
            result[rows, 1::2] = decode_codes(codes[rows] >> 4, _FP4_CODE)
            grouped = result[rows].reshape(result[rows].shape[0], -1, GROUP)
            grouped *= np.ldexp(np.float32(1), scales[rows].astype(np.int32) - _EXPONENT_BIAS)[..., None]
        return result

    def _strips(self, shape: tuple[int, ...]) -> Iterator[slice]:
        """Yield slices of rows that fit in a core's cache."""
        step = max(1, _TILE_ELEMENTS // shape[1])
        for first in range(0, shape[0], step):
            yield slice(first, first + step)

    def lost(self, values: np.ndarray, decoded: np.ndarray) -> Mapping[str, float]:
        return error_sums(values, decoded)
