"""The pieces in which files are copied, and their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.digest.digest import DEFAULT_ALGORITHM, algorithm_named

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
