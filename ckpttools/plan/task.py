"""Tasks: units of work between two journal entries, idempotent and independent of order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import NamedTuple

from ckpttools.array.lazy import LazyArray, ReadCost
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region, Shape, ceil_div, grid_cells
from ckpttools.formats.placement import Placement
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
    return len(os.sched_getaffinity(0))


def readers(costs: Costs) -> int:
    """Return the number of workers for reading: one per core, or the number of useful requests."""
    # More workers share the cache and wait for the interpreter lock. On two cores, hashing 2.47 GB ran at 24
    # GB/s from the page cache with two workers and at 15 GB/s with four; from the disk it took 1.48 and 1.38
    # s.
    return max(min(16, cores()), costs.requests or 0)


def tile_shape(
    shape: Shape, limit: int, cells: Sequence[Shape], cost: Callable[[Shape], float], *, whole: bool = False
) -> Shape | None:
    """Return a shape of at most `limit` elements by repeatedly halving the axis with the lowest cost.

    Args:
        shape: Shape of the region to divide.
        limit: Maximum elements of a tile.
        cells: Cell shapes of grids. Axes are divided along cells while the shape spans several of them.
        cost: Returns the cost per element of a tile.
        whole: Whether cells must not be divided.

    Returns:
        The shape; None if a single cell has more elements.
    """
    while prod(shape) > limit:
        halves = (_halve_axis(shape, axis, cells, whole) for axis in range(len(shape)))
        shorter = [half for half in halves if half != shape]
        if not shorter:
            return None
        shape = min(shorter, key=cost)
    return shape


def _halve_axis(shape: Shape, axis: int, cells: Sequence[Shape], whole: bool) -> Shape:
    """Return the shape with one axis halved, rounded up to full cells; the same shape if impossible."""
    length = shape[axis]
    cell = max((item[axis] for item in cells if item[axis] < length), default=length if whole else 1)
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


def cut(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
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
    tile = tile_shape(array.shape, limit, [placement.chunk], cost, whole=placement.codec is not None)
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
