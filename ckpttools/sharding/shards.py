"""The equal parts of an array that one process has, and how they are joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Elementwise, Relayout, Stack, Stored, Take, relayout
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, ceil_div, intersecting_cells


@dataclass(frozen=True)
class Shards:
    """Parts of an array, as a grid of equal cells.

    Attributes:
        shape: Shape of the array.
        part: Shape of each part, which divides `shape`.
        local: Grid indices of the parts on the devices of this process, without duplicates.
    """

    shape: Shape
    part: Shape
    local: tuple[Shape, ...]

    @property
    def size(self) -> int:
        """Number of elements of all local parts."""
        return len(self.local) * prod(self.part)

    @cached_property
    def boxes(self) -> tuple[Region, ...]:
        """A few regions that cover exactly the local parts."""
        if prod(self.shape) == 0:
            return ()
        return _boxes(self.part, self.local)

    def region(self, index: Shape) -> Region:
        """Return the region of one part."""
        start = _scale(index, self.part)
        return Region(start, tuple(a + n for a, n in zip(start, self.part, strict=True)))

    def intersect_parts(self, region: Region) -> Iterator[tuple[Shape, Region]]:
        """Yield the parts that a region intersects, with their intersection. The array must not be empty."""
        for index in intersecting_cells(self.part, region):
            if (common := region.intersect(self.region(index))) is not None:
                yield index, common

    def containing_part(self, region: Region) -> Shape | None:
        """Return the part that contains a non-empty region; None if the region intersects several parts."""
        index = tuple(a // n for a, n in zip(region.start, self.part, strict=True))
        last = tuple((b - 1) // n for b, n in zip(region.stop, self.part, strict=True))
        return index if index == last else None


def _scale(index: Shape, part: Shape) -> Shape:
    return tuple(i * n for i, n in zip(index, part, strict=True))


@lru_cache(maxsize=1024)
def _boxes(part: Shape, local: tuple[Shape, ...]) -> tuple[Region, ...]:
    # Cached because all layers have the same result.
    return tuple(Region(_scale(box.start, part), _scale(box.stop, part)) for box in join_cells(local))


def join_cells(cells: Iterable[Shape]) -> list[Region]:
    """Join a set of cells into regions: along the last axis first, then the one before it, and so on."""
    boxes = [Region(cell, tuple(i + 1 for i in cell)) for cell in sorted(cells)]
    for axis in reversed(range(boxes[0].rank if boxes else 0)):
        boxes = _join_along(axis, boxes)
    return sorted(boxes, key=lambda box: box.start)


def _join_along(axis: int, boxes: list[Region]) -> list[Region]:
    result: list[Region] = []
    for box in sorted(boxes, key=lambda box: (box.without(axis).start, box.start[axis])):
        last = result[-1] if result else None
        follows = last is not None and last.stop[axis] == box.start[axis]
        if last is not None and follows and last.without(axis) == box.without(axis):
            result[-1] = last.replaced(axis, last.start[axis], box.stop[axis])
        else:
            result.append(box)
    return result


@dataclass(frozen=True)
class LocalParts:
    """An array and the parts of it that this process has.

    Attributes:
        array: The array.
        shards: The local parts.
        name: Name of the array, for messages.
    """

    array: LazyArray
    shards: Shards
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the local parts in memory."""
        return self.shards.size * self.array.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Stored bytes of the local parts, before encoding."""
        return ceil_div(self.shards.size * self.array.stored_bits, 8)


def merge_parts(local: LocalParts) -> LocalParts | None:
    """Split axes at part boundaries so that all parts become one.

    Returns None if this is impossible or costlier to read.
    """
    shards = local.shards
    if len(shards.local) < 2 or len(shards.boxes) != 1:
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
    array = split_axes(local.array, groups)
    if array is None:
        return None
    return LocalParts(array, Shards(array.shape, tuple(part), (tuple(index),)), local.name)


def split_axes(array: LazyArray, groups: Sequence[Shape]) -> LazyArray | None:
    """Return an array with the same elements in the same order and more axes.

    Args:
        array: Any array.
        groups: Lengths that replace each axis, outermost first; their product is the length of the axis.

    Returns:
        None if elements would be moved once more than without the split, or chunks of a grid would be cut.
    """
    shape = tuple(length for group in groups for length in group)
    match array:
        case Stored() | Constant():
            return replace(array, shape=shape)
        case Relayout():
            built = relayout(array, groups, range(len(shape)), (1,) * len(shape))
            return built if not isinstance(built, Relayout) or built.source is array.source else None
        case Elementwise(source=source):
            inner = split_axes(source, groups)
            return None if inner is None else replace(array, shape=shape, source=inner)
        case Take(axis=axis, source=source):
            new_groups = [*groups[:axis], (source.shape[axis],), *groups[axis:]]
            inner = split_axes(source, new_groups)
            before = sum(map(len, groups[:axis]))
            return None if inner is None else replace(array, shape=shape, source=inner, axis=before)
        case Stack(axis=axis, parts=parts) if len(groups[axis]) == 1:
            inner_groups = [*groups[:axis], *groups[axis + 1 :]]
            split = [split_axes(part, inner_groups) for part in parts]
            result = tuple(part for part in split if part is not None)
            before = sum(map(len, groups[:axis]))
            return (
                replace(array, shape=shape, parts=result, axis=before) if len(result) == len(parts) else None
            )
        case _:
            return None
