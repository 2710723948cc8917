"""The decision who reads what of an array if several processes load it: each for itself, or some for all.

A process may need a bit of every row of an array; then it fetches full rows and discards most of each. In
that case each process reads a stretch that is contiguous in storage, and they exchange what they have read.
If several processes need the same parts, one of them can read for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape
from ckpttools.plan.pieces import PIECE_BYTES
from ckpttools.sharding.read_regions import projected_cost
from ckpttools.sharding.shards import LocalParts, Shards

Way = Literal["direct", "exchange", "broadcast"]
Homes = Mapping[int, Sequence[Region]]
"""Process -> the region of an array that each of its devices holds, in the order of the devices."""

# Only a sample of many processes is examined, since they read similar parts.
_MAX_SAMPLED = 4


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Average bytes that a process fetches of one or more arrays.

    Attributes:
        needed: stored bytes that its devices need.
        fetched: bytes that it reads for them.
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
    """Return equal regions of an array as its parts, without duplicates."""
    result = list(dict.fromkeys(boxes))
    part = result[0].shape if result else shape
    cells = (tuple(a // max(1, n) for a, n in zip(box.start, part, strict=True)) for box in result)
    return Shards(shape, part, tuple(cells))


def estimate_reads(array: LazyArray, homes: Homes) -> FetchPlan:
    """Return the average bytes that a process fetches for itself, from a sample of processes."""
    local = [
        LocalParts(array, shards_from_boxes(array.shape, homes[item]))
        for item in sample_processes(list(homes))
    ]
    needed = sum(item.stored_bytes for item in local)
    return FetchPlan(needed // len(local), projected_cost(local, PIECE_BYTES).nbytes // len(local))


def sample_processes(processes: Sequence[int]) -> Sequence[int]:
    """Return a sample of the processes that includes some from the middle."""
    return processes[:: max(1, len(processes) // _MAX_SAMPLED)][:_MAX_SAMPLED]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Division of an array for reading: one axis over processes, and one over the devices of each.

    Attributes:
        over_processes: the axis divided among processes.
        over_devices: the axis divided among the devices of a process.
    """

    over_processes: int
    over_devices: int

    def homes(self, shape: Shape, processes: int, devices: int) -> Homes:
        """Return the regions that the devices of sampled processes read.

        Args:
            shape: of the array.
            processes: number of processes.
            devices: number of devices of each process.
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
    """Return the division with which processes fetch least; None if no axes can be divided evenly.

    Args:
        array: the array to read.
        processes: number of processes.
        devices: number of devices of each process.
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
        # Prefer the same axis, since each process then reads one contiguous stretch.
        order = [first, *(axis for axis in range(len(shape)) if axis != first)]
        second = next((axis for axis in order if rest[axis] % devices == 0), None)
        if second is not None:
            yield Stretches(first, second)


def choose_way(
    array: LazyArray,
    homes: Homes,
    *,
    processes: int,
    devices: int | None,
    max_over_read: float,
    single_replica: bool,
) -> tuple[Way, Stretches | None, FetchPlan]:
    """Choose how an array is read, and return what that fetches.

    Args:
        array: the array to read.
        homes: the regions that the devices of each process need; without `single_replica` a sample of
            processes suffices.
        processes: number of processes.
        devices: per process, if all have the same number, contiguous in the mesh; None otherwise.
        max_over_read: bytes read per byte needed above which processes exchange.
        single_replica: whether one process reads what several need.
    """
    own = estimate_reads(array, homes)
    if processes == 1 or prod(array.shape) == 0:
        return "direct", None, own
    if single_replica and is_shared(homes):
        return "broadcast", None, estimate_reads(array, first_homes(homes))
    if own.over_read <= max_over_read or devices is None:
        return "direct", None, own
    result = best_stretches(array, processes, devices)
    if result is None or result[1].fetched >= own.fetched:
        return "direct", None, own
    return "exchange", *result


def is_shared(homes: Homes) -> bool:
    """Return whether every region is needed by several processes."""
    holders: dict[Region, set[int]] = {}
    for process, boxes in homes.items():
        for box in boxes:
            holders.setdefault(box, set()).add(process)
    return all(len(holder) > 1 for holder in holders.values())


def first_homes(homes: Homes) -> Homes:
    """Assign each region to the first process that needs it; omit processes that read nothing."""
    seen: set[Region] = set()
    result: dict[int, list[Region]] = {}
    for process, boxes in homes.items():
        own = [box for box in dict.fromkeys(boxes) if box not in seen]
        seen.update(own)
        if own:
            result[process] = own
    return result
