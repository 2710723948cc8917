"""Encoded pieces of arrays as lazy arrays: decoded and cached, or streamed if they are large.

The cache belongs to a worker's `Scratch` and has its lifetime. It holds at most `KEPT_BYTES` of decoded
pieces, or `_STREAMS` open streams. `scratch_bytes` includes both, so the plan counts them.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckpttools.array import read_blocks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Decoded, Stored, transpose_axes
from ckpttools.codecs.coding import Coding
from ckpttools.codecs.sharding import ShardIndex
from ckpttools.codecs.streams import ByteRange, ConstantChunk, ExactReader, Stream
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Region, Shape, contiguous_runs, split_evenly
from ckpttools.stores.memory import Bytes

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Maximum bytes of decoded pieces that a worker caches: enough for the largest task, so that a task whose
# blocks cross many pieces (such as columns of a matrix sharded by columns) decodes each piece once.
KEPT_BYTES = 64 << 20
# Larger pieces are not cached; a read continues where the previous one stopped.
_STREAMS = 2


@dataclass(frozen=True)
class EncodedChunk(ByteRange):
    """The bytes of an encoded piece, or of the shard that contains it.

    Implements `Encoded` of `ckpttools.array.stored`.

    Attributes:
        coding: The codecs.
        name: The array and the chunk, for messages.
        extent: Shape of the part of the piece that is inside the array.
        shard: The shard's index, and the index of the piece in it; None for an unsharded piece.
        siblings_nbytes: Decoded size of the full array, in bytes.
    """

    coding: Coding
    name: str
    extent: Shape
    shard: tuple[ShardIndex, int] | None = None
    siblings_nbytes: int = 0

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Key that two pieces share only if they contain the same elements."""
        return (self.name, self.source.path, self.source.version, str(self.offset), self.code)

    @property
    def code(self) -> str:
        number = f"piece {self.shard[1]}, " if self.shard else ""
        return number + self.coding.name

    @cached_property
    def _shape(self) -> Shape:
        return self.coding.stored_shape

    @property
    def decode_bytes(self) -> int:
        return self.coding.nbytes

    @property
    def _is_cacheable(self) -> bool:
        return self.decode_bytes <= KEPT_BYTES

    @property
    def scratch_bytes(self) -> int:
        block = read_blocks.scratch(self.decode_bytes)
        if self._is_cacheable:
            cached_bytes = min(max(self.siblings_nbytes, self.decode_bytes), KEPT_BYTES)
            return block + cached_bytes + self.coding.memory
        return block + _STREAMS * self.coding.memory

    def fetched(self, region: Region) -> int:
        """Return how many bytes reading the region fetches: all of them, or those up to the region's end."""
        if self._is_cacheable or not region.size:
            return self.nbytes
        last = next(contiguous_runs(self._shape, Region(tuple(b - 1 for b in region.stop), region.stop)))
        return -(-self.nbytes * (last[0] + 1) // prod(self._shape))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        try:
            self._read_into(region, out, scratch)
        except FormatError as error:
            if error.location is not None:
                raise
            raise error.at(self.name) from error

    def _read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        if region.shape == self._shape and out.flags.c_contiguous:
            self._read_whole(out)
        elif self._is_cacheable:
            out[...] = _worker(scratch).kept(self)[region.slices]
        else:
            self._read_forward(region, out, scratch)

    def _read_whole(self, out: np.ndarray) -> None:
        """Decode the full piece into `out`, checking that no bytes are left over."""
        import numpy as np

        stream = self.open()
        stream.fill(out.reshape(-1).view(np.uint8).data)
        stream.finish()

    def decoded(self) -> np.ndarray:
        """Decode all elements into a new array."""
        import numpy as np

        result = np.empty(self._shape, self.coding.dtype.carrier)
        self._read_whole(result)
        return result

    def _read_forward(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read a region of a large piece as contiguous blocks, front to back."""
        import numpy as np

        itemsize = self.coding.dtype.itemsize
        for block in split_evenly(_rows(self._shape, region), read_blocks.elements(itemsize)):
            expected = block.intersect(region)
            if expected is None:
                continue
            position = next(contiguous_runs(self._shape, block))[0] * itemsize
            with scratch.take(block.shape, self.coding.dtype.carrier) as buffer:
                flat = buffer.reshape(-1).view(np.uint8).data
                stream = _worker(scratch).stream(self, position, flat)
                stream.fill(flat)
                if stream.position == self.decode_bytes:
                    stream.finish()
                out[expected.relative_to(region).slices] = buffer[expected.relative_to(block).slices]

    def open(self) -> ExactReader:
        """Return a stream of the elements from the start."""
        return ExactReader(self._open(), self.decode_bytes)

    def _open(self) -> Stream:
        if self.shard is None:
            return self.coding.decoded(self, self.extent)
        shard, number = self.shard
        result = shard.locate(self, number)
        if result is not None:
            return self.coding.decoded(result, self.extent)
        if shard.fill is None:
            raise FormatError("a piece of a shard is missing", got="no entry in the shard's index")
        return ConstantChunk(shard.fill, self.decode_bytes)


def _rows(shape: Shape, region: Region) -> Region:
    """Return the smallest box around the region that is contiguous in a C-ordered array of `shape`."""
    for axis in range(region.rank):
        if region.shape[axis] > 1:
            tail = axis + 1
            return Region(
                region.start[:tail] + (0,) * (region.rank - tail), region.stop[:tail] + shape[tail:]
            )
    return region


class _Worker:
    """The pieces and streams that a worker caches, oldest first."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[str, ...], np.ndarray] = OrderedDict()
        self._streams: OrderedDict[tuple[str, ...], ExactReader] = OrderedDict()

    def kept(self, piece: EncodedChunk) -> np.ndarray:
        """Return the elements of a small piece from the cache, decoding them if needed."""
        result = self._pieces.pop(piece.key, None)
        if result is None:
            self._make_room(piece.decode_bytes)
            result = piece.decoded()
        self._pieces[piece.key] = result
        return result

    def _make_room(self, nbytes: int) -> None:
        self._streams.clear()
        cached_bytes = sum(array.nbytes for array in self._pieces.values())
        while self._pieces and cached_bytes + nbytes > KEPT_BYTES:
            cached_bytes -= self._pieces.popitem(last=False)[1].nbytes

    def stream(self, piece: EncodedChunk, position: int, discard: memoryview) -> ExactReader:
        """Return a stream of a large piece at a position, reusing the last stream if it is not past it."""
        result = self._streams.pop(piece.key, None)
        if result is None or result.position > position:
            self._pieces.clear()
            result = None
            while len(self._streams) >= _STREAMS:
                self._streams.popitem(last=False)
            result = piece.open()
        result.skip(position, discard)
        self._streams[piece.key] = result
        return result


_WORKERS: WeakKeyDictionary[Scratch, _Worker] = WeakKeyDictionary()


def _worker(scratch: Scratch) -> _Worker:
    """Return the cache of the worker that has this scratch; a thread requests only its own."""
    worker = _WORKERS.get(scratch)
    if worker is None:
        worker = _WORKERS[scratch] = _Worker()
    return worker


def chunk_array(piece: EncodedChunk, shape: Shape) -> LazyArray:
    """Return a piece as an array of `shape`: plain pieces become stored bytes, and axes are reordered.

    An unsharded plain piece must have exactly as many bytes as its elements need.
    """
    coding, order = piece.coding, piece.coding.order
    stored = coding.stored_shape
    array: LazyArray
    if coding.is_plain and piece.shard is None:
        array = Stored(stored, coding.dtype, piece.source, piece.offset, whole_bytes=True)
    else:
        array = Decoded(stored, coding.dtype, piece)
    if order == tuple(range(len(order))):
        return array
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return transpose_axes(array, inverse)


def scratch_of(coding: Coding, shard: ShardIndex | None, array_nbytes: int) -> int:
    """Return the scratch memory for reading any piece of an array, in bytes."""
    chunk_key = (shard, 0) if shard else None
    piece = EncodedChunk(Bytes("", b""), 0, 0, coding, "", coding.shape, chunk_key, array_nbytes)
    return chunk_array(piece, coding.shape).scratch_bytes
