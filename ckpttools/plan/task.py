"""Tasks: units of work between two journal entries, in any order or, for some files, from first to last byte.

An object in a bucket is written from first to last byte. Its tasks form a group: one worker does them in
order, and they count as done when the object is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from math import prod
from typing import NamedTuple

from ckpttools.array.lazy import LazyArray, ReadCost
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region, Shape, ceil_div, grid_cell, grid_cells, grid_index
from ckpttools.formats.base import Layout
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement
from ckpttools.stores.base import File
from ckpttools.stores.costs import Costs

# Cost of starting a read on a local disk, in bytes of a long read: a cached read is a system call.
_READ_RUN = 4 << 10


class Prices(NamedTuple):
    """Costs of reading, in bytes of a long read from a local disk.

    Attributes:
        byte: Cost per byte fetched.
        read: Additional cost per read.
    """

    byte: int = 1
    read: int = _READ_RUN

    def of(self, cost: ReadCost) -> int:
        """Return the total of a read cost."""
        return self.byte * cost.nbytes + self.read * cost.reads


def prices(array: LazyArray) -> Prices:
    """Return the prices for an array, all of whose files are in one store."""
    source = next(array.sources(), None)
    if not isinstance(source, File) or source.price == 1:
        return Prices()
    return Prices(source.price, source.price * source.gap)


def reading_costs(arrays: Iterable[LazyArray]) -> Costs:
    """Return the combined costs of the stores that contain the arrays, one store per array."""
    files = (file for array in arrays for file in islice(array.sources(), 1) if isinstance(file, File))
    result = {(type(file), file.costs) for file in files}
    requests = max((costs.requests or 0 for _, costs in result), default=0)
    return Costs(requests or None, sum(costs.memory for _, costs in result))


def cores() -> int:
    """Return the number of processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # does not exist on macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def readers(costs: Costs) -> int:
    """Return the number of workers for reading: one per core, or the number of useful requests."""
    # More workers share the cache and wait for the interpreter lock. On two cores, hashing 2.47 GB ran at 24
    # GB/s from the page cache with two workers and at 15 GB/s with four; from the disk it took 1.48 and 1.38
    # s.
    return max(min(16, cores()), costs.requests or 0)


def tile_shape(
    shape: Shape,
    limit: int,
    cells: Sequence[Shape],
    cost: Callable[[Shape], float],
    *,
    keep_cells: bool = False,
) -> Shape | None:
    """Return a shape of at most `limit` elements by repeatedly halving the axis with the lowest cost.

    Args:
        shape: Shape of the region to divide.
        limit: Maximum elements of a tile.
        cells: Cell shapes of grids. Axes are divided along cells while the shape spans several of them.
        cost: Returns the cost per element of a tile.
        keep_cells: Whether cells must not be divided.

    Returns:
        The shape; None if a single cell has more elements.
    """
    while prod(shape) > limit:
        halves = (_halve_axis(shape, axis, cells, keep_cells) for axis in range(len(shape)))
        shorter = [half for half in halves if half != shape]
        if not shorter:
            return None
        shape = min(shorter, key=cost)
    return shape


def _halve_axis(shape: Shape, axis: int, cells: Sequence[Shape], keep_cells: bool) -> Shape:
    """Return the shape with one axis halved, rounded up to full cells; the same shape if impossible."""
    length = shape[axis]
    cell = max((item[axis] for item in cells if item[axis] < length), default=length if keep_cells else 1)
    half = ceil_div(ceil_div(length, 2), cell) * cell
    return (*shape[:axis], half, *shape[axis + 1 :])


# Maximum buffer of a task, even if the memory allows more. It holds a full matrix of a layer in most models,
# so that reads and writes are contiguous. For small matrices the size does not matter: 2.47 GB with four
# workers took 1.7 to 1.8 s with 8, 16 and 64 MiB.
LARGEST_TASK = 64 << 20
# Cost of starting a new run, in bytes of a long write: only large contiguous writes can bypass the page
# cache.
_WRITE_RUN = 64 << 10


@dataclass(frozen=True, slots=True)
class Task:
    """One region of one array that is read, rearranged and written.

    Attributes:
        path: Path of the array.
        region: Region of the array that the task writes.
        bytes_in: Stored bytes that the task converts.
        bytes_out: Bytes that the task writes.
        locality: File and offset of the first byte that the task reads.
    """

    path: Path
    region: Region
    bytes_in: int
    bytes_out: int
    locality: tuple[str, int]


def split_array(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
    """Divide an array into tasks of at most `limit` bytes that tile it exactly.

    Raises:
        MemoryBudgetError: One element, or one encoded chunk, does not fit.
    """
    if array.size == 0:
        return
    for region in grid_cells(array.shape, _tile(path, array, placement, limit // array.dtype.itemsize)):
        yield task_of(path, array, region)


def task_of(path: Path, array: LazyArray, region: Region) -> Task:
    """Return the task that writes a region of an array."""
    bytes_in = ceil_div(region.size * array.stored_bits, 8)
    return Task(path, region, bytes_in, region.size * array.dtype.itemsize, array.first_byte(region))


def _tile(path: Path, array: LazyArray, placement: Placement, limit: int) -> Shape:
    """Return a shape of at most `limit` elements that does not divide encoded chunks."""
    cost = partial(_cost_per_element, array, placement, prices(array))
    tile = tile_shape(array.shape, limit, [placement.chunk], cost, keep_cells=placement.codec is not None)
    if tile is None or limit < 1:
        raise MemoryBudgetError(
            "an encoded chunk does not fit" if limit else "one element does not fit",
            location=keystr(path),
            got=f"{prod(placement.chunk if limit else ()) * array.dtype.itemsize} bytes",
            expected=f"at most {limit * array.dtype.itemsize}",
        )
    return tile


def _cost_per_element(array: LazyArray, placement: Placement, price: Prices, shape: Shape) -> float:
    """Return the cost per element of reading and writing a region of this shape, in bytes."""
    region = Region.whole(shape)
    writes = placement.estimated_runs(region)
    return (price.of(array.read_cost(region)) + writes * _WRITE_RUN) / region.size


# Tasks are slightly larger than a part of an upload, so that the next task is read while a part is sent.
_SMALLEST_TASK = 16 << 20
# Accepted ratio of the reading cost to that of the best size.
_COST_TOLERANCE = 1.05


def grid_boxes(shape: Sequence[int], limit: int, stride: int | None = None) -> Iterator[Region]:
    """Tile a grid with boxes of consecutive cells in C order.

    Args:
        shape: Cells along each axis.
        limit: Maximum cells of a box.
        stride: Number of cells; boxes do not cross its multiples. None for no such limit.
    """
    position, total = 0, prod(shape)
    while position < total:
        cap = min(limit, total - position)
        if stride is not None:
            cap = min(cap, stride - position % stride)
        start = grid_index(shape, position)
        axis, inner = len(shape), 1
        while axis and start[axis - 1] == 0 and inner * shape[axis - 1] <= cap:
            axis -= 1
            inner *= shape[axis]
        stop = list(shape)
        if axis:
            axis -= 1
            length = min(shape[axis] - start[axis], cap // inner)
            stop[:axis] = [item + 1 for item in start[:axis]]
            stop[axis] = start[axis] + length
            inner *= length
        yield Region(start, tuple(stop))
        position += inner


def task_sizes(arrays: Mapping[Path, LazyArray], layout: Layout, limit: int) -> dict[Path, int]:
    """Return the maximum task size of each array in bytes, small if that does not raise the cost.

    A transposed matrix is read in full for each of its tasks.

    Args:
        arrays: The arrays to write.
        layout: Location of each array.
        limit: Maximum bytes of any task.
    """
    known: dict[Hashable, int] = {}
    sizes = {}
    for path, array in arrays.items():
        placement = layout.placements[path]
        kind = array.read_kind, placement.chunk, placement.order, type(placement.home)
        if kind not in known:
            known[kind] = _task_size(path, array, placement, limit)
        sizes[path] = known[kind]
    return sizes


def _task_size(path: Path, array: LazyArray, placement: Placement, limit: int) -> int:
    if array.size == 0 or limit <= _SMALLEST_TASK:
        return limit
    sizes = [_SMALLEST_TASK]
    while sizes[-1] < min(limit, placement.nbytes):
        sizes.append(min(2 * sizes[-1], limit))
    costs = {size: _cost(path, array, placement, size) for size in sizes if size >= _smallest_task(placement)}
    best = min(costs.values(), default=0.0)
    return next((size for size, cost in costs.items() if cost <= _COST_TOLERANCE * best), limit)


def _cost(path: Path, array: LazyArray, placement: Placement, size: int) -> float:
    """Return the cost of reading the first task, in bytes per element."""
    region = next(_regions(path, array.shape, placement, size))
    return prices(array).of(array.read_cost(region)) / region.size


def _smallest_task(placement: Placement) -> int:
    """Return the minimum bytes of a task."""
    return placement.chunk_nbytes if placement.codec else placement.itemsize


def split_in_order(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
    """Divide an array into tasks of at most `limit` bytes, in the order of the bytes that they write.

    Raises:
        MemoryBudgetError: One element, or one encoded chunk, does not fit.
    """
    if array.size == 0:
        return
    for region in _regions(path, array.shape, placement, limit):
        yield task_of(path, array, region)


def _regions(path: Path, shape: Shape, placement: Placement, limit: int) -> Iterator[Region]:
    """Yield the regions of an array in the order of their bytes in the file."""
    least = _smallest_task(placement)
    if limit < least:
        raise MemoryBudgetError(
            "an encoded chunk does not fit" if placement.codec else "one element does not fit",
            location=keystr(path),
            got=f"{least} bytes",
            expected=f"at most {limit}",
        )
    home = placement.home
    stride = home.per_file if isinstance(home, DataFile) else None
    for cells in grid_boxes(
        [placement.grid[axis] for axis in placement.order], _cells(placement, limit), stride
    ):
        region = _cover(shape, placement, cells)
        if region.size * placement.itemsize <= limit:
            yield region
        else:
            inside = grid_boxes(region.shape, limit // placement.itemsize)
            yield from (part.shifted(region.start) for part in inside)


def _cells(placement: Placement, limit: int) -> int:
    """Return the maximum number of chunks of a task."""
    return max(1, limit // placement.chunk_nbytes)


def _cover(shape: Shape, placement: Placement, cells: Region) -> Region:
    """Return the region that chunks cover. The axes of `cells` are in the order of the placement."""
    first, last = [0] * len(shape), [0] * len(shape)
    for axis, start, stop in zip(placement.order, cells.start, cells.stop, strict=True):
        first[axis], last[axis] = start, stop - 1
    return Region(
        grid_cell(shape, placement.chunk, first).start, grid_cell(shape, placement.chunk, last).stop
    )


def sort_by_output(tasks: Iterable[Task], layout: Layout) -> list[Task]:
    """Sort tasks by file and offset of their output; appended chunks keep their order."""
    return sorted(tasks, key=lambda task: _first_byte(task, layout.placements[task.path]))


def _first_byte(task: Task, placement: Placement) -> tuple[str, int]:
    if isinstance(placement.home, Appended):
        return placement.home.file, 0
    if placement.codec is None:
        return placement.first_byte(task.region)
    first = next(placement.cells(task.region))
    return placement.chunk_range(first).file, 0


def groups(tasks: Sequence[Task], layout: Layout, limit: int) -> Iterator[Sequence[int]]:
    """Yield the indices of the tasks of each object.

    Args:
        tasks: Tasks in the order of `sort_by_output`.
        layout: Locations of the output.
        limit: Maximum bytes of chunks, before encoding, that are appended to one object.
    """

    def file(number: int) -> str:
        task = tasks[number]
        return _first_byte(task, layout.placements[task.path])[0]

    for _, numbers in groupby(range(len(tasks)), key=file):
        group: list[int] = []
        nbytes = 0
        for number in numbers:
            task = tasks[number]
            is_appended = isinstance(layout.placements[task.path].home, Appended)
            if group and is_appended and nbytes + task.bytes_out > limit:
                yield group
                group, nbytes = [], 0
            group.append(number)
            nbytes += task.bytes_out
        yield group


def estimate_groups(layout: Layout, limit: int) -> int:
    """Estimate the number of groups, which limits the number of useful workers."""
    appended = chunks = 0
    for placement in layout.placements.values():
        if isinstance(placement.home, Appended):
            appended += placement.nbytes
        elif isinstance(placement.home, ChunkFiles):
            chunks += prod(placement.grid)
    return len(layout.files) + chunks + ceil_div(appended, limit)
