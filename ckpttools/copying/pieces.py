"""The pieces in which files are copied, and their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.digest.digest import DEFAULT_ALGORITHM, algorithm_named

# Pieces of large files go to a disk in any order, by several workers.
PIECE_BYTES = 64 << 20
# A multiple of it is read at a time; xxhash gives up the interpreter's lock meanwhile.
BLOCK_BYTES = 1 << 20

_hash = algorithm_named(DEFAULT_ALGORITHM)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, copied by one worker.

    Attributes:
        number: the same in every run of a copy.
        name: of the file.
        start, stop: its first byte, and the one after its last.
        size: of the file.
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
    """Return the pieces of files, those of large files first.

    Args:
        sizes: by name.
        limit: bytes of a piece; None where a file is written from its first byte to its last.
    """
    ordered = sorted(sizes, key=lambda name: (-sizes[name], name))
    ranges = [(name, start) for name in ordered for start in range(0, max(sizes[name], 1), limit or 1 << 62)]
    return [
        FileRange(number, name, start, min(sizes[name], start + (limit or sizes[name])), sizes[name])
        for number, (name, start) in enumerate(ranges)
    ]


class PieceDigester:
    """The digest of a piece, whose blocks come in order."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, data: memoryview) -> None:
        """Take the bytes that come next: whole blocks, but for the last."""
        for start in range(0, len(data), BLOCK_BYTES):
            self._digests += _hash(data[start : start + BLOCK_BYTES])

    @property
    def text(self) -> str:
        return _hash(self._digests).hex()


def digest_of(piece: FileRange, read_into: Callable[[int, memoryview], None], buffer: memoryview) -> str:
    """Return the digest of a piece, reading it again.

    Args:
        piece: which.
        read_into: fills memory with the bytes of its file from an offset on.
        buffer: memory for whole blocks.
    """
    digester = PieceDigester()
    for offset, part in parts_of(piece, buffer):
        read_into(offset, part)
        digester.add(part)
    return digester.text


def parts_of(piece: FileRange, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the offsets of a piece at which its parts begin, and memory for each, one after the other."""
    for offset in range(piece.start, piece.stop, len(buffer)):
        yield offset, buffer[: min(len(buffer), piece.stop - offset)]
