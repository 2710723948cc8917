"""Whether the bytes of an encoded chunk are all there, told from their headers: nothing is decoded.

Zstd says the length of each block before it, so its frames can be walked (RFC 8878): a read of 3 bytes for at
most 128 KiB of elements. Blosc says the length of all at the start, gzip that of the elements at the end, and
the index of a shard carries a checksum. Of zlib and bz2 nothing can be told without decoding them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.array.lazy import ByteSource
from ckpttools.core.errors import FormatError
from ckpttools.formats.zarr.inner_chunks import Shard

_CRC_BYTES = _CHECKSUM_BYTES = 4
_ZSTD_FRAME = 0xFD2FB528
# Frames that decoders skip: 0x184D2A50 to 0x184D2A5F, then their length.
_ZSTD_SKIPPED = 0x184D2A5
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3
_BLOSC_HEADER, _BLOSC_LENGTH_AT = 16, 12
_GZIP_MAGIC = b"\x1f\x8b"
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk in a file.

    Attributes:
        source: the file.
        offset: where the chunk starts.
        nbytes: its length.
    """

    source: ByteSource
    offset: int
    nbytes: int

    def number(self, position: int, size: int) -> int | None:
        """A little-endian number of `size` bytes at a position in the chunk; None beyond its end."""
        data = self.part(position, size)
        return int.from_bytes(data, "little") if len(data) == size else None

    def part(self, position: int, size: int) -> bytes:
        """Up to `size` bytes from a position in the chunk on."""
        out = bytearray(max(0, min(size, self.nbytes - position)))
        self.source.read_into(self.offset + position, out)
        return bytes(out)

    def without_end(self, size: int) -> Encoded:
        """The same without its last bytes."""
        return Encoded(self.source, self.offset, self.nbytes - size)


def is_pointer(chunk: Encoded) -> bool:
    """Whether it is the text that Git LFS leaves in the place of a file that was not fetched."""
    return chunk.nbytes <= _LONGEST_POINTER and chunk.part(0, len(_POINTER)) == _POINTER


def is_whole(chunk: Encoded, codecs: Sequence[str], decoded: int) -> bool:
    """Whether nothing tells that the chunk is cut or something else.

    Args:
        chunk: as it is stored.
        codecs: names of the codecs from bytes to bytes that made it, first one first.
        decoded: bytes of its elements.

    Raises:
        FormatError, StorageError: the file cannot be read.
    """
    if not codecs:
        return chunk.nbytes == decoded
    *inner, outer = codecs
    if outer == "crc32c":
        return chunk.nbytes >= _CRC_BYTES and is_whole(chunk.without_end(_CRC_BYTES), inner, decoded)
    if outer == "gzip":
        return _is_gzip(chunk, None if inner else decoded)
    test = _TESTS.get(outer)
    return chunk.nbytes > 0 and (test is None or test(chunk))


def _is_zstd(chunk: Encoded) -> bool:
    position: int | None = 0
    while position is not None and position < chunk.nbytes:
        position = _after_frame(chunk, position)
    return position == chunk.nbytes


def _after_frame(chunk: Encoded, position: int) -> int | None:
    """Where a frame of zstd that starts at a position ends; None if it is none, or has no end."""
    magic = chunk.number(position, 4)
    if magic is not None and magic >> 4 == _ZSTD_SKIPPED:
        length = chunk.number(position + 4, 4)
        return None if length is None else position + 8 + length
    flags = chunk.number(position + 4, 1)
    if magic != _ZSTD_FRAME or flags is None:
        return None
    is_single, has_checksum = bool(flags & 0x20), bool(flags & 0x04)
    content_size = (int(is_single), 2, 4, 8)[flags >> 6]
    dictionary = (0, 1, 2, 4)[flags & 3]
    after = _after_blocks(chunk, position + 5 + (not is_single) + dictionary + content_size)
    return None if after is None else after + _CHECKSUM_BYTES * has_checksum


def _after_blocks(chunk: Encoded, position: int) -> int | None:
    is_last = False
    while not is_last:
        header = chunk.number(position, 3)
        if header is None or (header >> 1) & 3 == _RESERVED_BLOCK:
            return None
        is_last = bool(header & 1)
        position += 3 + (1 if (header >> 1) & 3 == _RLE_BLOCK else header >> 3)
    return position


def _is_blosc(chunk: Encoded) -> bool:
    return chunk.nbytes >= _BLOSC_HEADER and chunk.number(_BLOSC_LENGTH_AT, 4) == chunk.nbytes


def _is_gzip(chunk: Encoded, decoded: int | None) -> bool:
    """The last four bytes are the number of decoded ones; both writers of zarr make one member of a chunk."""
    if chunk.part(0, len(_GZIP_MAGIC)) != _GZIP_MAGIC:
        return False
    return decoded is None or chunk.number(chunk.nbytes - 4, 4) == decoded % (1 << 32)


_TESTS: Mapping[str, Callable[[Encoded], bool]] = {"zstd": _is_zstd, "blosc": _is_blosc}


def is_shard(chunk: Encoded, shard: Shard, codecs: Sequence[str], decoded: int) -> bool:
    """Whether a shard has a sound index, and room for all pieces that this names.

    Args:
        chunk: as it is stored.
        shard: how many pieces it has, and where their index is.
        codecs: names of the codecs from bytes to bytes that made a piece.
        decoded: bytes of the elements of a piece.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        places = shard.places(chunk.source, chunk.offset, chunk.nbytes)
    except FormatError:
        return False
    lengths = {place[1] for place in places if place is not None}
    is_fixed = all(codec == "crc32c" for codec in codecs)
    return not is_fixed or lengths <= {decoded + _CRC_BYTES * len(codecs)}
