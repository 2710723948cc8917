"""Arrays of any lengths side by side along an axis that they all have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray, OfParts, ReadCost
from ckpttools.array.views import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Concat(OfParts):
    """Arrays side by side along an axis, as of numpy's `concatenate`; equal in dtype and all other axes.

    Attributes:
        axis: along which they lie.
    """

    axis: int

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where each part ends."""
        return tuple(accumulate(part.shape[self.axis] for part in self.parts))

    def _met(self, region: Region) -> Iterator[tuple[LazyArray, Region, Region]]:
        """The parts that a region meets: what of the part, and where that is in the region."""
        start, stop = region.start[self.axis], region.stop[self.axis]
        for number in range(bisect_right(self._ends, start), len(self.parts)):
            first = self._ends[number] - self.parts[number].shape[self.axis]
            if first >= stop:
                return
            a, b = max(first, start), min(self._ends[number], stop)
            if b > a:
                inside = region.replaced(self.axis, a, b)
                origin = [-first if axis == self.axis else 0 for axis in range(region.rank)]
                yield self.parts[number], inside.shifted(origin), inside.relative_to(region)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, inside, where in self._met(region):
            part.read_into(inside, subview(out, where), scratch)

    def read_cost(self, region: Region) -> ReadCost:
        return sum((part.read_cost(inside) for part, inside, _ in self._met(region)), ReadCost())

    @cached_property
    def read_kind(self) -> Hashable:
        return ("concat", self.axis, tuple((part.shape, part.read_kind) for part in self.parts))

    def first_byte(self, region: Region) -> tuple[str, int]:
        met = next(self._met(region), None)
        return ("", 0) if met is None else met[0].first_byte(met[1])


def concat(parts: Sequence[LazyArray], axis: int) -> LazyArray:
    """`parts` side by side along `axis`; the part itself where there is one.

    Raises:
        ShapeError: they differ in dtype or another axis, or there are none.
    """
    kinds = {(part.dtype, part.shape[:axis], part.shape[axis + 1 :]) for part in parts}
    if len(kinds) != 1:
        listed = ", ".join(sorted(f"{part.dtype}{list(part.shape)}" for part in parts))
        raise ShapeError("only arrays that are alike but for one axis lie side by side", got=listed or "none")
    if len(parts) == 1:
        return parts[0]
    ((dtype, before, behind),) = kinds
    length = sum(part.shape[axis] for part in parts)
    return Concat((*before, length, *behind), dtype, tuple(parts), axis)
