"""Read local parts of arrays into one buffer per part, each byte once.

A buffer is allocated for one read and never reused: on CPU, `jax.device_put` aliases memory that is aligned
to 64 bytes instead of copying it, even if asked to copy (jax 0.10 and 0.12).
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
from ckpttools.sharding.fetch_plan import Cutter
from ckpttools.sharding.shards import LocalParts, merge_parts


@dataclass(frozen=True, slots=True)
class ReadResources:
    """Resources and callbacks of a read.

    Attributes:
        memory, jobs, reserved, observe: See `ckpttools.run.scanning.scan`.
        lost: Called with the name of an array whose values changed in a cast, and the number of these values
            by new value.
    """

    memory: int
    jobs: int | None
    reserved: int = 0
    observe: Callable[[int], None] = lambda nbytes: None
    lost: Callable[[str, Mapping[str, float]], None] = lambda name, counts: None


def read_parts(local: Sequence[LocalParts], reading: ReadResources) -> Iterator[tuple[int, Parts]]:
    """Read the parts of all arrays. Yields each array as soon as it is complete.

    Args:
        local: The arrays, preferably in the order of their files.
        reading: Memory in addition to the parts, workers, and callbacks.

    Yields:
        The index of an array and its parts.

    Raises:
        MemoryBudgetError: The memory does not suffice for one worker.
        CheckpointError: See `scan`; raised after all arrays before the one that cannot be read.
    """
    result = dict(enumerate(map(buffers, local)))
    expected = [item.local for item in result.values()]
    populators = [PagePopulator(item.memory) for item in result.values()]
    left = [item.shards.size for item in local]
    cutter = Cutter(expected)

    def into(index: int, region: Region) -> np.ndarray | None:
        populators[index].populate()
        part = expected[index].shards.containing_part(region)
        return None if part is None else result[index].location(part, region)

    def visit(
        index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> Mapping[str, float]:
        shards = expected[index].shards
        if shards.containing_part(region) is None:
            for part, common in shards.intersect_parts(region):
                result[index].location(part, common)[...] = values[0][common.relative_to(region).slices]
        return scratch.take_counts()

    yield from ((index, result.pop(index).parts) for index, count in enumerate(left) if count == 0)
    results = scan(
        cutter.items,
        visit,
        memory=reading.memory,
        jobs=reading.jobs,
        cut=cutter,
        reserved=reading.reserved,
        observe=reading.observe,
        name=lambda index: local[index].name,
        into=into,
    )
    for item in results:
        if item.result:
            reading.lost(local[item.index].name, item.result)
        left[item.index] -= item.region.size
        if left[item.index] == 0:
            yield item.index, result.pop(item.index).parts


Parts = Mapping[Shape, np.ndarray]
"""The parts of an array by grid index, as unsigned carriers of its dtype in C order."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of parts, and the layout in which the array is read into it.

    Attributes:
        local: The array and its parts, or the same with axes split at part boundaries, which makes all parts
            one.
        targets: Memory of each part of `local`.
        parts: The same memory, divided into the expected parts.
        memory: The complete memory.
    """

    local: LocalParts
    targets: Parts
    parts: Parts
    memory: tuple[np.ndarray, ...]

    def location(self, part: Shape, region: Region) -> np.ndarray:
        """Return the view of a region that is inside one part of `local`."""
        index: Any = (*region.relative_to(self.local.shards.region(part)).slices, ...)
        view: np.ndarray = self.targets[part][index]
        return view


def buffers(local: LocalParts) -> Buffers:
    """Allocate memory for the local parts of an array.

    A region across parts must be copied to several buffers. If axes are split at part boundaries, the region
    has one view, and is read into it directly.
    """
    one = merge_parts(local)
    shards, carrier = local.shards, local.array.dtype.carrier
    if one is None:
        targets = {index: aligned_array(shards.part, carrier) for index in shards.local}
        return Buffers(local, targets, targets, tuple(targets.values()))
    start = shards.boxes[0].start
    counts = tuple(b // n for b, n in zip(shards.boxes[0].shape, shards.part, strict=True))
    nbytes = prod(shards.part) * carrier.itemsize
    stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory = aligned_array((*counts, stride), np.dtype(np.uint8))
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
    return Buffers(one, {one.shards.local[0]: view}, parts, (memory,))


ALIGNMENT = 64
# From this size on, numpy requests huge pages. A virtual machine returns free huge pages to its host, and
# getting them back takes longer than clearing them. Loading 2.47 GB took 3.9 to 4.4 CPU seconds with small
# pages and 8.4 to 8.9 with huge ones; a load without transposes took 2.5 to 3.6 and 4.4 to 5.6.
_MAPPED_BYTES = 4 << 20
# Bytes per system call, so that workers take turns.
_POPULATE_BYTES = 4 << 20
# Requires Linux 5.14. Elsewhere the call fails, and pages are mapped when they are touched.
_MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def aligned_array(shape: Shape, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Return an uninitialized C-ordered array aligned to 64 bytes."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES:
        private = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(private, dtype).reshape(shape)
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)


class PagePopulator:
    """Maps the pages of arrays from `aligned_array` with few system calls, which any worker may make.

    Otherwise each page causes a fault when it is touched: 64 MiB took 1.9 GB/s with faults and 2.8 GB/s in
    one call.

    Args:
        arrays: Arrays, which must stay alive until no thread is in `populate`.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        self._left = deque(
            (array.ctypes.data + start, min(_POPULATE_BYTES, array.nbytes - start))
            for array in arrays
            if array.nbytes >= _MAPPED_BYTES
            for start in range(0, array.nbytes, _POPULATE_BYTES)
        )

    def populate(self) -> None:
        """Map the pages that no other thread has started on. Other threads may still be mapping theirs."""
        while self._left:
            try:
                _madvise(*self._left.popleft(), _MADV_POPULATE_WRITE)
            except IndexError:
                return
