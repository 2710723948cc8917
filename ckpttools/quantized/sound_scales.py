"""Scales that stay beside their codes: nobody multiplies by them on the way, so reading looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import elementwise
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.quantized.decoding import Decode

if TYPE_CHECKING:
    import numpy as np

# Scales that are looked at together, in 256 KiB of float32.
_TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True)
class Sound:
    """Scales as they are, where numbers of bfloat16 can be made of them; an op for `elementwise`.

    Attributes:
        decode: what would make them.
    """

    decode: Decode

    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        """Copies carriers of scales.

        Raises:
            DamagedScalesError: of one no finite number can be made.
        """
        scales = source.reshape(-1)
        for at in range(0, scales.size, _TOGETHER):
            self.decode.check(self.decode.factors([scales[at : at + _TOGETHER]]))
        target[...] = source


def sound(scales: LazyArray, codes: DType, name: str) -> LazyArray:
    """The same scales; reading one of which no finite number can be made is refused.

    Args:
        scales: of a weight in float8, which they multiply.
        codes: the dtype of the weight as it is stored.
        name: of the weight, for messages.
    """
    return elementwise(scales, Sound(Decode(codes.name, (scales.dtype,), (False,), DTYPES["bfloat16"], name)))
