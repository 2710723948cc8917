"""What the metadata of one zarr array says, of either version of zarr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ckpttools.codecs.base import Codec
from ckpttools.codecs.coding import Coding
from ckpttools.codecs.registry import CodecStep, flat_steps
from ckpttools.codecs.sharding import ShardIndex
from ckpttools.codecs.transpose import Transpose
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, grid_index, grid_indices, grid_shape
from ckpttools.formats.placement import chunk_key
from ckpttools.formats.zarr.chain import Chain

_FEW_CHUNKS = 16


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
        """Return the key of the chunk at a grid index."""
        return chunk_key(self.prefix, self.separator, index)

    def index(self, key: str, rank: int) -> Shape | None:
        """Return the grid index that a key names; None if it names none."""
        if rank == 0:
            return () if key == self.key(()) else None
        return _grid_index(self.prefix, self.separator, key, rank)


# The 100,000 arrays of a checkpoint have few keys of chunks between them.
@lru_cache(maxsize=1 << 12)
def _grid_index(prefix: str, separator: str, key: str, rank: int) -> Shape | None:
    parts = key.split(separator)
    if prefix and parts.pop(0) != prefix:
        return None
    # More digits than any grid has cells are no index, nor is a number that no writer writes so.
    if len(parts) != rank or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    if any(p[0] == "0" and p != "0" for p in parts):
        return None
    return tuple(map(int, parts))


@dataclass(frozen=True)
class ZarrArray:
    """One array.

    Attributes:
        shape: of the array.
        dtype: of its elements.
        chunk: shape of the grid's cells.
        keys: how chunks are named.
        coding: how the pieces of chunks are coded; a piece is a chunk unless chunks are shards.
        shard: how they are shards; None where they are not, or of a kind that is read whole.
        fill: the element that chunks are filled with that were left out.
        steps: its codecs, first one first.
        chain: these apart from its axes, as zarr v3 lists them; None where it has no such.
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
        """Chunks along each axis."""
        return grid_shape(self.shape, self.chunk)

    @cached_property
    def num_chunks(self) -> int:
        return prod(self.grid)

    @cached_property
    def few_keys(self) -> frozenset[str]:
        """The keys of all chunks where there are a few; that a key is one of them is seen soonest so."""
        few = self.num_chunks <= _FEW_CHUNKS
        return frozenset(map(self.keys.key, grid_indices(self.shape, self.chunk) if few else ()))

    @cached_property
    def codecs(self) -> tuple[str, ...]:
        """How a piece becomes bytes, in words; empty for plain C order."""
        return tuple(name for step in self.steps for name in step.names(list(self.chunk)))

    @property
    def is_compressed(self) -> bool:
        """Whether a codec makes the data smaller."""
        return any(isinstance(step, Codec) and step.compresses for step in flat_steps(self.steps))

    @property
    def is_transposed(self) -> bool:
        """Whether axes are in another order in memory."""
        return any(isinstance(step, Transpose) for step in flat_steps(self.steps))

    @cached_property
    def pieces(self) -> Shape:
        """Pieces of a chunk along each axis."""
        return grid_shape(self.chunk, self.coding.shape)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every chunk is its elements in C order and nothing else."""
        order = self.coding.order
        return self.coding.is_plain and self.shard is None and order == tuple(range(len(order)))

    @cached_property
    def decoded_nbytes(self) -> int:
        """Bytes of all pieces when they are decoded."""
        return prod(grid_shape(self.shape, self.coding.shape)) * self.coding.nbytes

    @cached_property
    def chunk_bytes(self) -> int | None:
        """Bytes of each chunk, where that follows from its shape."""
        return self.coding.stored_nbytes if self.shard is None else None

    def shard_filled(self, fill: bytes | None) -> ShardIndex | None:
        """How chunks are shards, with `fill` for the pieces that were left out; None is an error there."""
        return self.shard and replace(self.shard, fill=fill)

    def has_room(self, index: Shape) -> bool:
        """Return whether an index is one of the grid."""
        return all(i < n for i, n in zip(index, self.grid, strict=True))

    def first_missing(self, present: int, is_there: Callable[[Shape], bool]) -> Shape:
        """Return the first chunk in C order that is not there, of which `present` are; one must be missing.

        Counted through by hand: a damaged shape may be of more chunks than any iterator of them holds.
        """
        positions = (grid_index(self.grid, number) for number in range(present + 1))
        return next(index for index in positions if not is_there(index))


def checked_keys(prefix: str, separator: object, location: str) -> ChunkKeys:
    """Return the names of chunks with a separator that a document names.

    Raises:
        FormatError: zarr has no such separator.
    """
    if separator not in ("/", "."):
        expected = '"/" or "."'
        raise FormatError(
            "an unknown separator of chunk keys", location=location, got=separator, expected=expected
        )
    return ChunkKeys(prefix, str(separator))


def checked_grid(shape: object, chunk: object, location: str) -> tuple[Shape, Shape]:
    """Shape and chunk shape, if they are such.

    Raises:
        FormatError: they are not, or not of one rank.
    """
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise FormatError("shape and chunk shape do not match", location=location, got=f"{shape} and {chunk}")
    if not all(type(n) is int and n >= 0 for n in shape) or not all(type(n) is int and n > 0 for n in chunk):
        raise FormatError("an invalid shape", location=location, got=f"{shape} in chunks of {chunk}")
    return tuple(shape), tuple(chunk)


def fill_element(value: Any, dtype: DType, location: str) -> bytes:
    """Return the bytes of a fill value as zarr writes it; null is zero.

    Raises:
        FormatError: it is not a value of this dtype.
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
