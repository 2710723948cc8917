"""Which process can make which part of an array that is made of others, of which several have parts.

A process makes what it has all of. Where two would have to, the part is cut in halves until one is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Held, renewed
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Region, Shape
from ckpttools.sharding.save_shards import ALONE, ShardHolder

if TYPE_CHECKING:
    import numpy as np

# Of one task. Shards of 64 processes, cut along one axis, make 64, and some more where shards end nowhere
# that halves do.
_MOST_PIECES = 1024
Piece: TypeAlias = tuple[int, Region]


@dataclass
class Makers:
    """Deals out regions of arrays.

    What was found for one layer is tried for the next: it is five times as fast as to look for it.
    """

    _found: dict[tuple[Shape, Region], Sequence[Piece]] = field(default_factory=dict)

    def pieces(self, path: Path, array: LazyArray, region: Region) -> Sequence[Piece]:
        """The region in pieces, each with the process that has all it is read from; 0 where all have that.

        Raises:
            UsageError: it would be too many.
        """
        asked = _Owners(array)
        found = self._found.get((array.shape, region), ())
        if not found or any(asked.maker(piece) != process for process, piece in found):
            found = _cut(path, asked, region)
            self._found[array.shape, region] = found
        return found


def _cut(path: Path, asked: _Owners, region: Region) -> Sequence[Piece]:
    found: list[Piece] = []
    rest = [region]
    while rest:
        piece = rest.pop()
        process = asked.maker(piece)
        if process is not None:
            found.append((process, piece))
        else:
            rest.extend(reversed(asked.halves(piece)))
        if (process is None and piece.size == 1) or len(found) + len(rest) > _MOST_PIECES:
            raise UsageError(
                "no process has enough of what an array is made of",
                place=keystr(path),
                got=f"elements of {len(asked.of(region))} processes, side by side all over {region}",
                hint=ALONE,
            )
    return found


class _Owners:
    """Who has what regions of an array are read from."""

    def __init__(self, array: LazyArray) -> None:
        self._asked: set[int] = set()
        self._array = renewed({"": array}, self._asking)[""]

    def of(self, region: Region) -> frozenset[int]:
        """The processes that have some of what a region is read from, which others have not."""
        self._asked.clear()
        self._array.read_cost(region)
        return frozenset(self._asked)

    def maker(self, region: Region) -> int | None:
        """The process that has all of it; 0 where all have; None where none has."""
        processes = self.of(region)
        return min(processes, default=0) if len(processes) <= 1 else None

    def halves(self, region: Region) -> Sequence[Region]:
        """The region cut along the axis that parts processes best, the outermost of several."""
        cuts = [
            [*region.pieces(axis, (length + 1) // 2)]
            for axis, length in enumerate(region.shape)
            if length > 1
        ]
        return min(cuts, key=lambda halves: sum(len(self.of(half)) for half in halves), default=[])

    def _asking(self, array: LazyArray) -> LazyArray:
        holder = array.holder if isinstance(array, Held) else None
        if not isinstance(array, Held) or not isinstance(holder, ShardHolder):
            return array
        if not holder.owners:
            return array
        return replace(array, holder=_Asking(holder, self._asked, *_limits(holder.owners)))


@dataclass(frozen=True, eq=False, slots=True)
class _Asking:
    """The same elements; it is noted which processes have what is asked for.

    Attributes:
        holder: of the elements.
        asked: where it is noted.
        processes, start, stop: who has elements, and where their boxes begin and end.
    """

    holder: ShardHolder
    asked: set[int]
    processes: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def version(self) -> str:
        return self.holder.version

    @property
    def scratch_bytes(self) -> int:
        return self.holder.scratch_bytes

    def pieces(self, region: Region) -> int:
        meet = ((self.start < region.stop) & (self.stop > region.start)).all(axis=1)
        self.asked.update(self.processes[meet].tolist())
        return 1

    def read_into(self, region: Region, out: np.ndarray) -> None:
        self.holder.read_into(region, out)


@lru_cache(maxsize=256)
def _limits(owners: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Processes, and where their boxes begin and end."""
    import numpy as np

    processes = np.array([process for process, _ in owners])
    start, stop = (np.array([getattr(box, end) for _, box in owners]) for end in ("start", "stop"))
    return processes, start, stop
