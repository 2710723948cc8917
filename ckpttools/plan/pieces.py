"""Divide arrays that are only scanned into pieces that fit a worker's buffers and are cheap to read.

An item is one array, or several arrays of the same shape whose elements are compared. There are two ways to
divide an item, which both cover it exactly once: `consecutive` follows the C order of the elements, and
`Tiles` minimizes the cost of reading.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import lcm, prod

from ckpttools.array.blockwise import BlockCodes
from ckpttools.array.fingerprint import nodes
from ckpttools.array.lazy import LazyArray
from ckpttools.array.mean import Mean
from ckpttools.array.nodes import Chunked, Dequantized, Elementwise, Stack, Take
from ckpttools.array.scratch import round_up_to_page
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.memory_limit import baseline_bytes, memory_error
from ckpttools.core.region import Region, Shape, grid_cells, split_evenly
from ckpttools.plan.plan import BYTES_PER_NODE
from ckpttools.plan.task import LARGEST_TASK, Prices, prices, readers, reading_costs, tile_shape

Item = tuple[LazyArray, ...]
Cut = Callable[[Item, int], Iterator[Region]]

# A piece is processed while it is in the cache: 8 MiB is slightly more than a core's share of the last-level
# cache, and long enough for an efficient read.
PIECE_BYTES = 8 << 20
_SMALLEST_PIECE = 64 << 10
# Above this ratio, decoding a chunk again for each of its small pieces costs more than the cache saves.
_MAX_DECODE_RATIO = 1.25
# Memory per item in addition to its arrays. Hashing or comparing small arrays took 1.7 KiB per array in
# total.
_BYTES_PER_ITEM = 1024
# Memory of pieces that wait for earlier ones, with their results.
BATCH_PIECES, BATCHES_AHEAD = 256, 4
_BYTES_PER_PIECE = 1024
_WAITING_BYTES = BATCHES_AHEAD * BATCH_PIECES * _BYTES_PER_PIECE


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """Memory of each of `jobs` workers.

    Attributes:
        jobs: Number of workers.
        piece_bytes: Bytes of one piece, over all arrays of an item.
        buffer_bytes: Bytes of one piece with the part of each array rounded up to full pages.
        scratch_bytes: Temporary bytes for reading or processing a piece.
        projected_peak: Maximum resident bytes.
    """

    jobs: int
    piece_bytes: int
    buffer_bytes: int
    scratch_bytes: int
    projected_peak: int


def fit_pieces(
    items: Sequence[Item], *, memory: int, jobs: int | None, scratch: int, reserved: int = 0
) -> ScanMemory:
    """Choose workers and pieces that fit the memory; smaller pieces are tried before fewer workers.

    Args:
        items: The items to scan.
        memory: Maximum resident bytes.
        jobs: Maximum number of workers; None for as many as suit the stores.
        scratch: Temporary bytes for processing a piece.
        reserved: Bytes of the memory that are used by something else.

    Raises:
        MemoryBudgetError: The memory is too small for one worker with the smallest pieces.
        ShapeError: Arrays of one item differ in shape.
    """
    for item in items:
        if len({array.shape for array in item}) != 1:
            raise ShapeError("arrays that are compared side by side differ in shape", got=list(item))
    scratch = max([scratch, *(array.scratch_bytes for item in items for array in item)])
    pages = sum(round_up_to_page(1) for _ in max(items, key=len, default=()))
    arrays = [array for item in items for array in item]
    costs = reading_costs(arrays)
    reserved += costs.memory
    base = baseline_bytes() + nodes(arrays) * BYTES_PER_NODE + len(items) * _BYTES_PER_ITEM + reserved
    for count, limit in _choices(jobs or readers(costs)):
        peak = base + count * (limit + pages + round_up_to_page(scratch) + _WAITING_BYTES)
        if peak <= memory:
            return ScanMemory(count, limit, limit + pages, scratch, peak)
    raise memory_error("reading these arrays does not fit into the memory allowed", memory, peak)


def _choices(jobs: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of workers and piece sizes in bytes, best first. Large pieces suit encoded chunks."""
    sizes = [LARGEST_TASK >> k for k in range((LARGEST_TASK // _SMALLEST_PIECE).bit_length())]
    large = [size for size in sizes if size >= PIECE_BYTES]
    yield from ((jobs, size) for size in large)
    yield from ((count, large[-1]) for count in range(jobs - 1, 0, -1))
    yield from ((1, size) for size in sizes if size < PIECE_BYTES)


def consecutive(item: Item, limit: int) -> Iterator[Region]:
    """Yield consecutive pieces in the C order of the elements.

    Args:
        item: Arrays of one shape.
        limit: Maximum elements of a piece; at most `PIECE_BYTES` are used.
    """
    yield from split_evenly(Region.whole(item[0].shape), min(limit, PIECE_BYTES // _element_bytes(item)))


class Tiles:
    """Division into pieces that are cheap to read: full chunks if they are encoded, long reads otherwise.

    The tile shape is cached for arrays that are read in the same way, such as all layers.

    Args:
        piece_bytes: Bytes of a piece, unless a larger piece is cheaper to read; None for `PIECE_BYTES`.
    """

    def __init__(self, piece_bytes: int | None = None) -> None:
        self._piece_bytes = piece_bytes or PIECE_BYTES
        self._shapes: dict[Hashable, Shape] = {}

    def __call__(self, item: Item, limit: int) -> Iterator[Region]:
        """Yield the pieces of an item.

        Args:
            item: Arrays of one shape.
            limit: Maximum elements of a piece; used only if a piece larger than `piece_bytes` is cheaper to
                read.
        """
        shape = item[0].shape
        if prod(shape) == 0:
            return
        kind = (shape, _element_bytes(item), limit, tuple(map(_kind, item)))
        if kind not in self._shapes:
            self._shapes[kind] = _cheapest(item, limit, self._piece_bytes)
        tile = self._shapes[kind]
        yield from grid_cells(shape, tile)


def _kind(array: LazyArray) -> Hashable:
    """Return a key that is equal for arrays that are read in the same way, at any position."""
    if isinstance(array, Take):
        return ("take", array.axis, _kind(array.source))
    return array.read_kind


def _cheapest(item: Item, limit: int, piece_bytes: int) -> Shape:
    """Return the shape of the pieces."""
    cost = partial(_cost, item, [prices(array) for array in item])
    return _tile_from(item, _tile(item, item[0].shape, limit, cost), piece_bytes, cost)


def _tile_from(item: Item, large: Shape, piece_bytes: int, cost: Callable[[Shape], float]) -> Shape:
    """Return a smaller shape than `large`, unless it costs more."""
    tile = _tile(item, large, piece_bytes // _element_bytes(item), cost)
    return large if cost(large) * _MAX_DECODE_RATIO < cost(tile) else tile


def tile_for(array: LazyArray, shape: Shape, limit: int) -> Shape:
    """Return the shape of pieces that are cheap to read, for a part of an array.

    Args:
        array: The array to read; an empty one is not divided.
        shape: Shape of the part.
        limit: Maximum elements of a piece; used only if a piece larger than `PIECE_BYTES` is cheaper to read.
    """
    item = (array,)
    cost = partial(_cost, item, [prices(array)])
    return _tile_from(item, _tile(item, shape, limit, cost), PIECE_BYTES, cost)


def _element_bytes(item: Item) -> int:
    return sum(array.dtype.itemsize for array in item)


def _tile(item: Item, shape: Shape, limit: int, cost: Callable[[Shape], float]) -> Shape:
    """Return a shape of at most `limit` elements, or of one element."""
    cells = [grain(array) for array in item]
    return tile_shape(shape, max(1, limit), cells, cost) or (1,) * len(shape)


def _cost(item: Item, prices: Sequence[Prices], shape: Shape) -> float:
    """Return the cost of reading a piece of this shape, in bytes per element."""
    region = Region.whole(shape)
    costs = (price.of(array.read_cost(region)) for array, price in zip(item, prices, strict=True))
    return sum(costs) / max(1, region.size)


def grain(array: LazyArray) -> Shape:
    """Return the shape of the cells that must be read whole, such as encoded chunks."""
    match array:
        case Chunked(part_scratch=scratch) if scratch is not None:
            return tuple(map(min, array.chunk, array.shape))
        case Elementwise():
            return grain(array.source)
        case Mean():
            cells = zip(*map(grain, array.parts), strict=True)
            return tuple(min(lcm(*cell), n) for cell, n in zip(cells, array.shape, strict=True))
        case BlockCodes(encoder=encoder):
            *outer, rows, columns = grain(array.source)
            high, wide = encoder.block
            return (*outer, lcm(rows, high), lcm(columns, wide) // encoder.packed)
        case Dequantized():
            cell = grain(array.codes)
            return (*cell[:-1], cell[-1] * array.packed)
        case Stack():
            inner = grain(array.parts[0])
            return (*inner[: array.axis], 1, *inner[array.axis :])
        case Take():
            inner = grain(array.source)
            return inner[: array.axis] + inner[array.axis + 1 :]
        case _:
            return (1,) * len(array.shape)
