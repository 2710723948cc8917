"""Scales that stay beside their codes: nobody multiplies by them on the way, so reading looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import ElementOp
from ckpttools.core.dataclass import dataclass
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
        then: what is done to the scales behind this; of what comes of it such numbers can be made as well.
    """

    decode: Decode
    then: ElementOp | None = None

    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        """Copies carriers of scales.

        Raises:
            DamagedScalesError: of one no finite number can be made.
        """
        scales = source.reshape(-1)
        for at in range(0, scales.size, _TOGETHER):
            for factors in self.factors([scales[at : at + _TOGETHER]]):
                self.decode.check(factors)
        target[...] = source

    def factors(self, scales: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """What numbers are multiplied by, of carriers of scales as they are, and as they are going to be."""
        import numpy as np

        yield self.decode.factors(scales)
        if self.then is not None:
            (source,), (dtype,) = scales, self.decode.scales
            built = np.empty_like(source)
            self.then.apply(source, built, dtype)
            yield self.decode.factors([built])


def sound_of(scales: LazyArray, codes: DType, name: str, location: str = "") -> Sound:
    """What looks at scales of a weight in float8, which they multiply.

    Args:
        scales: as they are stored.
        codes: the dtype of the weight as it is stored.
        name, location: of the scales and of their checkpoint, for messages.
    """
    return Sound(Decode(codes.name, (scales.dtype,), (False,), DTYPES["bfloat16"], name, location=location))
