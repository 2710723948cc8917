"""What one process holds of an array."""

from __future__ import annotations

from ckpttools.array.lazy import LazyArray
from ckpttools.array.splitting import with_axes_split
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, ceil_div
from ckpttools.sharding.shards import Shards


@dataclass(frozen=True)
class HeldParts:
    """An array and the parts of it that are wanted here.

    Attributes:
        array: what they are parts of.
        shards: which.
        name: of the array, for messages.
    """

    array: LazyArray
    shards: Shards
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in memory of what is held."""
        return self.shards.size * self.array.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes that what is held takes where it is stored, before it is encoded."""
        return ceil_div(self.shards.size * self.array.stored_bits, 8)


def as_one_part(held: HeldParts) -> HeldParts | None:
    """The same with axes split where parts end; None where that is not one part, or costs more to read."""
    shards = held.shards
    if len(shards.held) < 2 or len(shards.boxes) != 1:
        return None
    groups: list[Shape] = []
    part: list[int] = []
    index: list[int] = []
    (box,) = shards.boxes
    for length, cell, start, stop in zip(shards.shape, shards.part, box.start, box.stop, strict=True):
        count = (stop - start) // cell
        if start % (stop - start):
            return None
        groups.append((length // cell, cell) if count > 1 else (length,))
        part += [count, cell] if count > 1 else [cell]
        index += [start // (stop - start), 0] if count > 1 else [start // cell]
    array = with_axes_split(held.array, groups)
    if array is None:
        return None
    return HeldParts(array, Shards(array.shape, tuple(part), (tuple(index),)), held.name)
