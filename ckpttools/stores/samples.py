"""A file told from others of its length and its age by a few of its bytes.

The version of a local file is the time of its last change. Where times are put back, or all files have the
same one, as in archives and images, another model of the same shapes has that, too. The time at which the
status was changed cannot be put back, and says too much: it is another one after a second link to the file
(backups, conversions that refer to their source), after other permissions, a move, and on each host that has
a copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ckpttools.core.region import ceil_div
from ckpttools.stores.base import File

BLOCK_BYTES, MOST_BLOCKS = 4096, 8
# Files of which bytes are looked at: a checkpoint may have 100,000, and each has to be opened for that.
_MOST_SAMPLED = 64


def sample_digests(file: File, blocks: int = MOST_BLOCKS) -> str:
    """Short digests of blocks that are spread evenly over a file, the first at its beginning.

    Raises:
        FormatError, StorageError: as `File.read`.
    """
    starts = sample_starts(file.size, blocks)
    read = (file.read(start, min(BLOCK_BYTES, file.size - start)) for start in starts)
    return ":".join(hashlib.sha256(block).hexdigest()[:16] for block in read)


def sample_starts(size: int, blocks: int) -> list[int]:
    """Return the offsets of the blocks that `sample_digests` reads in a file of `size` bytes."""
    last = max(0, size - BLOCK_BYTES)
    return [last * number // max(1, blocks - 1) for number in range(blocks)]


def sampled_files(files: Sequence[File]) -> str:
    """The same of some files, spread over all; errors as `sample_digests`."""
    return " ".join(map(sample_digests, files[:: ceil_div(len(files), _MOST_SAMPLED) or 1]))
