"""Divide the local parts of an array into regions that are cheap to read, each byte once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import prod

from ckpttools.array.lazy import LazyArray, ReadCost
from ckpttools.array.nodes import Stack
from ckpttools.core.region import Region, Shape, grid_cells, intersecting_cells
from ckpttools.plan.pieces import Item, tile_for
from ckpttools.plan.task import prices
from ckpttools.sharding.shards import LocalParts, Shards, merge_parts

# A region within one part is read into its final memory. Any other region is read into a buffer and copied,
# which costs about half as much as reading from the page cache.
_COPY_BREAK_EVEN = 1.5
# Number of sampled regions for estimating the cost of a division.
_SAMPLES = 64


class Cutter:
    """Divides arrays into regions. The tile shape is cached because all layers have the same one.

    Args:
        local: The arrays, in the order in which they will be divided.
    """

    def __init__(self, local: Sequence[LocalParts]) -> None:
        self.items: list[Item] = [(entry.array,) for entry in local]
        self._held = {id(item): entry for item, entry in zip(self.items, local, strict=True)}
        self._tiles: dict[Hashable, tuple[Shape, bool]] = {}

    def __call__(self, item: Item, limit: int) -> Iterator[Region]:
        """Yield regions of at most `limit` elements; see `ckpttools.plan.pieces.Cut`."""
        local = self._held[id(item)]
        if local.shards.size == 0:
            return
        tile, within_parts = self._tile(local, limit)
        yield from tile_parts(local.shards, tile, within_parts=within_parts)

    def _tile(self, local: LocalParts, limit: int) -> tuple[Shape, bool]:
        shards = local.shards
        kind = (local.array.read_kind, shards.shape, shards.part, shards.boxes, limit)
        if kind not in self._tiles:
            self._tiles[kind] = _cheapest_tile(local.array, shards, limit)
        return self._tiles[kind]


def _cheapest_tile(array: LazyArray, shards: Shards, limit: int) -> tuple[Shape, bool]:
    """Return the shape of the regions, and whether they end at part boundaries."""
    across = tile_for(array, max((box.shape for box in shards.boxes), key=prod), limit)
    within_parts = tile_for(array, shards.part, limit)
    first = _sample_cost(array, tile_parts(shards, across, within_parts=False))
    second = _sample_cost(array, tile_parts(shards, within_parts, within_parts=True))
    price = prices(array)
    if second.nbytes <= first.nbytes and price.of(second) <= _COPY_BREAK_EVEN * price.of(first):
        return within_parts, True
    return across, False


def _sample_cost(array: LazyArray, regions: Iterable[Region]) -> ReadCost:
    """Return the cost of reading the first regions, scaled to 2^20 elements."""
    result = list(itertools.islice(regions, _SAMPLES))
    cost = sum((array.read_cost(region) for region in result), ReadCost())
    elements = sum(region.size for region in result)
    return ReadCost((cost.nbytes << 20) // elements, (cost.reads << 20) // elements)


def tile_parts(shards: Shards, tile: Shape, *, within_parts: bool) -> Iterator[Region]:
    """Tile the local parts with regions up to the shape `tile`, within single parts if `within_parts`."""
    if within_parts:
        for index in shards.local:
            start = shards.region(index).start
            yield from (region.shifted(start) for region in grid_cells(shards.part, tile))
        return
    for box in shards.boxes:
        yield from tile_region(box, tile)


def tile_region(box: Region, tile: Shape) -> Iterator[Region]:
    """Divide a region along a grid of tiles that starts at the array's origin, so chunks stay complete."""
    for index in intersecting_cells(tile, box):
        start = tuple(i * n for i, n in zip(index, tile, strict=True))
        stop = tuple(a + n for a, n in zip(start, tile, strict=True))
        region = Region(start, stop).intersect(box)
        if region is not None:
            yield region


def projected_cost(local: Sequence[LocalParts], max_bytes: int) -> ReadCost:
    """Return the cost of reading all local parts: bytes fetched and number of reads.

    Args:
        local: Arrays and their parts.
        max_bytes: Maximum bytes of a region in memory.
    """
    local = [merge_parts(entry) or entry for entry in local]
    cutter = Cutter(local)
    known: dict[Hashable, ReadCost] = {}
    total = ReadCost()
    for item, entry in zip(cutter.items, local, strict=True):
        shards = entry.shards
        kind = (entry.array.read_kind, shards.shape, shards.part, shards.boxes)
        if kind not in known:
            regions = cutter(item, max(1, max_bytes // entry.array.dtype.itemsize))
            known[kind] = _cost(entry.array, regions)
        total += known[kind]
    return total


def _cost(array: LazyArray, regions: Iterable[Region]) -> ReadCost:
    """Return the cost of reading all regions.

    Regions of stacked arrays that are stored equally count once.
    """
    uniform_axes = _uniform_stack_axes(array)
    counts: Counter[Region] = Counter()
    for region in regions:
        shape = region.shape
        for axis in uniform_axes:
            region = region.replaced(axis, 0, shape[axis])
        counts[region] += 1
    return sum((array.read_cost(region) * count for region, count in counts.items()), ReadCost())


def _uniform_stack_axes(array: LazyArray) -> tuple[int, ...]:
    """Return the stacking axes along which every part costs the same to read."""
    if not isinstance(array, Stack) or not isinstance(array.read_kind, tuple):
        return ()
    inner = _uniform_stack_axes(array.parts[0])
    return (array.axis, *(axis + (axis >= array.axis) for axis in inner))
