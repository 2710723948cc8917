"""Tasks: what is done between two entries of the journal. Idempotent, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, spelled
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Region, Shape, ceil_div
from ckpttools.formats.placement import Placement

# A task's buffer is at most this, however large the budget. It holds a whole layer's matrix of most
# models, so that reads and writes are contiguous. Where matrices are small anyway it does not matter:
# 2.47 GB with four workers took 1.7 to 1.8 s with 8, 16 and 64 MiB.
LARGEST_TASK = 64 << 20
# What starting a new run costs, in bytes of a long one: a read from the cache is a system call, a write
# that is no large contiguous piece cannot go straight to the disk.
_READ_RUN, _WRITE_RUN = 4 << 10, 64 << 10


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


def cut(path: Path, array: LazyArray, placement: Placement, most: int) -> Iterator[Task]:
    """The array as tasks whose buffers hold at most `most` bytes; they tile it exactly.

    Raises:
        MemoryBudgetError: not even one element fits.
    """
    if array.size == 0:
        return
    itemsize = array.dtype.itemsize
    if itemsize > most:
        raise MemoryBudgetError("no element fits", place=spelled(path), got=f"{most} bytes")
    tile = task_shape(array, placement, most // itemsize)
    for region in _tiles(Region.whole(array.shape), tile):
        bytes_in = ceil_div(region.size * array.stored_bits, 8)
        yield Task(path, region, bytes_in, region.size * itemsize, array.first_byte(region))


def task_shape(array: LazyArray, placement: Placement, most: int) -> Shape:
    """A shape of at most `most` elements, found by halving the axis whose halving costs least.

    The cost of a region is what its reads and writes take, in bytes, with an extra for every run.
    """
    shape = array.shape
    while prod(shape) > most:
        halves = [_halved(shape, axis, placement) for axis in range(len(shape))]
        halves = [half for half in halves if half != shape]
        if not halves:
            raise MemoryBudgetError(
                "a chunk that must be encoded whole does not fit",
                got=f"{prod(shape) * array.dtype.itemsize} bytes",
                wanted=f"at most {most * array.dtype.itemsize}",
            )
        shape = min(halves, key=lambda half: _cost_per_element(array, placement, half))
    return shape


def _halved(shape: Shape, axis: int, placement: Placement) -> Shape:
    """The shape with one axis halved, rounded up to whole chunks where it spans several.

    Chunks that are encoded are never cut; an axis of one chunk then stays as it is.
    """
    length, chunk = shape[axis], placement.chunk[axis]
    half = ceil_div(length, 2)
    if half > chunk or (placement.codec and length > chunk):
        half = ceil_div(half, chunk) * chunk
        half = half if half < length else half - chunk
    elif placement.codec:
        half = length
    return (*shape[:axis], half, *shape[axis + 1 :])


def _cost_per_element(array: LazyArray, placement: Placement, shape: Shape) -> float:
    region = Region.whole(shape)
    read = array.read_cost(region)
    writes = placement.estimated_runs(region)
    return (read.nbytes + read.reads * _READ_RUN + writes * _WRITE_RUN) / region.size


def _tiles(region: Region, tile: Shape, axis: int = 0) -> Iterator[Region]:
    """The region as tiles, the last of each axis cut short, in C order."""
    if axis == region.rank:
        yield region
        return
    for piece in region.pieces(axis, tile[axis]):
        yield from _tiles(piece, tile, axis + 1)
