"""Sample digests, which distinguish files of equal length and age.

The version of a local file is its modification time. Archives and images restore these times or give all
files the same one, so another model of the same shapes can have an equal version. The ctime cannot be set
back, but it changes too often: with each hard link (backups, conversions that refer to their source), with
permissions and moves, and it differs between hosts with copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ckpttools.core.region import ceil_div
from ckpttools.stores.base import File

BLOCK_BYTES, MOST_BLOCKS = 4096, 8
# Maximum number of sampled files: a checkpoint may have 100,000, and each must be opened.
_MOST_SAMPLED = 64


def compute_sample_digests(file: File, blocks: int = MOST_BLOCKS) -> str:
    """Return short digests of blocks that are spread evenly over a file, starting with the first block.

    Raises:
        FormatError, StorageError: as `File.read`.
    """
    starts = sample_starts(file.size, blocks)
    read = (file.read(start, min(BLOCK_BYTES, file.size - start)) for start in starts)
    return ":".join(hashlib.sha256(block).hexdigest()[:16] for block in read)


def sample_starts(size: int, blocks: int) -> list[int]:
    """Return the offsets of the blocks that `compute_sample_digests` reads in a file of `size` bytes."""
    last = max(0, size - BLOCK_BYTES)
    return [last * number // max(1, blocks - 1) for number in range(blocks)]


def sample_files(files: Sequence[File]) -> str:
    """Return the sample digests of evenly chosen files; errors as `compute_sample_digests`."""
    return " ".join(map(compute_sample_digests, files[:: ceil_div(len(files), _MOST_SAMPLED) or 1]))
