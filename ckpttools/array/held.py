"""Lazy arrays whose elements somebody holds in memory, such as the shards of an array on devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ckpttools.array.lazy import ByteSource, LazyArray, ReadCost
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


class Holder(Protocol):
    """What holds the elements of one array, in one piece or in several."""

    @property
    def version(self) -> str:
        """Equal for two holders only if they hold the same elements."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that reading any region takes beside what it is read into."""

    def pieces(self, region: Region) -> int:
        """How many pieces a region is read from."""

    def read_into(self, region: Region, out: np.ndarray) -> None:
        """As `LazyArray.read_into`."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Held(LazyArray):
    """An array in memory.

    Attributes:
        holder: what has its elements.
    """

    holder: Holder

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.holder.read_into(region, out)

    @property
    def scratch_bytes(self) -> int:
        return self.holder.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost(region.size * self.dtype.itemsize, self.holder.pieces(region))

    def first_byte(self, region: Region) -> tuple[str, int]:
        return "", 0

    def sources(self) -> Iterator[ByteSource]:
        return iter(())
