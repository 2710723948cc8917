"""Decode chunks and inner chunks with a chain of their codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.codecs.base import Codec, CodecSpec, Unknown
from ckpttools.codecs.bytes import LITTLE_ENDIAN, BytesCodec
from ckpttools.codecs.registry import CodecStep, codec_steps
from ckpttools.codecs.sharding import ShardIndex, ShardingCodec
from ckpttools.codecs.streams import ByteRange, RangeStream, Stream
from ckpttools.codecs.transpose import Transpose
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape

if TYPE_CHECKING:
    from ckpttools.codecs.tensorstore import CompleteChunkDecoder

# Bytes that a compressor may add to incompressible data; a compressor below it may also have added them.
_SLACK, _SHARE = 1 << 10, 64


@dataclass(frozen=True)
class Coding:
    """The encoding of a piece, the smallest unit that is encoded separately.

    Attributes:
        shape: Shape of the piece, which is a chunk or an inner chunk of a shard.
        dtype: Dtype of the elements.
        order: Axes of the piece from slowest to fastest in memory.
        elements: The conversion of elements to bytes.
        codecs: Codecs from bytes to bytes, in encoding order.
        fallback: A decoder for the full chunk that replaces the codecs; None if all codecs are supported.
    """

    shape: Shape
    dtype: DType
    order: Shape
    elements: BytesCodec = LITTLE_ENDIAN
    codecs: tuple[Codec, ...] = ()
    fallback: CompleteChunkDecoder | None = None

    @property
    def stored_shape(self) -> Shape:
        """The shape of the piece with its axes in memory order."""
        return tuple(self.shape[axis] for axis in self.order)

    @cached_property
    def nbytes(self) -> int:
        """Size of the decoded piece in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, without any codec."""
        return self.elements.is_little and not self.codecs and self.fallback is None

    @cached_property
    def name(self) -> str:
        """A text that is unique to the encoding."""
        return f"{list(self.order)} {self.fallback or (self.elements, self.codecs)}"

    @cached_property
    def memory(self) -> int:
        """Maximum memory of an open stream in bytes."""
        if self.fallback is not None:
            return self.fallback.memory(self.nbytes)
        return sum(codec.decoding_bytes(self.nbytes) for codec in self.codecs)

    def decoded(self, stored: ByteRange, extent: Shape) -> Stream:
        """Return a stream of the elements, in memory order.

        Args:
            stored: The bytes of the piece.
            extent: Shape of the part of the piece that is inside the array; the rest may be missing.
        """
        if self.fallback is not None:
            return self.fallback.decoded(stored, tuple(extent[axis] for axis in self.order))
        stream: Stream = RangeStream(stored)
        limit = self.nbytes + self.nbytes // _SHARE + _SLACK
        for codec in reversed(self.codecs):
            stream = codec.decoded(stream, limit)
        return self.elements.decoded(stream, self.dtype)

    @cached_property
    def _sizes(self) -> Sequence[int | None]:
        """Sizes of the elements and of each codec's output in bytes; None if they depend on values."""
        sizes: list[int | None] = [None if self.fallback else self.nbytes]
        for codec in self.codecs:
            before = sizes[-1]
            sizes.append(None if before is None or codec.adds is None else before + codec.adds)
        return sizes

    @property
    def stored_nbytes(self) -> int | None:
        """Size of every stored piece in bytes; None if it depends on values."""
        return self._sizes[-1]

    def is_whole(self, chunk: ByteRange) -> bool:
        """Return whether a piece shows no sign of truncation or foreign content; see `Codec.is_whole`.

        Raises:
            FormatError, StorageError: The file cannot be read.
        """
        if self.stored_nbytes is not None:
            return chunk.nbytes == self.stored_nbytes
        for codec, decoded in zip(reversed(self.codecs), reversed(self._sizes[:-1]), strict=True):
            if codec.adds is None:
                return chunk.nbytes > 0 and codec.is_whole(chunk, decoded)
            chunk = chunk.without_end(codec.adds)
        return chunk.nbytes > 0

    def below(self, order: Shape) -> Coding:
        """Return the encoding before a transposition of the axes to this order."""
        shape = tuple(self.shape[order.index(axis)] for axis in range(len(order)))
        return replace(self, shape=shape, order=tuple(order[axis] for axis in self.order))


def parse_coding(
    codecs: Sequence[CodecSpec], chunk: Shape, dtype: DType, document: Mapping[str, Any]
) -> tuple[Coding, ShardIndex | None]:
    """Return the encoding of pieces, and the index of shards; None if chunks are not shards.

    Args:
        codecs: The codecs as listed in `zarr.json`.
        chunk: Shape of a chunk.
        dtype: Dtype of the elements.
        document: The parsed `zarr.json`, for the tensorstore fallback.
    """
    order, rest = split_order(codec_steps(codecs), len(chunk))
    if order is not None and len(rest) == 1 and isinstance(rest[0], ShardingCodec):
        shard = rest[0].shard(tuple(chunk[axis] for axis in order), order)
        if shard is not None:
            piece = _parse_piece(rest[0].codecs, tuple(rest[0].piece), dtype, document)
            return piece.below(order), shard
    return _parse_piece(codecs, chunk, dtype, document), None


def _parse_piece(
    codecs: Sequence[CodecSpec], shape: Shape, dtype: DType, document: Mapping[str, Any]
) -> Coding:
    order, rest = split_order(codec_steps(codecs), len(shape))
    result = bytes_codecs(rest[1:])
    if order is not None and result is not None and rest and isinstance(rest[0], BytesCodec):
        return Coding(shape, dtype, order, rest[0], result)
    # Few checkpoints have codecs that only tensorstore decodes.
    from ckpttools.codecs.tensorstore import complete_chunk_decoder

    decoder = complete_chunk_decoder(codecs, shape, document)
    return Coding(shape, dtype, tuple(range(len(shape))), fallback=decoder)


def split_order(steps: Sequence[CodecStep], rank: int) -> tuple[Shape | None, Sequence[CodecStep]]:
    """Return the memory order of the axes (None if it is invalid) and the remaining steps."""
    if steps and isinstance(steps[0], Transpose):
        return steps[0].order(rank), steps[1:]
    return tuple(range(rank)), steps


def bytes_codecs(steps: Sequence[CodecStep]) -> tuple[Codec, ...] | None:
    """Return the steps if they are all known codecs from bytes to bytes; None otherwise."""
    known = tuple(step for step in steps if isinstance(step, Codec) and not isinstance(step, Unknown))
    return known if len(known) == len(steps) else None
