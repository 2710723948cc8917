"""Arrays whose elements take turns in a file, as fused gate and up projections do: read together, once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import INNER, Stack, Take, inner, stack
from ckpttools.core.dataclass import dataclass
from ckpttools.plan.pieces import PIECE_BYTES
from ckpttools.sharding.cutting import projected
from ckpttools.sharding.held import HeldParts
from ckpttools.sharding.scatter import Parts
from ckpttools.sharding.shards import Shards


@dataclass(frozen=True)
class Joint:
    """What is read in one go: an array, or several along a new first axis.

    Attributes:
        held: what is read.
        members: the numbers of the arrays; of several, in the order of that axis.
    """

    held: HeldParts
    members: tuple[int, ...]

    def split(self, parts: Parts) -> Iterator[tuple[int, Parts]]:
        """The parts of each array."""
        if len(self.members) == 1:
            yield self.members[0], parts
            return
        for location, number in enumerate(self.members):
            yield number, {cell[1:]: part[location] for cell, part in parts.items()}


def joints(held: Sequence[HeldParts]) -> list[Joint]:
    """All arrays, those together that read the same bytes; each in the place of its first."""
    result: dict[Hashable, list[tuple[int, int]]] = {}
    sources: dict[Hashable, LazyArray] = {}
    known: dict[int, tuple[LazyArray, Hashable]] = {}
    for number, item in enumerate(held):
        whole = _untaken(item.array) if item.shards.size else None
        if whole is None:
            result[number] = [(0, number)]
            continue
        source, index = whole
        # Layers are mostly coordinates of one and the same array: it is described once, and kept meanwhile.
        known.setdefault(id(source), (source, _described(source)))
        key = known[id(source)][1], item.shards.part, item.shards.held
        result.setdefault(key, []).append((index, number))
        sources.setdefault(key, source)
    return [
        built for key, members in result.items() for built in _made(held, sources.get(key), sorted(members))
    ]


def _made(
    held: Sequence[HeldParts], source: LazyArray | None, members: Sequence[tuple[int, int]]
) -> Iterator[Joint]:
    numbers = tuple(number for _, number in members)
    alone = [held[number] for number in numbers]
    if source is not None and [index for index, _ in members] == list(range(source.shape[0])) != [0]:
        together = _together(alone, source)
        if projected([together], PIECE_BYTES).nbytes < projected(alone, PIECE_BYTES).nbytes:
            yield Joint(together, numbers)
            return
    yield from (Joint(item, (number,)) for item, number in zip(alone, numbers, strict=True))


def _together(alone: Sequence[HeldParts], source: LazyArray) -> HeldParts:
    count, shards = len(alone), alone[0].shards
    held = tuple((0, *cell) for cell in shards.held)
    above = Shards((count, *shards.shape), (count, *shards.part), held)
    return HeldParts(source, above, " and ".join(item.name for item in alone))


def _untaken(array: LazyArray) -> tuple[LazyArray, int] | None:
    """The array of which this is one coordinate of the first axis, and which."""
    if isinstance(array, Take) and array.axis == 0:
        return array.source, array.index
    if not isinstance(array, Stack):
        return None
    result = [whole for part in array.parts if (whole := _untaken(part)) is not None]
    indices = {index for _, index in result}
    if len(result) < len(array.parts) or len(indices) > 1:
        return None
    return stack([source for source, _ in result], array.axis + 1), indices.pop()


def _described(array: LazyArray) -> Hashable:
    """Equal for arrays that are made alike of the same stored ones."""
    parts = inner(array)
    if not parts:
        return id(array)
    own = (repr(getattr(array, field.name)) for field in fields(array) if field.name not in INNER)
    return (type(array), *own, *map(_described, parts))
