"""Zarr codecs independent of axes, which stay the same when axes are added, dropped or reordered.

The bytes of a chunk depend on the order of elements in memory, not on the axes that index them. A chunk can
therefore be referenced as a chunk of another array if its codecs can be expressed for that array's axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ckpttools.codecs.base import CodecSpec, configuration_of
from ckpttools.codecs.bytes import LITTLE, LITTLE_ENDIAN, BytesCodec
from ckpttools.codecs.coding import bytes_codecs, split_order
from ckpttools.codecs.registry import CodecStep, codec_steps
from ckpttools.codecs.sharding import ShardingCodec
from ckpttools.codecs.transpose import transpose_spec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape


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
