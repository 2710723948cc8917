"""Reading what is held of arrays into a buffer for each part, every byte once, whatever the parts are.

The buffers are made for this and never used again: `jax.device_put` on CPU makes an array of memory that is
aligned to 64 bytes without copying it, even where it was told not to (jax 0.10 and 0.12).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.core.region import Region, Shape
from ckpttools.run.scanning import scan
from ckpttools.sharding.cutting import Cutter, HeldParts

ALIGNMENT = 64
# From here on numpy asks for huge pages. A virtual machine gives free ones back to its host, and to have
# them again takes longer than to clear them: loading 2.47 GB took 3.9 to 4.4 CPU seconds with small pages
# and 8.4 to 8.9 with huge ones, a load that transposes nothing 2.5 to 3.6 and 4.4 to 5.6.
_MAPPED_BYTES = 4 << 20

Parts = Mapping[Shape, np.ndarray]
"""The parts of an array by their grid index, as carriers of its dtype in C order."""


@dataclass(frozen=True, slots=True)
class Reading:
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


def read_parts(held: Sequence[HeldParts], reading: Reading) -> Iterator[tuple[int, Parts]]:
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
    made = [_buffers(each) for each in held]
    left = [each.shards.size for each in held]
    cutter = Cutter(held)

    def into(index: int, region: Region) -> np.ndarray | None:
        shards = held[index].shards
        part = shards.only_part(region)
        return None if part is None else _place(made[index][part], shards.region(part), region)

    def visit(
        index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> Mapping[str, float]:
        shards = held[index].shards
        if shards.only_part(region) is None:
            for part, common in shards.parts_of(region):
                target = _place(made[index][part], shards.region(part), common)
                target[...] = values[0][common.relative_to(region).slices]
        return scratch.take_counts()

    yield from ((index, made[index]) for index, count in enumerate(left) if count == 0)
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
    for each in seen:
        if each.result:
            reading.lost(held[each.index].name, each.result)
        left[each.index] -= each.region.size
        if left[each.index] == 0:
            parts, made[each.index] = made[each.index], {}
            yield each.index, parts


def _buffers(held: HeldParts) -> Parts:
    shards, carrier = held.shards, held.array.dtype.carrier
    return {index: aligned(shards.part, carrier) for index in shards.held}


def aligned(shape: Shape, dtype: np.dtype[np.generic]) -> np.ndarray:
    """An uninitialised C-ordered array that begins at a multiple of 64 bytes."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        private = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(private, dtype).reshape(shape)
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)


def _place(part: np.ndarray, where: Region, region: Region) -> np.ndarray:
    """The view of a part in which a box lies that is inside it."""
    index: Any = (*region.relative_to(where).slices, ...)
    view: np.ndarray = part[index]
    return view
