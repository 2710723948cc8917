"""Division of the held parts of an array into regions that are cheap to read, each byte once."""

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
from ckpttools.sharding.shards import HeldParts, Shards, as_one_part

# A region within one part is read into its final memory. Any other region is read into a buffer and copied,
# and the copy costs about half as much as reading from the page cache.
_WORTH_A_COPY = 1.5
# Regions that are sampled to estimate the cost of a division.
_SAMPLES = 64


class Cutter:
    """Divider of arrays into regions; caches the tile shape, since all layers have the same.

    Args:
        held: the arrays, in the order in which they will be divided.
    """

    def __init__(self, held: Sequence[HeldParts]) -> None:
        self.items: list[Item] = [(entry.array,) for entry in held]
        self._held = {id(item): entry for item, entry in zip(self.items, held, strict=True)}
        self._tiles: dict[Hashable, tuple[Shape, bool]] = {}

    def __call__(self, item: Item, limit: int) -> Iterator[Region]:
        """Yield regions of at most `limit` elements; see `ckpttools.plan.pieces.Cut`."""
        held = self._held[id(item)]
        if held.shards.size == 0:
            return
        tile, inside = self._tile(held, limit)
        yield from pieces(held.shards, tile, inside=inside)

    def _tile(self, held: HeldParts, limit: int) -> tuple[Shape, bool]:
        shards = held.shards
        kind = (held.array.read_kind, shards.shape, shards.part, shards.boxes, limit)
        if kind not in self._tiles:
            self._tiles[kind] = _cheapest(held.array, shards, limit)
        return self._tiles[kind]


def _cheapest(array: LazyArray, shards: Shards, limit: int) -> tuple[Shape, bool]:
    """Return the shape of the regions, and whether they end at part boundaries."""
    across = tile_for(array, max((box.shape for box in shards.boxes), key=prod), limit)
    inside = tile_for(array, shards.part, limit)
    first = _sampled(array, pieces(shards, across, inside=False))
    second = _sampled(array, pieces(shards, inside, inside=True))
    price = prices(array)
    if second.nbytes <= first.nbytes and price.of(second) <= _WORTH_A_COPY * price.of(first):
        return inside, True
    return across, False


def _sampled(array: LazyArray, regions: Iterable[Region]) -> ReadCost:
    """Return the cost of reading the first regions, scaled to 2^20 elements."""
    result = list(itertools.islice(regions, _SAMPLES))
    cost = sum((array.read_cost(region) for region in result), ReadCost())
    elements = sum(region.size for region in result)
    return ReadCost((cost.nbytes << 20) // elements, (cost.reads << 20) // elements)


def pieces(shards: Shards, tile: Shape, *, inside: bool) -> Iterator[Region]:
    """Tile the held parts with regions of at most the shape `tile`, within single parts if `inside`."""
    if inside:
        for index in shards.held:
            start = shards.region(index).start
            yield from (piece.shifted(start) for piece in grid_cells(shards.part, tile))
        return
    for box in shards.boxes:
        yield from tiles_in(box, tile)


def tiles_in(box: Region, tile: Shape) -> Iterator[Region]:
    """Divide a region along the grid of tiles that starts at the array's origin, so chunks stay complete."""
    for index in intersecting_cells(tile, box):
        start = tuple(i * n for i, n in zip(index, tile, strict=True))
        stop = tuple(a + n for a, n in zip(start, tile, strict=True))
        piece = Region(start, stop).intersect(box)
        if piece is not None:
            yield piece


def projected(held: Sequence[HeldParts], most_bytes: int) -> ReadCost:
    """Return the cost of reading all held parts: bytes fetched and number of reads.

    Args:
        held: the arrays and their parts.
        most_bytes: maximum bytes of a region in memory.
    """
    held = [as_one_part(entry) or entry for entry in held]
    cutter = Cutter(held)
    known: dict[Hashable, ReadCost] = {}
    total = ReadCost()
    for item, entry in zip(cutter.items, held, strict=True):
        shards = entry.shards
        kind = (entry.array.read_kind, shards.shape, shards.part, shards.boxes)
        if kind not in known:
            regions = cutter(item, max(1, most_bytes // entry.array.dtype.itemsize))
            known[kind] = _cost(entry.array, regions)
        total += known[kind]
    return total


def _cost(array: LazyArray, regions: Iterable[Region]) -> ReadCost:
    """Return the cost of reading all regions; counts regions of equally stored stacked arrays once."""
    alike = _stacked_alike(array)
    counts: Counter[Region] = Counter()
    for region in regions:
        shape = region.shape
        for axis in alike:
            region = region.replaced(axis, 0, shape[axis])
        counts[region] += 1
    return sum((array.read_cost(region) * count for region, count in counts.items()), ReadCost())


def _stacked_alike(array: LazyArray) -> tuple[int, ...]:
    """Return the stacking axes along which every part costs the same to read."""
    if not isinstance(array, Stack) or not isinstance(array.read_kind, tuple):
        return ()
    inner = _stacked_alike(array.parts[0])
    return (array.axis, *(axis + (axis >= array.axis) for axis in inner))
