"""Tasks for files that must be written from first to last byte.

An object in a bucket is such a file. Its tasks form a group: one worker does them in order, and they count as
done when the object is complete.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, keystr
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region, Shape, ceil_div, grid_cell, grid_index
from ckpttools.formats.base import Layout
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement
from ckpttools.plan.task import Task, prices, task_of

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


def cut_in_order(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
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
