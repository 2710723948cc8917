"""Where the parts of one array are read to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape
from ckpttools.sharding.fresh import ALIGNMENT, aligned
from ckpttools.sharding.held import HeldParts, as_one_part

Parts = Mapping[Shape, np.ndarray]
"""The parts of an array by their grid index, as carriers of its dtype in C order."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of parts, and how the array is read into it.

    Attributes:
        held: what is read: the array and its parts, or the same with axes split where parts end, which makes
            all of them one part.
        targets: memory of each part of `held`.
        parts: the same memory as the parts that are wanted.
        memory: all of it.
    """

    held: HeldParts
    targets: Parts
    parts: Parts
    memory: tuple[np.ndarray, ...]

    def place(self, part: Shape, region: Region) -> np.ndarray:
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
