"""MXFP4 as gpt-oss is published: two E2M1 codes in a byte, and an exponent for each 32 neighbours.

The scale of a group is the least power of two that puts all of its values within 6, E2M1's largest number. So
nothing is cut off, and what was MXFP4 before has the same values again. Groups of zeros have the scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.array.rounding import as_float32
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.quantized.encoders.numbers import block_maxima, numbers, rounded_to_few_bits
from ckpttools.quantized.errors import lost

if TYPE_CHECKING:
    import numpy as np

GROUP = 32
_CODE, _LARGEST = "float4_e2m1fn", 6.0
# Exponents of scales: from a bias of 127 to the largest with which every code is finite in bfloat16.
_BIAS, _LEAST, _MOST = 127, -127, 125
# Elements that are encoded at once.
_AT_ONCE = 1 << 15


@dataclass(frozen=True, slots=True)
class Mxfp4Encoder:
    """E2M1 in groups of 32 on the last axis."""

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
        # largest = m * 2**e with 0.5 <= m < 1, and 6 = 0.75 * 2**3.
        digits, exponents = np.frexp(largest)
        exponents = np.clip(exponents - 3 + (digits > _LARGEST / 8), _LEAST, _MOST)
        built: np.ndarray = (np.where(largest == 0, 0, exponents) + _BIAS).astype(np.uint8)
        return built

    def codes(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        packed = np.empty((values.shape[0], values.shape[1] // 2), np.uint8)
        for rows in self._strips(values.shape):
            wide = as_float32(values[rows])
            # Powers of two, and so exactly.
            factors = np.ldexp(np.float32(1), _BIAS - scales[rows].astype(np.int32))
            scaled = np.multiply(wide.reshape(wide.shape[0], -1, GROUP), factors[..., None])
            codes = rounded_to_few_bits(scaled.reshape(wide.shape), _CODE)
            packed[rows] = codes[:, ::2] | codes[:, 1::2] << 4
        return packed

    def decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        built = np.empty((codes.shape[0], codes.shape[1] * 2), np.float32)
        for rows in self._strips(built.shape):
            built[rows, ::2] = numbers(codes[rows] & 15, _CODE)
            built[rows, 1::2] = numbers(codes[rows] >> 4, _CODE)
            grouped = built[rows].reshape(built[rows].shape[0], -1, GROUP)
            grouped *= np.ldexp(np.float32(1), scales[rows].astype(np.int32) - _BIAS)[..., None]
        return built

    def _strips(self, shape: tuple[int, ...]) -> Iterator[slice]:
        """Slices of rows that stay in a core's cache."""
        step = max(1, _AT_ONCE // shape[1])
        for first in range(0, shape[0], step):
            yield slice(first, first + step)

    def lost(self, values: np.ndarray, decoded: np.ndarray) -> Mapping[str, float]:
        return lost(values, decoded)
