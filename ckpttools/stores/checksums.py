"""Checksums of files: verify stored ones, and sample files to distinguish those of equal length.

The version of a local file is its modification time. Archives and images restore these times or give all
files the same one, so a different model with the same shapes can have the same version. The ctime cannot
be set back, but it changes too often: with hard links (backups, conversions that refer to their source),
permissions and moves. It also differs between copies on several hosts.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import ceil_div
from ckpttools.stores.base import File
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.fetching import Observe

_BLOCK = 4 << 20
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ChecksummedRange:
    """A byte range with a stored checksum.

    Attributes:
        file: The file.
        name: Name of the range.
        offset, nbytes: Position and length in the file.
        crc32: The stored checksum.
    """

    file: File
    name: str
    offset: int
    nbytes: int
    crc32: int


DamagedRanges = Sequence[tuple[ChecksummedRange, int]]
"""Ranges whose checksum differs from the stored one, each with the actual checksum."""


def find_damage(
    files: Sequence[Sequence[ChecksummedRange]], notify: Observe
) -> list[DamagedRanges | CheckpointError]:
    """Find damaged ranges in files of one store, reading several files at a time.

    Args:
        files: The checksummed ranges of each file.
        notify: Called with the number of bytes read so far and the total.

    Returns:
        The damaged ranges of each file, or the error if the file cannot be read.
    """
    total, done, lock = sum(item.nbytes for result in files for item in result), 0, threading.Lock()
    notify(0, total)

    def observe(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            notify(done, total)

    def verify(ranges: Sequence[ChecksummedRange]) -> DamagedRanges | CheckpointError:
        try:
            read = [(item, _crc32_of(item, observe)) for item in ranges]
        except CheckpointError as error:
            return error
        finally:
            for item in ranges:
                item.file.close()
        return [(item, got) for item, got in read if got != item.crc32]

    costs = {item.file.costs.requests for result in files for item in result[:1]}
    requests = max((cost or 0 for cost in costs), default=0)
    return map_in_threads(requests or min(os.cpu_count() or 1, _MAX_THREADS), verify, files)


def _crc32_of(checksummed: ChecksummedRange, observe: Callable[[int], None]) -> int:
    block, crc = memoryview(bytearray(min(_BLOCK, checksummed.nbytes))), 0
    for start in range(0, checksummed.nbytes, _BLOCK):
        part = block[: checksummed.nbytes - start]
        checksummed.file.read_into(checksummed.offset + start, part)
        crc = zlib.crc32(part, crc)
        observe(len(part))
    return crc


BLOCK_BYTES, MAX_BLOCKS = 4096, 8
# Maximum number of sampled files, because a checkpoint may have 100,000 and each must be opened.
_MAX_SAMPLED = 64


def compute_sample_digests(file: File, blocks: int = MAX_BLOCKS) -> str:
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
    return " ".join(map(compute_sample_digests, files[:: ceil_div(len(files), _MAX_SAMPLED) or 1]))
