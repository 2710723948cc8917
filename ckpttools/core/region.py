"""Half-open boxes of integer coordinates: pure arithmetic, no arrays.

A region of an array of rank n is n pairs (start, stop). Rank 0 has one region, which holds one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import add, lt, mul, sub

from ckpttools.core.dataclass import dataclass

Shape = tuple[int, ...]
_MAX_IN_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """The box of all coordinates with `start[k] <= i[k] < stop[k]`."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def rank(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> Shape:
        return tuple([b - a if b > a else 0 for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod([b - a if b > a else 0 for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects this region of an array."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Region) -> Region | None:
        """Return the intersection, or None if the regions do not overlap."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Region(start, stop) if all(map(lt, start, stop)) else None

    def shifted(self, offset: Sequence[int]) -> Region:
        """Return this region moved by `offset`."""
        return Region(tuple(map(add, self.start, offset)), tuple(map(add, self.stop, offset)))

    def relative_to(self, origin: Region) -> Region:
        """Return this region in coordinates relative to the start of `origin`."""
        return Region(tuple(map(sub, self.start, origin.start)), tuple(map(sub, self.stop, origin.start)))

    def replaced(self, axis: int, start: int, stop: int) -> Region:
        """Return this region with another extent along one axis."""
        starts, stops = list(self.start), list(self.stop)
        starts[axis], stops[axis] = start, stop
        return Region(tuple(starts), tuple(stops))

    def without(self, axis: int) -> Region:
        """Return this region without one axis."""
        return Region(self.start[:axis] + self.start[axis + 1 :], self.stop[:axis] + self.stop[axis + 1 :])

    def swapped(self) -> Region:
        """Return this region with its last two axes swapped."""
        return Region(
            (*self.start[:-2], *reversed(self.start[-2:])), (*self.stop[:-2], *reversed(self.stop[-2:]))
        )

    def inserted(self, axis: int, start: int, stop: int) -> Region:
        """Return this region with a new axis before position `axis`."""
        return Region(
            (*self.start[:axis], start, *self.start[axis:]),
            (*self.stop[:axis], stop, *self.stop[axis:]),
        )

    def each(self, axes: int) -> Iterator[Region]:
        """Yield this region at each coordinate of its first axes, in order. All axes are kept."""
        if not axes:
            yield self
            return
        for one in self.each(axes - 1):
            yield from one.pieces(axes - 1, 1)

    def pieces(self, axis: int, step: int) -> Iterator[Region]:
        """Yield pieces of at most `step` along one axis, in order."""
        for start in range(self.start[axis], self.stop[axis], step):
            yield self.replaced(axis, start, min(start + step, self.stop[axis]))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_shape(shape: Sequence[int], chunk: Sequence[int]) -> Shape:
    """Return the number of cells of size `chunk` along each axis; the last cell of an axis may be smaller."""
    # A list takes half the time of a generator here, and plans of 100,000 arrays call this several times.
    return tuple([-(-n // c) for n, c in zip(shape, chunk, strict=True)])


def grid_cell(shape: Sequence[int], chunk: Sequence[int], index: Sequence[int]) -> Region:
    """Return the region of one cell of the grid."""
    start = tuple(map(mul, index, chunk))
    return Region(start, tuple(map(min, map(add, start, chunk), shape)))


def grid_indices(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Shape]:
    """Yield every cell index of the grid, in C order."""
    grid = grid_shape(shape, chunk)
    # `product` keeps all coordinates in memory, and a damaged shape can have too many.
    if max(grid, default=0) > _MAX_IN_MEMORY:
        return (grid_index(grid, position) for position in range(math.prod(grid)))
    return itertools.product(*map(range, grid))


def grid_cells(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Region]:
    """Yield the cells of the grid, which tile the array, in C order of their indices."""
    return (grid_cell(shape, chunk, index) for index in grid_indices(shape, chunk))


def grid_ranges(chunk: Sequence[int], region: Region) -> list[range]:
    """Return the range of cells of size `chunk` that a region intersects, for each axis."""
    return [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, chunk, strict=True)]


def intersecting_cells(chunk: Sequence[int], region: Region) -> Iterator[Shape]:
    """Yield the index of each cell of size `chunk` that a region intersects, in C order."""
    return itertools.product(*grid_ranges(chunk, region))


def grid_index(grid: Sequence[int], position: int) -> Shape:
    """Return the index of the cell at a position in C order, for a grid of the given shape."""
    index: Shape = ()
    for length in reversed(grid):
        position, location = divmod(position, length)
        index = (location, *index)
    return index


def contiguous_runs(shape: Sequence[int], region: Region) -> Iterator[tuple[int, int]]:
    """Yield the region as (offset, length) runs of elements of a C-ordered array of `shape`, in order.

    Runs are as long as possible: trailing axes that the region spans completely are merged.
    """
    if region.size == 0:
        return
    split = _count_cut_axes(shape, region)
    inner = math.prod(shape[split:])
    if split == 0:
        yield 0, inner
        return
    strides = [inner] * split
    for k in range(split - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    base = region.start[split - 1] * strides[split - 1]
    length = (region.stop[split - 1] - region.start[split - 1]) * inner
    outer = [range(region.start[k], region.stop[k]) for k in range(split - 1)]
    for index in itertools.product(*outer):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), length


def count_runs(shape: Sequence[int], region: Region) -> int:
    """Return the number of runs that `contiguous_runs` yields, without creating them."""
    lengths = region.shape
    if 0 in lengths:
        return 0
    return math.prod(lengths[: max(0, _count_cut_axes(shape, region) - 1)])


def _count_cut_axes(shape: Sequence[int], region: Region) -> int:
    """Return the number of axes up to the last one that the region does not span."""
    count = len(shape)
    while count > 0 and region.start[count - 1] == 0 and region.stop[count - 1] == shape[count - 1]:
        count -= 1
    return count


def split_evenly(region: Region, limit: int) -> Iterator[Region]:
    """Cut the region along its leading axes into boxes of 1 to `limit` elements, in C order.

    Each box consists of single coordinates, then a range of one axis, then complete axes.
    """
    if region.size <= limit or region.size == 1:
        if region.size:
            yield region
        return
    shape = region.shape
    axis = next(k for k, n in enumerate(shape) if n > 1)
    inner = math.prod(shape[axis + 1 :])
    step = max(1, limit // inner)
    for piece in region.pieces(axis, step):
        yield from split_evenly(piece, limit)
