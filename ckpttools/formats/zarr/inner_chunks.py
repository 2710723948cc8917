"""Encoded pieces of arrays as lazy arrays: decoded whole and kept a while, or streamed where they are large.

What a worker keeps is tied to its `Scratch` and goes with it: at most `KEPT_BYTES` of decoded pieces, or
`_STREAMS` open streams. Both are part of `scratch_bytes`, so the plan counts them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckpttools.array import slabs
from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Decoded, Stored, relayout
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Region, Shape, contiguous_runs, split_to
from ckpttools.formats.zarr.codecs import Coding, FileRange, Repeated, Stream, ZarrArray, fetched
from ckpttools.stores.memory import Bytes

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Decoded pieces that a worker keeps: as much as the largest task needs, so that one whose slabs run across
# many pieces (columns of a matrix that was sharded by columns) decodes each of them once.
KEPT_BYTES = 64 << 20
# Larger pieces are not kept but read on where the last read stopped.
_STREAMS = 2
# What taking scratch may round up.
_MISSING = (1 << 64) - 1


@dataclass(frozen=True)
class Shard:
    """Where the pieces of a shard are: its index, read when a piece is.

    Attributes:
        pieces: how many there are.
        at_start: whether the index is before the pieces; else behind them.
        fill: element of pieces that were left out; None if that is an error.
    """

    pieces: int
    at_start: bool
    fill: bytes | None

    @property
    def index_bytes(self) -> int:
        """Offset and length of each piece, and a CRC-32C."""
        return 16 * self.pieces + 4

    def locate(self, source: ByteSource, offset: int, nbytes: int, number: int) -> tuple[int, int] | None:
        """Offset and length of a piece in the file, None if it was left out.

        Raises:
            FormatError: the index is not one.
        """
        return self._place(self._index(source, offset, nbytes), number, offset, nbytes)

    def places(self, source: ByteSource, offset: int, nbytes: int) -> list[tuple[int, int] | None]:
        """The same for all pieces; errors as `locate`."""
        index = self._index(source, offset, nbytes)
        return [self._place(index, number, offset, nbytes) for number in range(self.pieces)]

    def _index(self, source: ByteSource, offset: int, nbytes: int) -> bytes:
        if nbytes < self.index_bytes:
            raise FormatError(
                "a shard is shorter than its index", got=nbytes, wanted=f"{self.index_bytes} bytes"
            )
        start = offset if self.at_start else offset + nbytes - self.index_bytes
        index = fetched(source, start, self.index_bytes)
        _check_crc(index)
        return index

    def _place(self, index: bytes, number: int, offset: int, nbytes: int) -> tuple[int, int] | None:
        place = int.from_bytes(index[16 * number : 16 * number + 8], "little")
        length = int.from_bytes(index[16 * number + 8 : 16 * number + 16], "little")
        if place == length == _MISSING:
            return None
        if place + length > nbytes:
            got = f"bytes {place} to {place + length}"
            raise FormatError("a piece runs past the end of its shard", got=got, wanted=f"at most {nbytes}")
        return offset + place, length


def shard_of(array: ZarrArray, fill: bytes | None) -> Shard | None:
    """How the chunks of an array are shards, None if they are none; `fill` as in `Shard`."""
    at_start = array.shard_index_at_start
    return None if at_start is None else Shard(prod(array.pieces), at_start, fill)


def _check_crc(index: bytes) -> None:
    import google_crc32c

    stored, actual = int.from_bytes(index[-4:], "little"), google_crc32c.value(index[:-4])
    if stored != actual:
        raise FormatError(
            "the CRC-32C of a shard's index does not match", got=f"{actual:#010x}", wanted=f"{stored:#010x}"
        )


@dataclass(frozen=True)
class Piece:
    """The bytes of one piece and how they become elements; an `Encoded` of `ckpttools.array.nodes`.

    Attributes:
        source: the file.
        offset: where the bytes of the piece, or of the shard that has it, start.
        nbytes: and how many there are.
        dtype: of the elements.
        coding: how they are coded.
        name: array and chunk, for messages.
        extent: shape of the part of the piece that is inside the array.
        shard: the shard's index, and the number of the piece in it; None where the piece is alone.
        siblings_nbytes: decoded bytes of the whole array.
    """

    source: ByteSource
    offset: int
    nbytes: int
    dtype: DType
    coding: Coding
    name: str
    extent: Shape
    shard: tuple[Shard, int] | None = None
    siblings_nbytes: int = 0

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What two pieces have in common only if they hold the same elements."""
        return (self.name, self.source.path, self.source.version, str(self.offset), self.code)

    @property
    def code(self) -> str:
        number = f"piece {self.shard[1]}, " if self.shard else ""
        return number + self.coding.name

    @cached_property
    def _shape(self) -> Shape:
        return self.coding.stored_shape

    @cached_property
    def decoded_bytes(self) -> int:
        return prod(self._shape) * self.dtype.itemsize

    @property
    def _is_kept(self) -> bool:
        return self.decoded_bytes <= KEPT_BYTES

    @property
    def scratch_bytes(self) -> int:
        slab = slabs.scratch(self.decoded_bytes)
        if self._is_kept:
            kept = min(max(self.siblings_nbytes, self.decoded_bytes), KEPT_BYTES)
            return slab + kept + self.coding.memory
        return slab + _STREAMS * self.coding.memory

    def fetched(self, region: Region) -> int:
        """All bytes, or those up to the region's end."""
        if self._is_kept or not region.size:
            return self.nbytes
        last = next(contiguous_runs(self._shape, Region(tuple(b - 1 for b in region.stop), region.stop)))
        return -(-self.nbytes * (last[0] + 1) // prod(self._shape))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        try:
            self._read_into(region, out, scratch)
        except FormatError as error:
            if error.place is not None:
                raise
            raise error.at(self.name) from error

    def _read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        if region.shape == self._shape and out.flags.c_contiguous:
            self._read_whole(out)
        elif self._is_kept:
            out[...] = _worker(scratch).kept(self)[region.slices]
        else:
            self._read_on(region, out, scratch)

    def _read_whole(self, out: np.ndarray) -> None:
        """Decodes everything into `out`, and checks that there is no more."""
        import numpy as np

        stream = self.open()
        stream.fill(out.reshape(-1).view(np.uint8).data)
        stream.finish()

    def decoded(self) -> np.ndarray:
        """All elements, in memory of their own."""
        import numpy as np

        made = np.empty(self._shape, self.dtype.carrier)
        self._read_whole(made)
        return made

    def _read_on(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Reads a part of a large piece: slabs that are contiguous in it, front to back."""
        import numpy as np

        itemsize = self.dtype.itemsize
        for slab in split_to(_rows(self._shape, region), slabs.elements(itemsize)):
            wanted = slab.intersect(region)
            if wanted is None:
                continue
            position = next(contiguous_runs(self._shape, slab))[0] * itemsize
            with scratch.take(slab.shape, self.dtype.carrier) as buffer:
                flat = buffer.reshape(-1).view(np.uint8).data
                stream = _worker(scratch).stream(self, position, flat)
                stream.fill(flat)
                if stream.position == self.decoded_bytes:
                    stream.finish()
                out[wanted.relative_to(region).slices] = buffer[wanted.relative_to(slab).slices]

    def open(self) -> Reading:
        """A stream of the elements from the first one on."""
        return Reading(self._opened(), self.decoded_bytes)

    def _opened(self) -> Stream:
        start, length = self.offset, self.nbytes
        if self.shard is not None:
            shard, number = self.shard
            found = shard.locate(self.source, start, length, number)
            if found is None:
                return self._left_out(shard)
            start, length = found
        if self.coding.opener is not None:
            return self.coding.opener(self.source, start, length, self.extent)
        return FileRange(self.source, start, length)

    def _left_out(self, shard: Shard) -> Stream:
        if shard.fill is None:
            raise FormatError("a piece of a shard is missing", got="no entry in the shard's index")
        return Repeated(shard.fill, self.decoded_bytes)


def _rows(shape: Shape, region: Region) -> Region:
    """The smallest box around the region that is one run of a C-ordered array of `shape`."""
    for axis in range(region.rank):
        if region.shape[axis] > 1:
            tail = axis + 1
            return Region(
                region.start[:tail] + (0,) * (region.rank - tail), region.stop[:tail] + shape[tail:]
            )
    return region


class Reading:
    """A stream of decoded bytes, of which a position is known."""

    def __init__(self, stream: Stream, nbytes: int) -> None:
        self._stream, self._nbytes = stream, nbytes
        self.position = 0

    def fill(self, out: memoryview) -> None:
        """Fills all of `out`.

        Raises:
            FormatError: the data ends before.
        """
        while out:
            count = self._stream.readinto(out)
            if count == 0:
                got = f"{self.position} bytes"
                raise FormatError(
                    "a chunk decodes to less than its shape wants", got=got, wanted=f"{self._nbytes} bytes"
                )
            self.position += count
            out = out[count:]

    def skip(self, position: int, discard: memoryview) -> None:
        """Goes on to a position, through memory that may be overwritten."""
        while self.position < position:
            self.fill(discard[: position - self.position])

    def finish(self) -> None:
        """Reads to the end, which lets the decoder check what it checks there.

        Raises:
            FormatError: there is more.
        """
        if self._stream.readinto(memoryview(bytearray(1))):
            raise FormatError("a chunk decodes to more than its shape wants", wanted=f"{self._nbytes} bytes")


class _Worker:
    """What one worker keeps between reads, oldest first."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[str, ...], np.ndarray] = OrderedDict()
        self._streams: OrderedDict[tuple[str, ...], Reading] = OrderedDict()

    def kept(self, piece: Piece) -> np.ndarray:
        """The elements of a small piece."""
        found = self._pieces.pop(piece.key, None)
        if found is None:
            self._make_room(piece.decoded_bytes)
            found = piece.decoded()
        self._pieces[piece.key] = found
        return found

    def _make_room(self, nbytes: int) -> None:
        self._streams.clear()
        held = sum(array.nbytes for array in self._pieces.values())
        while self._pieces and held + nbytes > KEPT_BYTES:
            held -= self._pieces.popitem(last=False)[1].nbytes

    def stream(self, piece: Piece, position: int, discard: memoryview) -> Reading:
        """A stream of a large piece that is at a position: the last one if it can go on to there."""
        found = self._streams.pop(piece.key, None)
        if found is None or found.position > position:
            self._pieces.clear()
            found = None
            while len(self._streams) >= _STREAMS:
                self._streams.popitem(last=False)
            found = piece.open()
        found.skip(position, discard)
        self._streams[piece.key] = found
        return found


_WORKERS: WeakKeyDictionary[Scratch, _Worker] = WeakKeyDictionary()


def _worker(scratch: Scratch) -> _Worker:
    """What the worker keeps that this scratch belongs to. Each thread asks for its own only."""
    worker = _WORKERS.get(scratch)
    if worker is None:
        worker = _WORKERS[scratch] = _Worker()
    return worker


def piece_array(piece: Piece, shape: Shape) -> LazyArray:
    """A piece as an array of `shape`: stored bytes where they are plain, and axes put in order.

    A plain piece alone in its bytes must have as many as its elements take.
    """
    stored = piece.coding.stored_shape
    array: LazyArray
    if piece.coding.opener is None and piece.shard is None:
        array = Stored(stored, piece.dtype, piece.source, piece.offset, whole_bytes=True)
    else:
        array = Decoded(stored, piece.dtype, piece)
    order = piece.coding.order
    if order == tuple(range(len(order))):
        return array
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return relayout(array, [(length,) for length in stored], inverse, [1] * len(shape))


def scratch_of(coding: Coding, dtype: DType, shard: Shard | None, array_nbytes: int) -> int:
    """Scratch that reading any piece of an array takes."""
    alone = (shard, 0) if shard else None
    piece = Piece(Bytes("", b""), 0, 0, dtype, coding, "", coding.shape, alone, array_nbytes)
    return piece_array(piece, coding.shape).scratch_bytes
