"""Which sizes of chunks cost whoever loads them: the one rule for warnings, advice and what is referenced."""

from __future__ import annotations

# A whole array as one chunk is read at a third of the speed at which it is read cut by 16 (1.6 GB of bfloat16
# onto 8 devices), and every host holds all of it for its part; below this size neither matters.
GIANT = 256 << 20
# A chunk costs its reader a request and a task. 64 MiB under OCDBT take tensorstore as long to read in chunks
# of 256 KiB as in those of 4 MiB, 1.25 times as long in those of 64 KiB, twice as long in those of 16 KiB.
FINE, MANY = 64 << 10, 1024


def is_giant(chunks: int, chunk_nbytes: int) -> bool:
    """Whether an array is one chunk that is read whole for any part of it.

    Args:
        chunks: of the array.
        chunk_nbytes: bytes of each in memory.
    """
    return chunks == 1 and chunk_nbytes >= GIANT


def is_fine(chunks: int, chunk_nbytes: int) -> bool:
    """Whether requests take longer than bytes: of many small chunks. Arguments as of `is_giant`."""
    return chunks >= MANY and chunk_nbytes < FINE
