"""Temporary memory of one worker: one block, handed out and given back like a stack.

The plan knows how much a task takes; the worker owns exactly that much and reuses it for every task, so
the peak is the sum of the blocks, whatever the model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np

from ckpttools.core.tally import add_counts

ALIGNMENT = 4096


def round_up_to_page(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """A stack of buffers inside one page-aligned block of `nbytes`.

    Attributes:
        counts: what functions of elements have counted since `take_counts`.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = np.frombuffer(mmap.mmap(-1, max(round_up_to_page(nbytes), ALIGNMENT)), np.uint8)
        self._top = 0
        self.counts: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def tally(self, told: Mapping[str, float]) -> None:
        """Adds to the counts, as `ckpttools.core.tally` does."""
        add_counts(self.counts, told)

    def take_counts(self) -> Mapping[str, float]:
        """What was counted since the last call; counting begins anew."""
        taken, self.counts = self.counts, {}
        return taken

    @contextmanager
    def take(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> Iterator[np.ndarray]:
        """An uninitialised C-ordered array, valid inside the `with`.

        Raises:
            MemoryError: more was taken than the plan projected; a defect of the plan, never of the input.
        """
        count = prod(shape) * dtype.itemsize
        bottom = self._top
        top = bottom + round_up_to_page(count)
        if top > self._block.nbytes:
            raise MemoryError(
                f"scratch of {self._block.nbytes} bytes is too small: {bottom} in use, {count} more expected"
            )
        self._top = top
        try:
            yield self._block[bottom : bottom + count].view(dtype).reshape(shape)
        finally:
            self._top = bottom
