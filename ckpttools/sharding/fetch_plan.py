"""Decide which process reads which regions of an array if several processes load it.

A process may need a small part of every row of an array; it would then fetch full rows and discard most
of each. Instead, each process reads a contiguous stretch of the storage, and the processes exchange what
they have read. If several processes need the same parts, one of them can read for all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from ckpttools.array.lazy import LazyArray, ReadCost
from ckpttools.array.nodes import Stack
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, grid_cells, intersecting_cells
from ckpttools.plan.pieces import PIECE_BYTES, Item, tile_for
from ckpttools.plan.task import prices
from ckpttools.sharding.shards import LocalParts, Shards, merge_parts

Way = Literal["direct", "exchange", "broadcast"]
Homes = Mapping[int, Sequence[Region]]
"""For each process, the region of an array on each of its devices, in the order of the devices."""

# If there are many processes, only a sample is examined, since their reads are similar.
_MAX_SAMPLED = 4


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Average number of bytes that a process fetches for one or more arrays.

    Attributes:
        needed: Stored bytes that the devices of a process need.
        fetched: Bytes that the process reads for them.
    """

    needed: int = 0
    fetched: int = 0

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed."""
        return self.fetched / self.needed if self.needed else 1.0

    def __add__(self, other: FetchPlan) -> FetchPlan:
        return FetchPlan(self.needed + other.needed, self.fetched + other.fetched)


def shards_from_boxes(shape: Shape, boxes: Iterable[Region]) -> Shards:
    """Return the parts of an array from equal regions, without duplicates."""
    result = list(dict.fromkeys(boxes))
    part = result[0].shape if result else shape
    cells = (tuple(a // max(1, n) for a, n in zip(box.start, part, strict=True)) for box in result)
    return Shards(shape, part, tuple(cells))


def estimate_reads(array: LazyArray, regions: Homes) -> FetchPlan:
    """Return the average bytes that a process fetches for itself, estimated from a sample of processes."""
    local = [
        LocalParts(array, shards_from_boxes(array.shape, regions[item]))
        for item in sample_processes(list(regions))
    ]
    needed = sum(item.stored_bytes for item in local)
    return FetchPlan(needed // len(local), projected_cost(local, PIECE_BYTES).nbytes // len(local))


def sample_processes(processes: Sequence[int]) -> Sequence[int]:
    """Return a sample of the processes that includes some in the middle."""
    return processes[:: max(1, len(processes) // _MAX_SAMPLED)][:_MAX_SAMPLED]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Division of an array for reading: one axis over processes, and one over the devices of each.

    Attributes:
        over_processes: The axis divided among processes.
        over_devices: The axis divided among the devices of a process.
    """

    over_processes: int
    over_devices: int

    def homes(self, shape: Shape, processes: int, devices: int) -> Homes:
        """Return the regions that the devices of sampled processes read.

        Args:
            shape: Shape of the array.
            processes: Number of processes.
            devices: Number of devices of each process.
        """
        return {
            location: [self._box(shape, processes, devices, location, device) for device in range(devices)]
            for location in sample_processes(range(processes))
        }

    def _box(self, shape: Shape, processes: int, devices: int, location: int, device: int) -> Region:
        box = _stretch(Region.whole(shape), self.over_processes, processes, location)
        return _stretch(box, self.over_devices, devices, device)


def _stretch(box: Region, axis: int, count: int, location: int) -> Region:
    length = box.shape[axis] // count
    start = box.start[axis] + location * length
    return box.replaced(axis, start, start + length)


def best_stretches(array: LazyArray, processes: int, devices: int) -> tuple[Stretches, FetchPlan] | None:
    """Return the division with which processes fetch the fewest bytes; None if no axes can be divided evenly.

    Args:
        array: The array to read.
        processes: Number of processes.
        devices: Number of devices of each process.
    """
    result = [
        (choice, estimate_reads(array, choice.homes(array.shape, processes, devices)))
        for choice in _stretch_choices(array.shape, processes, devices)
    ]
    return min(result, key=lambda item: item[1].fetched, default=None)


def _stretch_choices(shape: Shape, processes: int, devices: int) -> Iterator[Stretches]:
    for first, length in enumerate(shape):
        if length % processes:
            continue
        rest = (*shape[:first], length // processes, *shape[first + 1 :])
        # Prefer the same axis, so that each process reads one contiguous stretch.
        order = [first, *(axis for axis in range(len(shape)) if axis != first)]
        second = next((axis for axis in order if rest[axis] % devices == 0), None)
        if second is not None:
            yield Stretches(first, second)


def choose_read_mode(
    array: LazyArray,
    regions: Homes,
    *,
    processes: int,
    devices: int | None,
    max_over_read: float,
    single_replica: bool,
) -> tuple[Way, Stretches | None, FetchPlan]:
    """Choose how an array is read. Returns the number of fetched bytes as well.

    Args:
        array: The array to read.
        regions: Regions that the devices of each process need; without `single_replica`, a sample of
            processes suffices.
        processes: Number of processes.
        devices: Devices per process if all processes have the same number, contiguous in the mesh; otherwise
            None.
        max_over_read: Ratio of read to needed bytes above which processes exchange.
        single_replica: Whether one process reads for all processes that need the same part.
    """
    own = estimate_reads(array, regions)
    if processes == 1 or prod(array.shape) == 0:
        return "direct", None, own
    if single_replica and is_shared(regions):
        return "broadcast", None, estimate_reads(array, first_readers(regions))
    if own.over_read <= max_over_read or devices is None:
        return "direct", None, own
    result = best_stretches(array, processes, devices)
    if result is None or result[1].fetched >= own.fetched:
        return "direct", None, own
    return "exchange", *result


def is_shared(regions: Homes) -> bool:
    """Return whether every region is needed by several processes."""
    holders: dict[Region, set[int]] = {}
    for process, boxes in regions.items():
        for box in boxes:
            holders.setdefault(box, set()).add(process)
    return all(len(holder) > 1 for holder in holders.values())


def first_readers(regions: Homes) -> Homes:
    """Assign each region to the first process that needs it, and omit processes that read nothing."""
    seen: set[Region] = set()
    result: dict[int, list[Region]] = {}
    for process, boxes in regions.items():
        own = [box for box in dict.fromkeys(boxes) if box not in seen]
        seen.update(own)
        if own:
            result[process] = own
    return result


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
