"""The pieces in which files are copied, their digests, and the workers that copy them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.core.memory_limit import baseline_bytes, memory_error
from ckpttools.digest.digest import DEFAULT_ALGORITHM, algorithm_named
from ckpttools.stores.base import Store

# Several workers write the pieces of large files to a disk in any order.
PIECE_BYTES = 64 << 20
# Bytes per read are a multiple of this. xxhash releases the interpreter lock while it hashes them.
BLOCK_BYTES = 1 << 20

_hash = algorithm_named(DEFAULT_ALGORITHM)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, copied by one worker.

    Attributes:
        number: Number of the range, which is the same in every run of a copy.
        name: Name of the file.
        start, stop: Offsets of the first byte and after the last byte.
        size: Size of the file.
    """

    number: int
    name: str
    start: int
    stop: int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.size


def split_files(sizes: Mapping[str, int], limit: int | None) -> Sequence[FileRange]:
    """Return the pieces of all files, starting with those of large files.

    Args:
        sizes: Size of each file by name.
        limit: Maximum bytes of a piece; None if files must be written from first to last byte.
    """
    ordered = sorted(sizes, key=lambda name: (-sizes[name], name))
    ranges = [(name, start) for name in ordered for start in range(0, max(sizes[name], 1), limit or 1 << 62)]
    return [
        FileRange(number, name, start, min(sizes[name], start + (limit or sizes[name])), sizes[name])
        for number, (name, start) in enumerate(ranges)
    ]


class PieceDigester:
    """Computes the digest of a piece from its consecutive blocks."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, data: memoryview) -> None:
        """Add the next bytes, in full blocks except for the last one."""
        for start in range(0, len(data), BLOCK_BYTES):
            self._digests += _hash(data[start : start + BLOCK_BYTES])

    @property
    def text(self) -> str:
        return _hash(self._digests).hex()


def digest_of(piece: FileRange, read_into: Callable[[int, memoryview], None], buffer: memoryview) -> str:
    """Read a piece again, and return its digest.

    Args:
        piece: The piece.
        read_into: Fills memory with the bytes of the file at an offset.
        buffer: Memory for full blocks.
    """
    digester = PieceDigester()
    for offset, part in parts_of(piece, buffer):
        read_into(offset, part)
        digester.add(part)
    return digester.text


def parts_of(piece: FileRange, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset of each part of a piece, and memory for the part; the memory is reused."""
    for offset in range(piece.start, piece.stop, len(buffer)):
        yield offset, buffer[: min(len(buffer), piece.stop - offset)]


# Memory of a file in listings, statuses and pieces, without its name; and of a character of the name.
_BYTES_PER_FILE, _BYTES_PER_CHARACTER = 2048, 6
# With a smaller buffer, a worker waits more for requests. A larger one gains nothing (16 concurrent requests
# of 4 MiB).
_LARGEST_BUFFER, _GOOD_BUFFER = 32 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class CopyRoom:
    """The memory and workers of a copy.

    Attributes:
        jobs: Number of workers.
        buffer_bytes: Size of each worker's read buffer.
    """

    jobs: int
    buffer_bytes: int


def room_for(
    names: list[str], held_bytes: int, source: Store, destination: Store, memory: int, jobs: int
) -> CopyRoom:
    """Return the number of workers that fit into the memory, and their buffers.

    Args:
        names: Names of the files.
        held_bytes: Bytes of files that stay in memory until all others are complete.
        source, destination: The stores.
        memory: Maximum resident bytes.
        jobs: Maximum number of workers.

    Raises:
        MemoryBudgetError: The memory does not suffice for one worker.
    """
    names_bytes = len(names) * _BYTES_PER_FILE + sum(map(len, names)) * _BYTES_PER_CHARACTER
    base = baseline_bytes() + source.costs.memory + names_bytes + held_bytes
    if destination is not source:
        base += destination.costs.memory
    streams = destination.streams.memory if destination.streams else 0
    for least in (_GOOD_BUFFER, BLOCK_BYTES):
        count = min(jobs, (memory - base) // (streams + least))
        if count > 0:
            share = (memory - base) // count - streams
            return CopyRoom(count, min(_LARGEST_BUFFER, share) // BLOCK_BYTES * BLOCK_BYTES)
    raise memory_error("the copy does not fit into the memory allowed", memory, base + streams + BLOCK_BYTES)
