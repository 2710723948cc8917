"""Reading what is held of arrays into memory for each part, every byte once, whatever the parts are.

The memory is made for this and never used again: `jax.device_put` on CPU makes an array of memory that is
aligned to 64 bytes without copying it, even where it was told not to (jax 0.10 and 0.12).
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape
from ckpttools.run.scanning import scan
from ckpttools.sharding.read_regions import Cutter
from ckpttools.sharding.shards import HeldParts, as_one_part


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


ALIGNMENT = 64
# From here on numpy asks for huge pages. A virtual machine gives free ones back to its host, and to have
# them again takes longer than to clear them: loading 2.47 GB took 3.9 to 4.4 CPU seconds with small pages
# and 8.4 to 8.9 with huge ones, a load that transposes nothing 2.5 to 3.6 and 4.4 to 5.6.
_MAPPED_BYTES = 4 << 20
# What one call asks of the kernel: workers take turns.
_AT_ONCE = 4 << 20
# Linux 5.14 and later; elsewhere the call fails and pages come as they are touched.
_MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def aligned(shape: Shape, dtype: np.dtype[np.generic]) -> np.ndarray:
    """An uninitialised C-ordered array that begins at a multiple of 64 bytes."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        private = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(private, dtype).reshape(shape)
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)


class Populating:
    """The pages of arrays made by `aligned`, had in few calls by whoever comes first.

    A page that comes when it is touched takes an exception of its own: 64 MiB came at 1.9 GB/s so and at
    2.8 GB/s in one call.

    Args:
        arrays: must stay until no thread is in `help` any more.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        self._left = deque(
            (array.ctypes.data + start, min(_AT_ONCE, array.nbytes - start))
            for array in arrays
            if array.nbytes >= _MAPPED_BYTES
            for start in range(0, array.nbytes, _AT_ONCE)
        )

    def help(self) -> None:
        """Has what no other thread has begun with; the rest may still be on its way then."""
        while self._left:
            try:
                _madvise(*self._left.popleft(), _MADV_POPULATE_WRITE)
            except IndexError:
                return
