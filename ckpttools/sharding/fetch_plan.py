"""Who reads what of an array where several processes load it: each what its devices need, or some for all.

What a process needs of an array may be a bit of every row, so that it fetches rows whole and leaves most of
them. Then each process reads a stretch of the array, contiguous where it is stored, and they exchange what
they have read. Where several need the same, one may read it for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape
from ckpttools.plan.pieces import PIECE_BYTES
from ckpttools.sharding.read_regions import projected
from ckpttools.sharding.shards import HeldParts, Shards

Way = Literal["direct", "exchange", "broadcast"]
Homes = Mapping[int, Sequence[Region]]
"""Process -> the box of an array that each of its devices holds, in the order of the devices."""

# Of many processes some are looked at: what they read is alike.
_MOST_LOOKED_AT = 4


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What processes fetch of an array, or of several.

    Attributes:
        needed: bytes that the devices of a process need, as they are stored, on average.
        fetched: bytes that it reads for them.
    """

    needed: int = 0
    fetched: int = 0

    @property
    def over_read(self) -> float:
        """Bytes that are read for each byte that is needed."""
        return self.fetched / self.needed if self.needed else 1.0

    def __add__(self, other: FetchPlan) -> FetchPlan:
        return FetchPlan(self.needed + other.needed, self.fetched + other.fetched)


def shards_of(shape: Shape, boxes: Iterable[Region]) -> Shards:
    """Equal boxes of an array as parts of it, each once."""
    result = list(dict.fromkeys(boxes))
    part = result[0].shape if result else shape
    cells = (tuple(a // max(1, n) for a, n in zip(box.start, part, strict=True)) for box in result)
    return Shards(shape, part, tuple(cells))


def reads(array: LazyArray, homes: Homes) -> FetchPlan:
    """What a process fetches of an array, for itself; of many processes, what some do."""
    held = [HeldParts(array, shards_of(array.shape, homes[item])) for item in some_of(list(homes))]
    needed = sum(item.stored_bytes for item in held)
    return FetchPlan(needed // len(held), projected(held, PIECE_BYTES).nbytes // len(held))


def some_of(processes: Sequence[int]) -> Sequence[int]:
    """Few of many processes, those in the middle among them."""
    return processes[:: max(1, len(processes) // _MOST_LOOKED_AT)][:_MOST_LOOKED_AT]


@dataclass(frozen=True, slots=True)
class Stretches:
    """How an array is cut for reading: one axis over processes, and perhaps another over their devices.

    Attributes:
        over_processes: the axis that processes share.
        over_devices: the axis that the devices of a process share.
    """

    over_processes: int
    over_devices: int

    def homes(self, shape: Shape, processes: int, devices: int) -> Homes:
        """What each device of some processes reads.

        Args:
            shape: of the array.
            processes: how many there are.
            devices: of each process.
        """
        return {
            location: [self._box(shape, processes, devices, location, device) for device in range(devices)]
            for location in some_of(range(processes))
        }

    def _box(self, shape: Shape, processes: int, devices: int, location: int, device: int) -> Region:
        box = _stretch(Region.whole(shape), self.over_processes, processes, location)
        return _stretch(box, self.over_devices, devices, device)


def _stretch(box: Region, axis: int, count: int, location: int) -> Region:
    length = box.shape[axis] // count
    start = box.start[axis] + location * length
    return box.replaced(axis, start, start + length)


def stretches(array: LazyArray, processes: int, devices: int) -> tuple[Stretches, FetchPlan] | None:
    """The cut with which processes fetch least; None where no axes can be divided evenly.

    Args:
        array: what is read.
        processes: how many there are.
        devices: of each process.
    """
    result = [
        (choice, reads(array, choice.homes(array.shape, processes, devices)))
        for choice in _choices(array.shape, processes, devices)
    ]
    return min(result, key=lambda item: item[1].fetched, default=None)


def _choices(shape: Shape, processes: int, devices: int) -> Iterator[Stretches]:
    for first, length in enumerate(shape):
        if length % processes:
            continue
        rest = (*shape[:first], length // processes, *shape[first + 1 :])
        # Along the same axis if that goes: what a process reads is then one stretch.
        order = [first, *(axis for axis in range(len(shape)) if axis != first)]
        second = next((axis for axis in order if rest[axis] % devices == 0), None)
        if second is not None:
            yield Stretches(first, second)


def way_of(
    array: LazyArray,
    homes: Homes,
    *,
    processes: int,
    devices: int | None,
    max_over_read: float,
    single_replica: bool,
) -> tuple[Way, Stretches | None, FetchPlan]:
    """How an array is read, and what that fetches.

    Args:
        array: what is read.
        homes: what the devices of each process need; of some processes will do without `single_replica`.
        processes: how many there are.
        devices: of each process, where all have as many and follow each other; None where not.
        max_over_read: bytes for each byte needed, from which on processes exchange.
        single_replica: whether what several processes need is read by one of them.
    """
    own = reads(array, homes)
    if processes == 1 or prod(array.shape) == 0:
        return "direct", None, own
    if single_replica and is_shared(homes):
        return "broadcast", None, reads(array, first_homes(homes))
    if own.over_read <= max_over_read or devices is None:
        return "direct", None, own
    result = stretches(array, processes, devices)
    if result is None or result[1].fetched >= own.fetched:
        return "direct", None, own
    return "exchange", *result


def is_shared(homes: Homes) -> bool:
    """Whether several processes need the same boxes, all of them."""
    holders: dict[Region, set[int]] = {}
    for process, boxes in homes.items():
        for box in boxes:
            holders.setdefault(box, set()).add(process)
    return all(len(holder) > 1 for holder in holders.values())


def first_homes(homes: Homes) -> Homes:
    """Of each box the first process that needs it; processes that read nothing are left out."""
    seen: set[Region] = set()
    result: dict[int, list[Region]] = {}
    for process, boxes in homes.items():
        own = [box for box in dict.fromkeys(boxes) if box not in seen]
        seen.update(own)
        if own:
            result[process] = own
    return result
