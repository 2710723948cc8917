"""Numbers made of a seed: noise that is the same wherever and however it is read."""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING

from ckpttools.array import read_blocks
from ckpttools.array.lazy import Unstored
from ckpttools.array.views import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.region import Region, Shape, split_to

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

_F32 = DTYPES["float32"]
# Elements made at once; what they are mixed in stays in cache.
_BLOCK = 1 << 15
# The standard deviation of the sum of four numbers of 16 bits, and its mean.
_DEVIATION, _MEAN = 37837.22, 131070


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Seeded(Unstored):
    """Noise in float32: bell-shaped around zero, cut at 3.46 standard deviations.

    Each element is the sum of the four 16-bit parts of a mixed 64-bit counter (splitmix64), so that any
    region has the same numbers whoever makes it, with any version of numpy.

    Attributes:
        key: where the counter starts, a number of 64 bits.
        scale: the standard deviation.
    """

    key: int
    scale: float

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for piece in split_to(region, _BLOCK):
            subview(out, piece.relative_to(region))[...] = self._made(piece).view(_F32.carrier)

    def _made(self, region: Region) -> np.ndarray:
        import numpy as np

        numbers = np.full(region.shape, self.key, np.uint64)
        with np.errstate(over="ignore"):
            for axis, (start, stop) in enumerate(zip(region.start, region.stop, strict=True)):
                step = prod(self.shape[axis + 1 :])
                along = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
                numbers += along.reshape(-1, *[1] * (region.rank - axis - 1))
            numbers *= np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                numbers ^= numbers >> np.uint64(shift)
                numbers *= np.uint64(factor)
            numbers ^= numbers >> np.uint64(31)
        parts = numbers.reshape(-1).view(np.uint16).reshape(-1, 4)
        sums = parts.sum(axis=1, dtype=np.int32) - np.int32(_MEAN)
        made: np.ndarray = sums.astype(np.float32) * np.float32(self.scale / _DEVIATION)
        return made.reshape(region.shape)

    @property
    def scratch_bytes(self) -> int:
        # Counters, what they are shifted to and sums are temporaries: 20 bytes an element of a block.
        return read_blocks.page(0)

    @property
    def computed(self) -> bool:
        return True

    @property
    def read_kind(self) -> Hashable:
        return ("seeded", self.shape)


def seeded(shape: Shape, seed: int, name: str, scale: float) -> Seeded:
    """Noise for the array of a name: other names and other seeds have other noise."""
    key = int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    return Seeded(shape, _F32, key, scale)
