"""Which equal parts of an array one process holds, and how they lie together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from math import prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, grid_met


@dataclass(frozen=True)
class Shards:
    """Parts of one array, as a grid of equal cells.

    Attributes:
        shape: of the array.
        part: of each part; the array's axes are multiples of it.
        held: grid indices of the parts that the devices of this process hold, each once.
    """

    shape: Shape
    part: Shape
    held: tuple[Shape, ...]

    @property
    def size(self) -> int:
        """Elements of all parts that are held."""
        return len(self.held) * prod(self.part)

    @cached_property
    def boxes(self) -> tuple[Region, ...]:
        """Few boxes that have all that is held and nothing else."""
        if prod(self.shape) == 0:
            return ()
        return _boxes(self.part, self.held)

    def region(self, index: Shape) -> Region:
        """One part."""
        start = _scaled(index, self.part)
        return Region(start, tuple(a + n for a, n in zip(start, self.part, strict=True)))

    def parts_of(self, region: Region) -> Iterator[tuple[Shape, Region]]:
        """The parts that a box meets, and what it shares with each; the array has elements."""
        for index in grid_met(self.part, region):
            if (common := region.intersect(self.region(index))) is not None:
                yield index, common

    def only_part(self, region: Region) -> Shape | None:
        """The part that has all of a box, which is not empty; None where several meet it."""
        index = tuple(a // n for a, n in zip(region.start, self.part, strict=True))
        last = tuple((b - 1) // n for b, n in zip(region.stop, self.part, strict=True))
        return index if index == last else None


def whole(shape: Shape) -> Shards:
    """All of an array in one part."""
    return Shards(shape, shape, ((0,) * len(shape),))


def _scaled(index: Shape, part: Shape) -> Shape:
    return tuple(i * n for i, n in zip(index, part, strict=True))


@lru_cache(maxsize=1024)
def _boxes(part: Shape, held: tuple[Shape, ...]) -> tuple[Region, ...]:
    # The same for all layers.
    return tuple(Region(_scaled(box.start, part), _scaled(box.stop, part)) for box in joined_boxes(held))


def joined_boxes(cells: Iterable[Shape]) -> list[Region]:
    """Boxes that tile a set of cells: neighbours are joined along the last axis, then the one before it."""
    boxes = [Region(cell, tuple(i + 1 for i in cell)) for cell in sorted(cells)]
    for axis in reversed(range(boxes[0].rank if boxes else 0)):
        boxes = _joined_along(axis, boxes)
    return sorted(boxes, key=lambda box: box.start)


def _joined_along(axis: int, boxes: list[Region]) -> list[Region]:
    built: list[Region] = []
    for box in sorted(boxes, key=lambda box: (box.without(axis).start, box.start[axis])):
        last = built[-1] if built else None
        follows = last is not None and last.stop[axis] == box.start[axis]
        if last is not None and follows and last.without(axis) == box.without(axis):
            built[-1] = last.replaced(axis, last.start[axis], box.stop[axis])
        else:
            built.append(box)
    return built
