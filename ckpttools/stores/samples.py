"""Sample digests, which distinguish files with the same size and modification time.

The version of a local file is its modification time. Archives and images restore these times or give all
files the same one, so a different model with the same shapes can have the same version. The ctime cannot be
set back, but it changes too often: with hard links (backups, conversions that refer to their source),
permissions and moves. It also differs between copies on several hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ckpttools.core.region import ceil_div
from ckpttools.stores.base import File

BLOCK_BYTES, MOST_BLOCKS = 4096, 8
# Maximum number of sampled files, because a checkpoint may have 100,000 and each must be opened.
_MOST_SAMPLED = 64


def compute_sample_digests(file: File, blocks: int = MOST_BLOCKS) -> str:
    """Return short digests of blocks that are evenly spread over a file, starting with the first.

    Raises:
        FormatError, StorageError: As for `File.read`.
    """
    starts = sample_starts(file.size, blocks)
    read = (file.read(start, min(BLOCK_BYTES, file.size - start)) for start in starts)
    return ":".join(hashlib.sha256(block).hexdigest()[:16] for block in read)


def sample_starts(size: int, blocks: int) -> list[int]:
    """Return the offsets of the blocks that `compute_sample_digests` reads in a file of `size` bytes."""
    last = max(0, size - BLOCK_BYTES)
    return [last * number // max(1, blocks - 1) for number in range(blocks)]


def sample_files(files: Sequence[File]) -> str:
    """Return the sample digests of evenly chosen files; same errors as `compute_sample_digests`."""
    return " ".join(map(compute_sample_digests, files[:: ceil_div(len(files), _MOST_SAMPLED) or 1]))
