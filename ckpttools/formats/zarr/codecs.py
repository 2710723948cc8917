"""How the bytes of zarr chunks become elements: plainly, by zstd, or by whatever tensorstore knows.

Measured with Orbax's default (`sharding_indexed` of one inner chunk, bytes, zstd level 3; 1.07 GB of bfloat16
weights in chunks of 128 MiB, one thread, files cached; resident bytes beside the 1.07 GB result):

    tensorstore, the whole array      0.57 GB/s   +1177 MiB
    tensorstore, chunk by chunk       0.51 GB/s    +409 MiB
    tensorstore, chunk in memory://   0.45 GB/s    +810 MiB
    zstandard, decompress()           0.72 GB/s    +356 MiB
    zstandard, stream_reader          1.57 GB/s      +4 MiB
    this package, as a whole          1.31 GB/s      +2 MiB
    this package, 32 rows at a time   1.24 GB/s      +7 MiB

So zstd is streamed into the buffer that wants it, without ever being whole in memory, encoded or decoded;
and the other codecs, which are rare, go through tensorstore with the chunk in `memory://`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

from ckpttools.array.lazy import ByteSource
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, grid_index, grid_shape
from ckpttools.formats.zarr.chain import Chain
from ckpttools.formats.zarr.chunk_bounds import refuse_more

# Encoded bytes fetched at once: 128 KiB to 4 MiB decode equally fast. One buffer for all fetches of a stream:
# with a new `bytes` for each it took 1.4 times as long.
_READ_BYTES = 1 << 18
# Largest window of zstd's levels up to 19; a decoder keeps that much of what it has decoded.
_WINDOW_BYTES = 8 << 20
# Tables and one block of output.
_DECODER_BYTES = 512 << 10
# A chunk that tensorstore decodes is in memory as bytes, in its store, decoded, and copied to us.
_TENSORSTORE_COPIES = 4


class Stream(Protocol):
    """Decoded bytes, front to back."""

    def readinto(self, out: memoryview) -> int:
        """Fills some of `out`; 0 only at the end."""


Opener = Callable[[ByteSource, int, int, Shape], Stream]
"""(source, offset, nbytes, extent) -> the stream of what these bytes decode to.

`extent` is the shape of the piece's part that is inside the array: what lies outside may have been left out.
"""


@dataclass(frozen=True)
class Coding:
    """How a piece, the least that is coded by itself, lies in its bytes.

    Attributes:
        shape: of the piece: a chunk, or an inner chunk of a shard.
        order: axes of the piece from the slowest to the fastest in memory.
        name: tells it from other codings.
        opener: makes the stream of its elements; None where the bytes are the elements.
        memory: bytes that an open stream takes at most.
    """

    shape: Shape
    order: Shape
    name: str
    opener: Opener | None
    memory: int

    @property
    def stored_shape(self) -> Shape:
        """Shape of the piece with its axes in the order of memory."""
        return tuple(self.shape[axis] for axis in self.order)


class FileRange:
    """A range of a file as a stream; also what zstandard reads from."""

    def __init__(self, source: ByteSource, offset: int, nbytes: int) -> None:
        self._source = source
        self._position, self._end = offset, offset + nbytes
        self._buffer = memoryview(b"")

    def readinto(self, out: memoryview) -> int:
        count = min(len(out), self._end - self._position)
        if count:
            self._source.read_into(self._position, out[:count])
        self._position += count
        return count

    def read(self, size: int) -> memoryview:
        """Up to `size` bytes, valid until the next call."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(min(size, self._end - self._position)))
        return self._buffer[: self.readinto(self._buffer[:size])]


def fetched(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """A range of a file."""
    out = bytearray(nbytes)
    source.read_into(offset, out)
    return bytes(out)


class Held:
    """Bytes in memory as a stream."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def readinto(self, out: memoryview) -> int:
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class Repeated:
    """One element over and over: a piece that was left out because it holds nothing else."""

    def __init__(self, element: bytes, nbytes: int) -> None:
        self._element, self._left = element, nbytes

    def readinto(self, out: memoryview) -> int:
        """As `Stream.readinto`; only ever asked for whole elements."""
        count = min(len(out), self._left)
        out[:count] = self._element * (count // len(self._element))
        self._left -= count
        return count


def plain(shape: Shape, order: Sequence[int]) -> Coding:
    """Elements as they are."""
    return Coding(shape, tuple(order), f"plain{list(order)}", None, 0)


def zstd(shape: Shape, order: Sequence[int], dtype: DType) -> Coding:
    """Elements in one or more zstd frames."""
    nbytes = prod(shape) * dtype.itemsize
    memory = min(nbytes, _WINDOW_BYTES) + _READ_BYTES + _DECODER_BYTES
    return Coding(shape, tuple(order), f"zstd{list(order)}", _open_zstd, memory)


def _open_zstd(source: ByteSource, offset: int, nbytes: int, extent: Shape) -> Stream:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(
        FileRange(source, offset, nbytes),  # type: ignore[arg-type]
        read_size=_READ_BYTES,
        read_across_frames=True,
    )
    return _Zstd(reader, zstandard.ZstdError)


class _Zstd:
    def __init__(self, reader: Any, fault: type[Exception]) -> None:
        self._reader, self._fault = reader, fault

    def readinto(self, out: memoryview) -> int:
        try:
            return int(self._reader.readinto(out))
        except self._fault as error:
            raise FormatError("the zstd data is damaged", got=error) from error


def by_tensorstore(shape: Shape, dtype: DType, driver: str, document: Mapping[str, Any]) -> Coding:
    """Whatever else tensorstore can decode.

    Args:
        shape: of one chunk.
        dtype: of its elements.
        driver: "zarr" or "zarr3".
        document: metadata of an array of that driver whose chunks are coded so.
    """
    nbytes = prod(shape) * dtype.itemsize
    if driver == "zarr":
        single = {**document, "shape": shape, "chunks": shape, "dimension_separator": "."}
        document_key, key = ".zarray", ".".join(["0"] * len(shape)) or "0"
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        encoding = {"name": "default", "configuration": {"separator": "/"}}
        single = {**document, "shape": shape, "chunk_grid": grid, "chunk_key_encoding": encoding}
        single.pop("dimension_names", None)
        document_key, key = "zarr.json", "/".join(["c", *["0"] * len(shape)])
    text = json.dumps(single, sort_keys=True)

    codecs = _of_bytes(document)

    def opener(source: ByteSource, offset: int, length: int, extent: Shape) -> Stream:
        data = fetched(source, offset, length)
        refuse_more(codecs, data, nbytes)
        values = {document_key: text.encode(), key: data}
        return Held(_decoded_by_tensorstore(driver, values, extent))

    order = tuple(range(len(shape)))
    return Coding(shape, order, text, opener, _TENSORSTORE_COPIES * nbytes)


def _of_bytes(document: Mapping[str, Any]) -> list[str]:
    """Names of the codecs from bytes to bytes, in the order in which they are applied."""
    if "codecs" not in document:
        compressor = document.get("compressor")
        return [str(compressor["id"])] if compressor else []
    names = [str(codec["name"]) for codec in document["codecs"]]
    return names[names.index("bytes") + 1 :] if "bytes" in names else []


def _decoded_by_tensorstore(driver: str, values: dict[str, bytes], extent: Shape) -> memoryview:
    """The elements of the one chunk of an array given as the values of its keys; zeros beyond `extent`."""
    import numpy as np
    import tensorstore as ts

    # A store of its own for every chunk: nothing stays behind. One copier: the caller has its own threads.
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    try:
        store = ts.KvStore.open({"driver": "memory"}, context=context).result()
        while values:
            store.write(*values.popitem()).result()
        spec = {"driver": driver, "kvstore": {"driver": "memory"}, "fill_missing_data_reads": False}
        array = ts.open(spec, context=context, open=True, read=True).result()
        part = array[tuple(map(slice, extent))].read().result()
    except (ValueError, NotImplementedError, OSError) as error:
        reason = str(error).partition(" [")[0]
        raise FormatError("tensorstore cannot decode the chunk", got=reason) from error
    if part.shape != array.shape:
        part = np.pad(part, [(0, n - m) for n, m in zip(array.shape, part.shape, strict=True)])
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """How the chunks of an array are named below it.

    Attributes:
        prefix: what comes before the grid index: "c" in zarr v3, nothing in v2.
        separator: what stands between the numbers.
    """

    prefix: str
    separator: str

    def key(self, index: Shape) -> str:
        """The key of the chunk at a grid index; `0` for the only chunk of a 0-d array without a prefix."""
        parts = [self.prefix] if self.prefix else []
        return self.separator.join([*parts, *map(str, index)]) or "0"

    def index(self, key: str, rank: int) -> Shape | None:
        """The grid index that a key names; None if it names none."""
        if rank == 0:
            return () if key == self.key(()) else None
        parts = key.split(self.separator)
        if self.prefix and parts.pop(0) != self.prefix:
            return None
        # More digits than any grid has cells are no index, nor is a number that no writer spells so.
        if len(parts) != rank or not all(
            part.isascii() and part.isdigit() and len(part) < 20 for part in parts
        ):
            return None
        if any(p[0] == "0" and p != "0" for p in parts):
            return None
        return tuple(map(int, parts))


@dataclass(frozen=True)
class ZarrArray:
    """What the metadata of one array says, of either version of zarr.

    Attributes:
        shape: of the array.
        dtype: of its elements.
        chunk: shape of the grid's cells.
        keys: how chunks are named.
        coding: how the pieces of chunks are coded; a piece is a chunk unless chunks are shards.
        shard_index_at_start: None where chunks are no shards.
        fill: the element that chunks are filled with that were left out.
        chain: its codecs apart from its axes, as zarr v3 lists them; None where it has no such.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    keys: ChunkKeys
    coding: Coding
    shard_index_at_start: bool | None
    fill: bytes
    chain: Chain | None = None

    @cached_property
    def grid(self) -> Shape:
        """Chunks along each axis."""
        return grid_shape(self.shape, self.chunk)

    @cached_property
    def pieces(self) -> Shape:
        """Pieces of a chunk along each axis."""
        return grid_shape(self.chunk, self.coding.shape)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of a piece when it is decoded."""
        return prod(self.coding.shape) * self.dtype.itemsize

    @property
    def are_shards(self) -> bool:
        return self.shard_index_at_start is not None

    @cached_property
    def chunk_bytes(self) -> int | None:
        """Bytes of each chunk, where that follows from its shape: it is not coded."""
        return None if self.coding.opener is not None or self.are_shards else self.piece_bytes

    def has_room(self, index: Shape) -> bool:
        """Whether an index is one of the grid."""
        return all(i < n for i, n in zip(index, self.grid, strict=True))

    def first_missing(self, present: int, is_there: Callable[[Shape], bool]) -> Shape:
        """The first chunk in C order that is not there, of which `present` are; one must be missing.

        Counted through by hand: a damaged shape may be of more chunks than any iterator of them holds.
        """
        positions = (grid_index(self.grid, number) for number in range(present + 1))
        return next(index for index in positions if not is_there(index))


def checked_keys(prefix: str, separator: object, place: str) -> ChunkKeys:
    """The names of chunks with a separator that a document names.

    Raises:
        FormatError: zarr has no such separator.
    """
    if separator not in ("/", "."):
        wanted = '"/" or "."'
        raise FormatError("an unknown separator of chunk keys", place=place, got=separator, wanted=wanted)
    return ChunkKeys(prefix, str(separator))


def checked_grid(shape: object, chunk: object, place: str) -> tuple[Shape, Shape]:
    """Shape and chunk shape, if they are such.

    Raises:
        FormatError: they are not, or not of one rank.
    """
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise FormatError("shape and chunk shape do not match", place=place, got=f"{shape} and {chunk}")
    if not all(type(n) is int and n >= 0 for n in shape) or not all(type(n) is int and n > 0 for n in chunk):
        raise FormatError("a shape that is none", place=place, got=f"{shape} in chunks of {chunk}")
    return tuple(shape), tuple(chunk)


def fill_element(value: Any, dtype: DType, place: str) -> bytes:
    """The bytes of a fill value as zarr spells it; null is zero.

    Raises:
        FormatError: it is no value of this dtype.
    """
    if value is None or str(value) in ("0", "0.0", "False", "[0.0, 0.0]", ""):
        return bytes(dtype.itemsize)
    import numpy as np

    try:
        if isinstance(value, str) and value.startswith("0x"):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        number = complex(*map(float, value)) if isinstance(value, list) else value
        number = float(number) if isinstance(number, str) else number
        return np.array(number).astype(dtype.numpy).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError("a fill value that is none", place=place, got=repr(value)) from error
