"""Tasks: what is done between two entries of the journal. Idempotent, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region, Shape, ceil_div, grid_cells
from ckpttools.formats.placement import Placement
from ckpttools.plan.reading import Prices, prices
from ckpttools.plan.tiles import tile_shape

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
