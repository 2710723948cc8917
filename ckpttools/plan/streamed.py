"""Tasks for files that are written from their first byte to their last, each task after the one before it.

An object in a bucket is such a file. Its tasks are a group: one worker does them in order, and they are done
when the object is complete.
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

# Tasks of little more than a part of an upload: while one is sent, the next one is read.
_SMALLEST_TASK = 16 << 20
# What reading may cost beside that of the best size.
_AS_GOOD = 1.05


def grid_boxes(shape: Sequence[int], limit: int, stride: int | None = None) -> Iterator[Region]:
    """Tiles a grid by boxes, in C order: each holds the cells that come next.

    Args:
        shape: cells along each axis.
        limit: cells of a box at most.
        stride: no box has cells from before and from after a multiple of so many cells; None for no such
            cap.
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
    """Bytes of a task of each array at most: small where that costs nothing.

    A transposed matrix is read whole for each part of it that is made alone.

    Args:
        arrays: those that are written.
        layout: where.
        limit: bytes that no task may exceed.
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
    costs = {size: _cost(path, array, placement, size) for size in sizes if size >= _least(placement)}
    best = min(costs.values(), default=0.0)
    return next((size for size, cost in costs.items() if cost <= _AS_GOOD * best), limit)


def _cost(path: Path, array: LazyArray, placement: Placement, size: int) -> float:
    """What reading the first task takes, in bytes for each element."""
    region = next(_regions(path, array.shape, placement, size))
    return prices(array).of(array.read_cost(region)) / region.size


def _least(placement: Placement) -> int:
    """Bytes of a task at least."""
    return placement.chunk_nbytes if placement.codec else placement.itemsize


def cut_in_order(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
    """The array as tasks whose buffers hold at most `limit` bytes, in the order of the bytes that they write.

    Raises:
        MemoryBudgetError: not even one element fits, or not one chunk where chunks are encoded.
    """
    if array.size == 0:
        return
    for region in _regions(path, array.shape, placement, limit):
        yield task_of(path, array, region)


def _regions(path: Path, shape: Shape, placement: Placement, limit: int) -> Iterator[Region]:
    """Parts of an array, none of which needs bytes of a file that come before those of another before it."""
    least = _least(placement)
    if limit < least:
        raise MemoryBudgetError(
            "a chunk that must be encoded whole does not fit" if placement.codec else "no element fits",
            location=keystr(path),
            got=f"{least} bytes",
            expected=f"at most {limit}",
        )
    home = placement.home
    stride = home.per_file if isinstance(home, DataFile) else None
    for cells in grid_boxes(
        [placement.grid[axis] for axis in placement.order], _cells(placement, limit), stride
    ):
        region = _covered(shape, placement, cells)
        if region.size * placement.itemsize <= limit:
            yield region
        else:
            inside = grid_boxes(region.shape, limit // placement.itemsize)
            yield from (part.shifted(region.start) for part in inside)


def _cells(placement: Placement, limit: int) -> int:
    """Chunks of a task at most."""
    return max(1, limit // placement.chunk_nbytes)


def _covered(shape: Shape, placement: Placement, cells: Region) -> Region:
    """What chunks cover of an array; their indices have the axes in the order of the placement."""
    first, last = [0] * len(shape), [0] * len(shape)
    for axis, start, stop in zip(placement.order, cells.start, cells.stop, strict=True):
        first[axis], last[axis] = start, stop - 1
    return Region(
        grid_cell(shape, placement.chunk, first).start, grid_cell(shape, placement.chunk, last).stop
    )


def in_write_order(tasks: Iterable[Task], layout: Layout) -> list[Task]:
    """Tasks by what they write: file, and place in it; appended chunks stay in the order that they have."""
    return sorted(tasks, key=lambda task: _first_byte(task, layout.placements[task.path]))


def _first_byte(task: Task, placement: Placement) -> tuple[str, int]:
    if isinstance(placement.home, Appended):
        return placement.home.file, 0
    if placement.codec is None:
        return placement.first_byte(task.region)
    first = next(placement.cells(task.region))
    return placement.chunk_range(first).file, 0


def groups(tasks: Sequence[Task], layout: Layout, limit: int) -> Iterator[Sequence[int]]:
    """The numbers of the tasks that belong to one object each.

    Args:
        tasks: as `in_write_order` sorts them.
        layout: where they write.
        limit: bytes of chunks, before they are encoded, that are appended to one object.
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


def most_groups(layout: Layout, limit: int) -> int:
    """About how many groups there are: more workers than that are of no use."""
    appended = chunks = 0
    for placement in layout.placements.values():
        if isinstance(placement.home, Appended):
            appended += placement.nbytes
        elif isinstance(placement.home, ChunkFiles):
            chunks += prod(placement.grid)
    return len(layout.files) + chunks + ceil_div(appended, limit)
