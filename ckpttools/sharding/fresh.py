"""Memory for parts of arrays, which is used once: what is made of it stays, or is given back."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable
from math import prod

import numpy as np

from ckpttools.core.region import Shape

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
