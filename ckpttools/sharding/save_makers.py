"""Which process can make which part of an array that is made of others, of which several have parts.

A process makes what it has all of. Where two would have to, the part is cut in halves until one is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Held, renewed
from ckpttools.array.tree import Path, spelled
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Region
from ckpttools.sharding.save_shards import ALONE, Shards

if TYPE_CHECKING:
    import numpy as np

# Of one task. Shards of 64 processes, cut along one axis, make 64, and some more where shards end nowhere
# that halves do.
_MOST_PIECES = 1024


def made_by(path: Path, array: LazyArray, region: Region) -> Iterator[tuple[int, Region]]:
    """The region in pieces, each with the process that has all it is read from; 0 where all have that.

    Raises:
        UsageError: it would be too many.
    """
    makers, pieces = _Makers(array), 0
    rest = [(region, makers.of(region))]
    while rest:
        piece, processes = rest.pop()
        if len(processes) <= 1:
            pieces += 1
            yield min(processes, default=0), piece
            continue
        if piece.size > 1:
            rest.extend(reversed(makers.halves(piece)))
        if piece.size <= 1 or pieces + len(rest) > _MOST_PIECES:
            raise UsageError(
                "no process has enough of what an array is made of",
                place=spelled(path),
                got=f"elements of {len(makers.of(region))} processes, side by side all over {region}",
                hint=ALONE,
            )


class _Makers:
    """Who has what regions of an array are read from."""

    def __init__(self, array: LazyArray) -> None:
        self._asked: set[int] = set()
        self._array = renewed({"": array}, self._asking)[""]

    def of(self, region: Region) -> frozenset[int]:
        """The processes that have some of what a region is read from, and others have not."""
        self._asked.clear()
        self._array.read_cost(region)
        return frozenset(self._asked)

    def halves(self, region: Region) -> list[tuple[Region, frozenset[int]]]:
        """The region cut along the axis that parts processes best, the outermost of several."""
        cuts = [
            [(half, self.of(half)) for half in region.pieces(axis, (length + 1) // 2)]
            for axis, length in enumerate(region.shape)
            if length > 1
        ]
        return min(cuts, key=lambda halves: sum(len(processes) for _, processes in halves))

    def _asking(self, array: LazyArray) -> LazyArray:
        holder = array.holder if isinstance(array, Held) else None
        if not isinstance(array, Held) or not isinstance(holder, Shards):
            return array
        return replace(array, holder=_Asking(holder, self._asked))


@dataclass(frozen=True, slots=True)
class _Asking:
    """Holds nothing, and notes who has what is asked for: see `ckpttools.array.held.Holder`."""

    holder: Shards
    asked: set[int]
    version: str = ""
    scratch_bytes: int = 0

    def pieces(self, region: Region) -> int:
        self.asked.update(process for process, box in self.holder.owners if box.intersect(region) is not None)
        return 1

    def read_into(self, region: Region, out: np.ndarray) -> None:
        raise NotImplementedError("what is asked for is the cost alone")
