"""The codecs of a zarr array apart from its axes: what stays when axes are added, dropped or put in order.

The bytes of a chunk depend on the elements in the order of memory, not on the axes that these are counted by.
So a chunk can be named again as the chunk of another array, if its codecs can be stated for that one's axes.
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
    """What makes the bytes of a chunk.

    Attributes:
        order: axes of the chunk from the slowest to the fastest in memory.
        codecs: what makes bytes of elements in that order; where chunks are shards, of those of a piece.
        shard: the configuration of `sharding_indexed` without shapes and codecs; None where chunks are none.
        pieces: for each axis in `order` that is longer than one, its length in a chunk and in a piece; empty
            where a chunk is one piece.
    """

    order: Shape
    codecs: tuple[CodecSpec, ...] = (LITTLE,)
    shard: CodecSpec | None = None
    pieces: tuple[tuple[int, int], ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, so that a part of them is a part of the chunk."""
        return self.shard is None and codec_steps(self.codecs) == (LITTLE_ENDIAN,)

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for chains that differ in axes of length one only."""
        return self.codecs, self.shard, self.pieces

    def specs_for(self, chunk: Shape, order: Shape) -> tuple[CodecSpec, ...] | None:
        """Return the codecs for chunks of another shape with the same memory; None where there are none.

        Args:
            chunk: shape of the chunk.
            order: its axes from the slowest to the fastest.
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
    """Return the chain that a `zarr.json` lists; None where it cannot be separated from the axes."""
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
