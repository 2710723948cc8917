"""Shards: chunks of several pieces, each coded by itself, with an index of where they are."""

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

# Offset and length of a piece that was left out.
_MISSING = (1 << 64) - 1
_ENTRY_BYTES = 16


@dataclass(frozen=True)
class ShardingCodec:
    """The codec `sharding_indexed` of zarr v3.

    Attributes:
        piece: shape of a piece, axes in the order of memory; as the metadata has it, which may be anything.
        codecs: of pieces, as the metadata lists them.
        steps: what these are.
        index: the codecs of the index.
        at_start: whether the index is before the pieces; else behind them.
    """

    piece: Any
    codecs: Sequence[CodecSpec]
    steps: tuple[CodecStep, ...]
    index: tuple[CodecStep, ...]
    at_start: bool

    def names(self, chunk: object) -> tuple[str, ...]:
        """The codecs of pieces in words, and that there are several in a shard: Orbax makes shards of one."""
        inner = (name for step in self.steps for name in step.names(self.piece))
        return (*inner, "sharded" if self.piece == chunk else f"in shards of {number_list(chunk)}")

    def shard(self, chunk: Shape, order: Shape) -> ShardIndex | None:
        """How chunks are shards; None for a kind that is not read here.

        Args:
            chunk: shape of a chunk, axes in the order of memory.
            order: that order.
        """
        fits = len(self.piece) == len(chunk) and all(
            n > 0 and length % n == 0 for length, n in zip(chunk, self.piece, strict=True)
        )
        if not fits or self.index != (LITTLE_ENDIAN, crc32c.Crc32c()):
            return None
        return ShardIndex(grid_shape(chunk, tuple(self.piece)), order, self.at_start)


@dataclass(frozen=True)
class ShardIndex:
    """Where the pieces of a shard are: its index, read when a piece is.

    Attributes:
        grid: pieces along each axis, in the order of memory.
        order: that order.
        at_start: whether the index is before the pieces; else behind them.
        fill: element of pieces that were left out; None if that is an error.
    """

    grid: Shape
    order: Shape
    at_start: bool
    fill: bytes | None = None

    @cached_property
    def pieces(self) -> int:
        """How many there are."""
        return prod(self.grid)

    @property
    def index_bytes(self) -> int:
        """Offset and length of each piece, and a CRC-32C."""
        return _ENTRY_BYTES * self.pieces + crc32c.NBYTES

    def number(self, location: Sequence[int]) -> int:
        """The number of a piece by its place in the chunk."""
        number = 0
        for axis, length in zip(self.order, self.grid, strict=True):
            number = number * length + location[axis]
        return number

    def locate(self, stored: ByteRange, number: int) -> ByteRange | None:
        """Where a piece is, None if it was left out.

        Raises:
            FormatError: the index is not one.
        """
        return self._location(stored, self._index(stored), number)

    def is_whole(self, stored: ByteRange, coding: Coding) -> bool:
        """Whether a shard has a sound index, room for all pieces that this names, and whole ones.

        Raises:
            FormatError, StorageError: the file cannot be read.
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
        return crc32c.without_checksum(stored.part(start, nbytes), "a shard's index")

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
