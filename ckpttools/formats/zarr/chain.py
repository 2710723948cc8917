"""The codecs of a zarr array apart from its axes: what stays when axes are added, dropped or put in order.

The bytes of a chunk depend on the elements in the order of memory, not on the axes that these are counted by.
So a chunk can be named again as the chunk of another array, if its codecs can be spelled for that one's axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttools.core.region import Shape

Codec = Mapping[str, Any]

LITTLE: Codec = {"configuration": {"endian": "little"}, "name": "bytes"}
# Codecs from bytes to bytes: they know no axes.
_OF_BYTES = frozenset(("blosc", "crc32c", "gzip", "zstd"))


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
    codecs: tuple[Codec, ...]
    shard: Codec | None = None
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, so that a part of them is a part of the chunk."""
        return self.shard is None and len(self.codecs) == 1 and is_little(self.codecs[0])

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for chains that differ in axes of length one only."""
        return self.codecs, self.shard, self.pieces

    def spelled(self, chunk: Shape, order: Shape) -> tuple[Codec, ...] | None:
        """The codecs for chunks of another shape with the same memory; None where there are none.

        Args:
            chunk: shape of the chunk.
            order: its axes from the slowest to the fastest.
        """
        moves = order != tuple(range(len(order)))
        transposed: tuple[Codec, ...] = ({"configuration": {"order": list(order)}, "name": "transpose"},)
        lead = transposed if moves else ()
        if self.shard is None:
            return (*lead, *self.codecs)
        memory = [chunk[axis] for axis in order]
        lengths = iter(piece for _, piece in self.pieces)
        if self.pieces and [n for n in memory if n > 1] != [n for n, _ in self.pieces]:
            return None
        inner = [next(lengths) if self.pieces and n > 1 else n for n in memory]
        settings = {"chunk_shape": inner, "codecs": list(self.codecs), **self.shard}
        return (*lead, {"configuration": settings, "name": "sharding_indexed"})


def parse_chain(codecs: Sequence[Codec], chunk: Shape) -> Chain | None:
    """The chain that a `zarr.json` lists; None where it cannot be told from the axes."""
    rest, order = list(codecs), tuple(range(len(chunk)))
    if rest and rest[0].get("name") == "transpose":
        named = configuration_of(rest.pop(0)).get("order")
        if not isinstance(named, list) or sorted(named) != list(order):
            return None
        order = tuple(named)
    if _know_no_axes(rest):
        return Chain(order, tuple(rest))
    if [codec.get("name") for codec in rest] != ["sharding_indexed"]:
        return None
    settings = dict(configuration_of(rest[0]))
    inner, within = settings.pop("chunk_shape", ()), settings.pop("codecs", ())
    memory = [chunk[axis] for axis in order]
    if not _know_no_axes(within) or len(inner) != len(memory):
        return None
    if list(inner) == memory:
        return Chain(order, tuple(within), settings)
    pieces = tuple((n, piece) for n, piece in zip(memory, inner, strict=True) if n > 1)
    return Chain(order, tuple(within), settings, pieces)


def _know_no_axes(codecs: Sequence[Codec]) -> bool:
    names = [codec.get("name") for codec in codecs]
    return names[:1] == ["bytes"] and _OF_BYTES.issuperset(names[1:])


def is_little(codec: Codec) -> bool:
    """Whether a `bytes` codec stores little-endian; elements of one byte need not say."""
    return bool(configuration_of(codec).get("endian", "little") == "little")


def configuration_of(codec: Codec) -> Codec:
    """The settings of a codec; none where it says nothing sensible."""
    found = codec.get("configuration")
    return found if isinstance(found, dict) else {}
