"""Temporary memory of a worker: one block that is used as a stack.

The plan knows how much memory each task takes. A worker allocates exactly that much and reuses it for
every task, so peak memory is the sum of the workers' blocks, whatever the size of the model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np

from ckpttools.array.lazy import LARGEST

ALIGNMENT = 4096


def round_up_to_page(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """A stack of buffers inside one page-aligned block of `nbytes`.

    Attributes:
        counts: The counts of element functions since the last `take_counts`.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = np.frombuffer(mmap.mmap(-1, max(round_up_to_page(nbytes), ALIGNMENT)), np.uint8)
        self._top = 0
        self.counts: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def tally(self, counts: Mapping[str, float]) -> None:
        """Add counts to the tally, as `add_counts` does."""
        add_counts(self.counts, counts)

    def take_counts(self) -> Mapping[str, float]:
        """Return the counts since the last call, and reset them."""
        taken, self.counts = self.counts, {}
        return taken

    @contextmanager
    def take(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> Iterator[np.ndarray]:
        """Yield an uninitialized C-ordered array that is valid inside the `with` block.

        Raises:
            MemoryError: A task took more than the plan projected. This is an error in the plan, not in the
                input.
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


def add_counts(tally: MutableMapping[str, float], counts: Mapping[str, float]) -> None:
    """Add the counters of a part to a tally, in place. Parts can be added in any order."""
    for name, number in counts.items():
        if name not in tally:
            tally[name] = number
        elif name.startswith(LARGEST):
            tally[name] = max(tally[name], number)
        else:
            tally[name] += number
