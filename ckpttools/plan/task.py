"""Tasks: what is done between two entries of the journal. Idempotent, in any order."""

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

# What starting a read costs on a local disk, in bytes of a long one: one from the cache is a system call.
_READ_RUN = 4 << 10


class Prices(NamedTuple):
    """What reading takes, in bytes of a long read from a local disk.

    Attributes:
        byte: each byte that is fetched.
        read: each read beside them.
    """

    byte: int = 1
    read: int = _READ_RUN

    def of(self, cost: ReadCost) -> int:
        """What this takes."""
        return self.byte * cost.nbytes + self.read * cost.reads


def prices(array: LazyArray) -> Prices:
    """What reading an array takes, all of which lies in one store."""
    source = next(array.sources(), None)
    if not isinstance(source, File) or source.price == 1:
        return Prices()
    return Prices(source.price, source.price * source.gap)


def reading_costs(arrays: Iterable[LazyArray]) -> Costs:
    """What the stores take together in which the arrays lie, each array in one."""
    files = (file for array in arrays for file in islice(array.sources(), 1) if isinstance(file, File))
    result = {(type(file), file.costs) for file in files}
    requests = max((costs.requests or 0 for _, costs in result), default=0)
    return Costs(requests or None, sum(costs.memory for _, costs in result))


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def readers(costs: Costs) -> int:
    """Workers for reading alone: one per core, or as many as reads are of use where these take their time."""
    # More share the cache and wait for the interpreter's lock: two cores, hashing 2.47 GB, two workers
    # 24 GB/s from the page cache, four 15; from the disk 1.48 and 1.38 s.
    return max(min(16, cores()), costs.requests or 0)


def tile_shape(
    shape: Shape, limit: int, cells: Sequence[Shape], cost: Callable[[Shape], float], *, whole: bool = False
) -> Shape | None:
    """A shape of at most `limit` elements: the axis is halved, again and again, whose halving costs least.

    Args:
        shape: of what is cut.
        limit: elements of a tile.
        cells: shapes of the cells of grids along which it is cut as long as it spans several of them.
        cost: of a tile of that shape, for each of its elements.
        whole: whether no cell may be cut.

    Returns:
        The shape; None where even a single cell has more elements.
    """
    while prod(shape) > limit:
        halves = (_halved(shape, axis, cells, whole) for axis in range(len(shape)))
        shorter = [half for half in halves if half != shape]
        if not shorter:
            return None
        shape = min(shorter, key=cost)
    return shape


def _halved(shape: Shape, axis: int, cells: Sequence[Shape], whole: bool) -> Shape:
    """The shape with one axis halved, rounded up to whole cells; the same shape if it cannot be."""
    length = shape[axis]
    cell = max((item[axis] for item in cells if item[axis] < length), default=length if whole else 1)
    half = ceil_div(ceil_div(length, 2), cell) * cell
    return (*shape[:axis], half, *shape[axis + 1 :])


# A task's buffer is at most this, however large the budget. It holds a whole layer's matrix of most
# models, so that reads and writes are contiguous. Where matrices are small anyway it does not matter:
# 2.47 GB with four workers took 1.7 to 1.8 s with 8, 16 and 64 MiB.
LARGEST_TASK = 64 << 20
# What starting a new run costs, in bytes of a long one: a write that is no large contiguous piece cannot go
# straight to the disk.
_WRITE_RUN = 64 << 10


@dataclass(frozen=True, slots=True)
class Task:
    """One region of one array: read, rearranged, written.

    Attributes:
        path: the array.
        region: the part of it that this task makes.
        bytes_in: stored bytes that it turns into others.
        bytes_out: bytes it writes.
        locality: file and offset of the first byte it reads.
    """

    path: Path
    region: Region
    bytes_in: int
    bytes_out: int
    locality: tuple[str, int]


def cut(path: Path, array: LazyArray, placement: Placement, limit: int) -> Iterator[Task]:
    """The array as tasks whose buffers hold at most `limit` bytes; they tile it exactly.

    Raises:
        MemoryBudgetError: not even one element fits, or not one chunk where chunks are encoded.
    """
    if array.size == 0:
        return
    for region in grid_cells(array.shape, _tile(path, array, placement, limit // array.dtype.itemsize)):
        yield task_of(path, array, region)


def task_of(path: Path, array: LazyArray, region: Region) -> Task:
    """The task that makes a part of an array."""
    bytes_in = ceil_div(region.size * array.stored_bits, 8)
    return Task(path, region, bytes_in, region.size * array.dtype.itemsize, array.first_byte(region))


def _tile(path: Path, array: LazyArray, placement: Placement, limit: int) -> Shape:
    """A shape of at most `limit` elements; chunks that are encoded are never cut."""
    cost = partial(_cost_per_element, array, placement, prices(array))
    tile = tile_shape(array.shape, limit, [placement.chunk], cost, whole=placement.codec is not None)
    if tile is None or limit < 1:
        raise MemoryBudgetError(
            "a chunk that must be encoded whole does not fit" if limit else "no element fits",
            location=keystr(path),
            got=f"{prod(placement.chunk if limit else ()) * array.dtype.itemsize} bytes",
            expected=f"at most {limit * array.dtype.itemsize}",
        )
    return tile


def _cost_per_element(array: LazyArray, placement: Placement, price: Prices, shape: Shape) -> float:
    """What the reads and writes of a region of this shape take, in bytes, with an extra for every run."""
    region = Region.whole(shape)
    writes = placement.estimated_runs(region)
    return (price.of(array.read_cost(region)) + writes * _WRITE_RUN) / region.size
