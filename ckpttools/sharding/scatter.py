"""Reading what is held of arrays into memory for each part, every byte once, whatever the parts are.

The memory is made for this and never used again: `jax.device_put` on CPU makes an array of memory that is
aligned to 64 bytes without copying it, even where it was told not to (jax 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape
from ckpttools.run.scanning import scan
from ckpttools.sharding.cutting import Cutter
from ckpttools.sharding.fresh import ALIGNMENT, Populating, aligned
from ckpttools.sharding.held import HeldParts, as_one_part


@dataclass(frozen=True, slots=True)
class ReadResources:
    """What reading may take, and who is told of it.

    Attributes:
        memory, jobs, reserved, observe: of `ckpttools.run.scanning.scan`.
        lost: is told of values that their new dtype cannot hold: the array's name, and how many of them by
            what they became.
    """

    memory: int
    jobs: int | None
    reserved: int = 0
    observe: Callable[[int], None] = lambda nbytes: None
    lost: Callable[[str, Mapping[str, float]], None] = lambda name, counts: None


def read_parts(held: Sequence[HeldParts], reading: ReadResources) -> Iterator[tuple[int, Parts]]:
    """The parts of all arrays, each array as soon as all of it was read.

    Args:
        held: the arrays, best in the order in which they lie in their files.
        reading: memory beside the parts, workers, and who is told of the bytes that were read.

    Yields:
        The number of an array, and its parts.

    Raises:
        MemoryBudgetError: the memory does not suffice even for one worker.
        CheckpointError: as `scan`, after the arrays before the one that cannot be read.
    """
    built = dict(enumerate(map(buffers, held)))
    expected = [item.held for item in built.values()]
    fresh = [Populating(item.memory) for item in built.values()]
    left = [item.shards.size for item in held]
    cutter = Cutter(expected)

    def into(index: int, region: Region) -> np.ndarray | None:
        fresh[index].help()
        part = expected[index].shards.only_part(region)
        return None if part is None else built[index].location(part, region)

    def visit(
        index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> Mapping[str, float]:
        shards = expected[index].shards
        if shards.only_part(region) is None:
            for part, common in shards.parts_of(region):
                built[index].location(part, common)[...] = values[0][common.relative_to(region).slices]
        return scratch.take_counts()

    yield from ((index, built.pop(index).parts) for index, count in enumerate(left) if count == 0)
    seen = scan(
        cutter.items,
        visit,
        memory=reading.memory,
        jobs=reading.jobs,
        cut=cutter,
        reserved=reading.reserved,
        observe=reading.observe,
        name=lambda index: held[index].name,
        into=into,
    )
    for item in seen:
        if item.result:
            reading.lost(held[item.index].name, item.result)
        left[item.index] -= item.region.size
        if left[item.index] == 0:
            yield item.index, built.pop(item.index).parts


Parts = Mapping[Shape, np.ndarray]
"""The parts of an array by their grid index, as carriers of its dtype in C order."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of parts, and how the array is read into it.

    Attributes:
        held: what is read: the array and its parts, or the same with axes split where parts end, which makes
            all of them one part.
        targets: memory of each part of `held`.
        parts: the same memory as the parts that are expected.
        memory: all of it.
    """

    held: HeldParts
    targets: Parts
    parts: Parts
    memory: tuple[np.ndarray, ...]

    def location(self, part: Shape, region: Region) -> np.ndarray:
        """The view in which a box lies that is inside one part of `held`."""
        index: Any = (*region.relative_to(self.held.shards.region(part)).slices, ...)
        view: np.ndarray = self.targets[part][index]
        return view


def buffers(held: HeldParts) -> Buffers:
    """Memory for all parts of an array that are held.

    A piece that lies across parts goes to one memory after the other: with axes split where parts end it has
    one place, to which it is read without a buffer between.
    """
    one = as_one_part(held)
    shards, carrier = held.shards, held.array.dtype.carrier
    if one is None:
        apart = {index: aligned(shards.part, carrier) for index in shards.held}
        return Buffers(held, apart, apart, tuple(apart.values()))
    start = shards.boxes[0].start
    counts = tuple(b // n for b, n in zip(shards.boxes[0].shape, shards.part, strict=True))
    nbytes = prod(shards.part) * carrier.itemsize
    stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory = aligned((*counts, stride), np.dtype(np.uint8))
    parts = {
        tuple(a // n + i for a, n, i in zip(start, shards.part, index, strict=True)): (
            memory[index][:nbytes].view(carrier).reshape(shards.part)
        )
        for index in product(*map(range, counts))
    }
    first = memory.reshape(-1)[:nbytes].view(carrier).reshape(shards.part)
    strides: list[int] = []
    for axis, count in enumerate(counts):
        strides += [memory.strides[axis], first.strides[axis]] if count > 1 else [first.strides[axis]]
    view = np.lib.stride_tricks.as_strided(first, one.shards.part, strides, writeable=True)
    return Buffers(one, {one.shards.held[0]: view}, parts, (memory,))
