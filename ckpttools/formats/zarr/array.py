"""The metadata of a zarr array, in either version of zarr, and its chain of codecs.

The bytes of a chunk depend on the order of elements in memory, not on the axes that index them. A chunk
can therefore be referenced as a chunk of another array if its codecs can be expressed for that array's
axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ckpttools.codecs.base import Codec, CodecSpec, configuration_of
from ckpttools.codecs.bytes import LITTLE, LITTLE_ENDIAN, BytesCodec
from ckpttools.codecs.coding import Coding, bytes_codecs, split_order
from ckpttools.codecs.registry import CodecStep, codec_steps, flat_steps
from ckpttools.codecs.sharding import ShardIndex, ShardingCodec
from ckpttools.codecs.transpose import Transpose, transpose_spec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, grid_index, grid_indices, grid_shape
from ckpttools.formats.placement import chunk_key

ZARR2_DOCUMENT, ZARR3_DOCUMENT = ".zarray", "zarr.json"
"""File names of array metadata."""
_FEW_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The naming scheme of an array's chunks.

    Attributes:
        prefix: Text before the grid index: "c" in zarr v3, empty in v2.
        separator: Separator between the indices.
    """

    prefix: str
    separator: str

    def key(self, index: Shape) -> str:
        """Return the key of the chunk at a grid index."""
        return chunk_key(self.prefix, self.separator, index)

    def index(self, key: str, rank: int) -> Shape | None:
        """Parse the grid index from a key; return None if the key is not a chunk's."""
        if rank == 0:
            return () if key == self.key(()) else None
        return _grid_index(self.prefix, self.separator, key, rank)


# The 100,000 arrays of a checkpoint have few distinct chunk keys, so parsing is cached.
@lru_cache(maxsize=1 << 12)
def _grid_index(prefix: str, separator: str, key: str, rank: int) -> Shape | None:
    parts = key.split(separator)
    if prefix and parts.pop(0) != prefix:
        return None
    # An index has a limited number of digits and no leading zeros.
    if len(parts) != rank or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    if any(p[0] == "0" and p != "0" for p in parts):
        return None
    return tuple(map(int, parts))


@dataclass(frozen=True)
class ZarrArray:
    """The metadata of a zarr array.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the elements.
        chunk: Shape of a chunk.
        keys: Naming scheme of the chunks.
        coding: Encoding of the pieces of chunks; a piece is a complete chunk unless chunks are shards.
        shard: Layout of shards; None if chunks are not shards, or are shards that can only be read
            completely.
        fill: Fill value of omitted chunks, as bytes.
        steps: The codecs in order.
        chain: The codecs independent of the axes, as in zarr v3; None if they depend on the axes.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    keys: ChunkKeys
    coding: Coding
    shard: ShardIndex | None
    fill: bytes
    steps: tuple[CodecStep, ...]
    chain: Chain | None = None

    @cached_property
    def grid(self) -> Shape:
        """The number of chunks along each axis."""
        return grid_shape(self.shape, self.chunk)

    @cached_property
    def num_chunks(self) -> int:
        return prod(self.grid)

    @cached_property
    def few_keys(self) -> frozenset[str]:
        """The keys of all chunks if there are few, for fast membership tests."""
        is_small = self.num_chunks <= _FEW_CHUNKS
        return frozenset(map(self.keys.key, grid_indices(self.shape, self.chunk) if is_small else ()))

    @cached_property
    def codecs(self) -> tuple[str, ...]:
        """Description of a piece's encoding; empty for plain C order."""
        return tuple(name for step in self.steps for name in step.names(list(self.chunk)))

    @property
    def is_compressed(self) -> bool:
        """Whether a codec compresses the data."""
        return any(isinstance(step, Codec) and step.compresses for step in flat_steps(self.steps))

    @property
    def is_transposed(self) -> bool:
        """Whether the axes are stored in another order."""
        return any(isinstance(step, Transpose) for step in flat_steps(self.steps))

    @cached_property
    def pieces(self) -> Shape:
        """The number of pieces of a chunk along each axis."""
        return grid_shape(self.chunk, self.coding.shape)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every chunk consists of just its elements in C order."""
        order = self.coding.order
        return self.coding.is_plain and self.shard is None and order == tuple(range(len(order)))

    @cached_property
    def decoded_nbytes(self) -> int:
        """Total size of all decoded pieces, in bytes."""
        return prod(grid_shape(self.shape, self.coding.shape)) * self.coding.nbytes

    @cached_property
    def chunk_bytes(self) -> int | None:
        """Size of each chunk in bytes if its shape determines it, else None."""
        return self.coding.stored_nbytes if self.shard is None else None

    def shard_filled(self, fill: bytes | None) -> ShardIndex | None:
        """Return the layout of shards with `fill` for omitted pieces; None makes them errors."""
        return self.shard and replace(self.shard, fill=fill)

    def has_room(self, index: Shape) -> bool:
        """Return whether an index is within the grid."""
        return all(i < n for i, n in zip(index, self.grid, strict=True))

    def first_missing(self, present: int, is_there: Callable[[Shape], bool]) -> Shape:
        """Return the first missing chunk in C order, given that `present` chunks exist and one is missing.

        Counts indices manually, because a damaged shape may imply more chunks than an iterator supports.
        """
        positions = (grid_index(self.grid, number) for number in range(present + 1))
        return next(index for index in positions if not is_there(index))


def parse_chunk_keys(prefix: str, separator: object, location: str) -> ChunkKeys:
    """Return the naming scheme for a separator, after checking the separator.

    Raises:
        FormatError: zarr does not allow this separator.
    """
    if separator not in ("/", "."):
        expected = '"/" or "."'
        raise FormatError(
            "an unknown separator of chunk keys", location=location, got=separator, expected=expected
        )
    return ChunkKeys(prefix, str(separator))


def parse_grid(shape: object, chunk: object, location: str) -> tuple[Shape, Shape]:
    """Return the shape and the chunk shape, after checking them.

    Raises:
        FormatError: A shape is invalid, or the ranks differ.
    """
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise FormatError("shape and chunk shape do not match", location=location, got=f"{shape} and {chunk}")
    if not all(type(n) is int and n >= 0 for n in shape) or not all(type(n) is int and n > 0 for n in chunk):
        raise FormatError("an invalid shape", location=location, got=f"{shape} in chunks of {chunk}")
    return tuple(shape), tuple(chunk)


def fill_element(value: Any, dtype: DType, location: str) -> bytes:
    """Return the bytes of a fill value in zarr metadata; null means zero.

    Raises:
        FormatError: The value does not fit the dtype.
    """
    if value is None or str(value) in ("0", "0.0", "False", "[0.0, 0.0]", ""):
        return bytes(dtype.itemsize)
    import numpy as np

    try:
        if isinstance(value, str) and value.startswith("0x"):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if isinstance(value, list) and dtype.kind != "complex":
            raise TypeError
        number = complex(*map(float, value)) if isinstance(value, list) else value
        number = float(number) if isinstance(number, str) else number
        return np.array(number).astype(dtype.numpy).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError("an invalid fill value", location=location, got=repr(value)) from error


@dataclass(frozen=True)
class Chain:
    """The codecs of a chunk, from elements in memory order to bytes.

    Attributes:
        order: Axes of the chunk from slowest to fastest in memory.
        codecs: Codecs for elements in that order; for shards, the codecs of a piece.
        shard: The `sharding_indexed` configuration without shapes and codecs; None if chunks are not shards.
        pieces: Length in a chunk and in a piece, for each axis in `order` longer than one; empty if a chunk
            is one piece.
    """

    order: Shape
    codecs: tuple[CodecSpec, ...] = (LITTLE,)
    shard: CodecSpec | None = None
    pieces: tuple[tuple[int, int], ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, so that a byte range is a part of the chunk."""
        return self.shard is None and codec_steps(self.codecs) == (LITTLE_ENDIAN,)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for chains that differ only in axes of length one."""
        return self.codecs, self.shard, self.pieces

    def specs_for(self, chunk: Shape, order: Shape) -> tuple[CodecSpec, ...] | None:
        """Return codecs for chunks of another shape with the same memory; None if there are none.

        Args:
            chunk: Shape of the chunk.
            order: Axes of the chunk from slowest to fastest.
        """
        moves = order != tuple(range(len(order)))
        lead = (transpose_spec(order),) if moves else ()
        if self.shard is None:
            return (*lead, *self.codecs)
        memory = [chunk[axis] for axis in order]
        lengths = iter(piece for _, piece in self.pieces)
        if self.pieces and [n for n in memory if n > 1] != [n for n, _ in self.pieces]:
            return None
        inner = [next(lengths) if self.pieces and n > 1 else n for n in memory]
        settings = {"chunk_shape": inner, "codecs": list(self.codecs), **self.shard}
        return (*lead, {"configuration": settings, "name": "sharding_indexed"})


def parse_chain(codecs: Sequence[CodecSpec], chunk: Shape) -> Chain | None:
    """Parse the codecs of a `zarr.json`; None if they cannot be separated from the axes."""
    order, steps = split_order(codec_steps(codecs), len(chunk))
    rest = codecs[len(codecs) - len(steps) :]
    if order is None:
        return None
    if _know_no_axes(steps):
        return Chain(order, tuple(rest))
    if len(steps) != 1 or not isinstance(steps[0], ShardingCodec):
        return None
    sharding, settings = steps[0], dict(configuration_of(rest[0]))
    settings.pop("codecs", ())
    inner = settings.pop("chunk_shape", ())
    memory = [chunk[axis] for axis in order]
    if not _know_no_axes(sharding.steps) or len(inner) != len(memory):
        return None
    pieces = tuple((n, piece) for n, piece in zip(memory, inner, strict=True) if n > 1)
    return Chain(order, tuple(sharding.codecs), settings, () if list(inner) == memory else pieces)


def _know_no_axes(steps: Sequence[CodecStep]) -> bool:
    return len(steps) > 0 and isinstance(steps[0], BytesCodec) and bytes_codecs(steps[1:]) is not None
