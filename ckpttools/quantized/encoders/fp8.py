"""FP8 as DeepSeek V3 publishes it: E4M3 codes, and for each block of 128 x 128 a float32 scale.

A scale is the largest magnitude of its block over 448, E4M3's largest number, and codes are the values over
their scale, rounded once to nearest even. Blocks of zeros have the scale 1.
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

_CODE, _LARGEST = "float8_e4m3fn", 448.0
# Smaller scales would be subnormal, which devices take for zero.
_LEAST_SCALE = 2.0**-126
# Elements that are encoded at once: float32 copies of them stay in a core's cache.
_AT_ONCE = 1 << 15


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """E4M3 in blocks.

    Attributes:
        rows, columns: of a block.
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
        return DTYPES[_CODE]

    @property
    def scale(self) -> DType:
        return DTYPES["float32"]

    def scales(self, values: np.ndarray) -> np.ndarray:
        import numpy as np

        largest = block_maxima(values, self.block)
        scales = largest / np.float32(_LARGEST)
        np.maximum(scales, np.float32(_LEAST_SCALE), out=scales)
        scales[largest == 0] = 1
        return scales.view("<u4")

    def codes(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        codes = np.empty(values.shape, np.uint8)
        for rows, columns, scale in self._strips(values.shape, scales.view("<f4")):
            quotients: np.ndarray = np.divide(as_float32(values[rows, columns]), scale)
            codes[rows, columns] = rounded_to_few_bits(quotients, _CODE)
        return codes

    def decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        built = np.empty(codes.shape, np.float32)
        for rows, columns, scale in self._strips(codes.shape, scales.view("<f4")):
            np.multiply(numbers(codes[rows, columns], _CODE), scale, out=built[rows, columns])
        return built

    def lost(self, values: np.ndarray, decoded: np.ndarray) -> Mapping[str, float]:
        return lost(values, decoded)

    def _strips(
        self, shape: tuple[int, ...], scales: np.ndarray
    ) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Slices of rows and of columns within one row of blocks, with the scale of each column."""
        import numpy as np

        high, wide = self.block
        across = max(1, _AT_ONCE // high // wide)
        for number, strip in enumerate(scales):
            rows = slice(number * high, min((number + 1) * high, shape[0]))
            for first in range(0, len(strip), across):
                columns = slice(first * wide, min((first + across) * wide, shape[1]))
                scale = np.repeat(strip[first : first + across], wide)[: columns.stop - columns.start]
                yield rows, columns, scale
