"""Shards: chunks that consist of several separately encoded pieces and an index of their locations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.codecs import crc32c
from ckpttools.codecs.base import CodecSpec
from ckpttools.codecs.bytes import LITTLE_ENDIAN
from ckpttools.codecs.streams import ByteRange
from ckpttools.codecs.transpose import number_list
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, grid_shape

if TYPE_CHECKING:
    from ckpttools.codecs.coding import Coding
    from ckpttools.codecs.registry import CodecStep

# Marks an omitted piece in place of its offset and length.
_MISSING = (1 << 64) - 1
_ENTRY_BYTES = 16


@dataclass(frozen=True)
class ShardingCodec:
    """The codec `sharding_indexed` of zarr v3.

    Attributes:
        piece: Shape of a piece with axes in memory order; unvalidated metadata of any type.
        codecs: Codecs of pieces, as listed in the metadata.
        steps: The parsed codecs of pieces.
        index: The codecs of the index.
        at_start: Whether the index is before the pieces rather than after them.
    """

    piece: Any
    codecs: Sequence[CodecSpec]
    steps: tuple[CodecStep, ...]
    index: tuple[CodecStep, ...]
    at_start: bool

    def names(self, chunk: object) -> tuple[str, ...]:
        """Return the codec names of pieces and a note about sharding; Orbax writes shards with one piece."""
        inner = (name for step in self.steps for name in step.names(self.piece))
        return (*inner, "sharded" if self.piece == chunk else f"in shards of {number_list(chunk)}")

    def shard(self, chunk: Shape, order: Shape) -> ShardIndex | None:
        """Return the index format of shards; None if it is not supported here.

        Args:
            chunk: Shape of a chunk, with axes in memory order.
            order: The memory order of axes.
        """
        fits = len(self.piece) == len(chunk) and all(
            n > 0 and length % n == 0 for length, n in zip(chunk, self.piece, strict=True)
        )
        if not fits or self.index != (LITTLE_ENDIAN, crc32c.Crc32c()):
            return None
        return ShardIndex(grid_shape(chunk, tuple(self.piece)), order, self.at_start)


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard's pieces, which is read with each piece.

    Attributes:
        grid: Number of pieces along each axis, in memory order.
        order: The memory order of axes.
        at_start: Whether the index is before the pieces rather than after them.
        fill: Element of omitted pieces; None if omission is an error.
    """

    grid: Shape
    order: Shape
    at_start: bool
    fill: bytes | None = None

    @cached_property
    def pieces(self) -> int:
        """The number of pieces."""
        return prod(self.grid)

    @property
    def index_bytes(self) -> int:
        """Size of the index in bytes: offset and length of each piece, and a CRC-32C."""
        return _ENTRY_BYTES * self.pieces + crc32c.NBYTES

    def number(self, location: Sequence[int]) -> int:
        """Return the sequential number of a piece from its grid index in the chunk."""
        number = 0
        for axis, length in zip(self.order, self.grid, strict=True):
            number = number * length + location[axis]
        return number

    def locate(self, stored: ByteRange, number: int) -> ByteRange | None:
        """Return the location of a piece; None if it was omitted.

        Raises:
            FormatError: The index is invalid.
        """
        return self._location(stored, self._index(stored), number)

    def is_whole(self, stored: ByteRange, coding: Coding) -> bool:
        """Return whether a shard has a valid index, contains all pieces in it, and has complete pieces.

        Raises:
            FormatError, StorageError: The file cannot be read.
        """
        try:
            index = self._index(stored)
            locations = [self._location(stored, index, number) for number in range(self.pieces)]
        except FormatError:
            return False
        return all(location is None or coding.is_whole(location) for location in locations)

    def _index(self, stored: ByteRange) -> bytes:
        nbytes = self.index_bytes
        if stored.nbytes < nbytes:
            raise FormatError(
                "a shard is shorter than its index", got=stored.nbytes, expected=f"{nbytes} bytes"
            )
        start = 0 if self.at_start else stored.nbytes - nbytes
        return crc32c.strip_checksum(stored.part(start, nbytes), "a shard's index")

    def _location(self, stored: ByteRange, index: bytes, number: int) -> ByteRange | None:
        entry = index[_ENTRY_BYTES * number : _ENTRY_BYTES * (number + 1)]
        location, length = int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:], "little")
        if location == length == _MISSING:
            return None
        if location + length > stored.nbytes:
            got = f"bytes {location} to {location + length}"
            raise FormatError(
                "a piece runs past the end of its shard", got=got, expected=f"at most {stored.nbytes}"
            )
        return ByteRange(stored.source, stored.offset + location, length)
