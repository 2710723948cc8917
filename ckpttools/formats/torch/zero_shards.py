"""Locate parameters in DeepSpeed's flat vectors.

ZeRO stores the float32 weights of a group of parameters in one vector that is split across the processes. In
stages 1 and 2, the vector of a group is split as a unit. In stage 3, each parameter is split separately and
padded to equal parts. The layout is that of DeepSpeed 0.19, `deepspeed/utils/zero_to_fp32.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, ceil_div
from ckpttools.formats.pieced import in_shape

Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Vector:
    """Consecutive stored vectors viewed as one; ranges are read from the files that contain them."""

    parts: tuple[Stored, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def stretch(self, start: int, count: int) -> Iterator[Stored]:
        """Yield `count` elements from `start`, in one piece per file."""
        ends = accumulate(part.size for part in self.parts)
        for part, end in zip(self.parts, ends, strict=True):
            a, b = max(start, end - part.size), min(start + count, end)
            if b > a:
                at = part.offset + (a - (end - part.size)) * part.dtype.itemsize
                yield replace(part, shape=(b - a,), offset=at)


def of_groups(
    groups: Sequence[Vector], shapes: Sequence[Shapes], world: int, gaps: Sequence[Sequence[int]] | None
) -> dict[str, LazyArray]:
    """Return the parameters of stages 1 and 2, which are consecutive in the vector of their group.

    Args:
        groups: The complete vector of each group.
        shapes: Shapes of the parameters of each group, in order.
        world: Number of processes.
        gaps: The padding after each parameter of each group, if recorded.

    Raises:
        ValueError: A vector and its parameters have different numbers of elements.
    """
    if len(groups) != len(shapes) or (gaps is not None and [*map(len, gaps)] != [*map(len, shapes)]):
        raise ValueError(f"{len(groups)} vectors for {len(shapes)} groups of parameters")
    result: dict[str, LazyArray] = {}
    for number, (vector, named) in enumerate(zip(groups, shapes, strict=True)):
        behind = gaps[number] if gaps is not None else [0] * len(named)
        at = 0
        for (name, shape), gap in zip(named.items(), behind, strict=True):
            result[name] = _taken(vector, at, shape, name)
            at += prod(shape) + gap
        # Vectors are padded to a multiple of twice the number of processes.
        if ceil_div(at, 2 * world) != ceil_div(vector.size, 2 * world):
            raise ValueError(f"group {number} has {vector.size:,} elements, but its parameters {at:,}")
    return result


def names_of_ranks(
    groups: Sequence[Vector], shapes: Sequence[Shapes], gaps: Sequence[Sequence[int]] | None
) -> list[set[str]]:
    """Return the names of the parameters that the parts of each process overlap.

    Args:
        groups: As for `of_groups`, with a part for each process.
        shapes, gaps: As for `of_groups`.
    """
    held: list[set[str]] = [set() for _ in groups[0].parts]
    for number, (vector, named) in enumerate(zip(groups, shapes, strict=True)):
        ends = [0, *accumulate(part.size for part in vector.parts)]
        behind = gaps[number] if gaps is not None else [0] * len(named)
        at = 0
        for (name, shape), gap in zip(named.items(), behind, strict=True):
            for rank, (start, stop) in enumerate(pairwise(ends)):
                if max(at, start) < min(at + prod(shape), stop):
                    held[rank].add(name)
            at += prod(shape) + gap
    return held


def of_ranks(ranks: Sequence[Vector], shapes: Sequence[Shapes]) -> dict[str, LazyArray]:
    """Return the parameters of stage 3: equal parts of each on all processes, the last one padded.

    Args:
        ranks: The complete vector of each process.
        shapes: Shapes of the parameters of each group, in order.

    Raises:
        ValueError: As for `of_groups`.
    """
    world, at = len(ranks), 0
    result: dict[str, LazyArray] = {}
    for named in shapes:
        for name, shape in named.items():
            result[name] = _gathered(ranks, at, shape, name)
            at += ceil_div(prod(shape), world)
    wrong = [number for number, vector in enumerate(ranks) if vector.size != at]
    if wrong:
        raise ValueError(
            f"rank {wrong[0]} has {ranks[wrong[0]].size:,} elements, but its parts of the parameters {at:,}"
        )
    return result


def _taken(vector: Vector, at: int, shape: Shape, name: str) -> LazyArray:
    count = prod(shape)
    if at + count > vector.size:
        raise ValueError(f"{name} ends at element {at + count:,} of a vector of {vector.size:,}")
    if not count:
        return Constant(shape, vector.parts[0].dtype, bytes(vector.parts[0].dtype.itemsize))
    return in_shape([*vector.stretch(at, count)], shape)


def _gathered(ranks: Sequence[Vector], at: int, shape: Shape, name: str) -> LazyArray:
    count = prod(shape)
    part = ceil_div(count, len(ranks))
    if not count:
        return Constant(shape, ranks[0].parts[0].dtype, bytes(ranks[0].parts[0].dtype.itemsize))
    pieces: list[Stored] = []
    for rank, vector in enumerate(ranks):
        own = min(part, max(0, count - rank * part))
        if at + own > vector.size:
            raise ValueError(f"{name} ends at element {at + own:,} of rank {rank}'s {vector.size:,}")
        pieces += vector.stretch(at, own)
    return in_shape(pieces, shape)
