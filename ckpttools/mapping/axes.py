"""One side of a row: a key (`ckpttools.mapping.keys`) and an array with named axes.

    model.layers.{layer}.self_attn.q_proj.weight: (heads head_dim) embed

In the array, `(heads head_dim)` is two axes merged into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ckpttools.core.errors import MappingError
from ckpttools.mapping.keys import AxisGroup, Coordinates, Key, parse_key


@dataclass(frozen=True, slots=True)
class Side:
    """A key template and the axes of the array under each such key."""

    key: Key
    groups: tuple[AxisGroup, ...]

    @property
    def array_axes(self) -> AxisGroup:
        return tuple(axis for group in self.groups for axis in group)

    @property
    def axes(self) -> AxisGroup:
        return (*self.key.axes, *self.array_axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The array's shape at these sizes."""
        return tuple(prod(sizes[axis] for axis in group) for group in self.groups)

    def indices(self, sizes: Mapping[str, int]) -> Iterator[Coordinates]:
        """Every coordinate of the key's axes, the last axis fastest."""
        axes = self.key.axes
        for at in product(*(range(sizes[axis]) for axis in axes)):
            yield dict(zip(axes, at, strict=True))

    def keys(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Every key of this side at these sizes."""
        for index in self.indices(sizes):
            yield self.key.format(index, sizes)

    def below(self, prefix: Key, stacked: Sequence[str] = (), at: int = 0) -> Side:
        """This side under a prefix, its array with further axes before position `at`.

        An array of too low a rank gets them as its last axes.
        """
        at = min(at, len(self.groups))
        added = tuple((axis,) for axis in stacked)
        return Side(self.key.below(prefix), (*self.groups[:at], *added, *self.groups[at:]))

    def __str__(self) -> str:
        groups = (" ".join(g) if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)
        return f"{self.key}: {' '.join(groups)}".rstrip()


def parse_side(key: str, axes: str) -> Side:
    """The side that a row's two strings describe.

    Raises:
        MappingError: no key, unbalanced brackets, an empty name, an axis that occurs twice.
    """
    side = Side(parse_key(key), parse_groups(axes))
    if not side.key.parts:
        raise MappingError("a key is empty", place=f": {axes}")
    for axis in side.axes:
        if side.axes.count(axis) > 1:
            raise MappingError("an axis occurs twice on one side", place=side, got=axis)
    return side


def parse_groups(text: str) -> tuple[AxisGroup, ...]:
    """Array axes such as `(heads head_dim) embed`; errors as `parse_side`."""
    groups: list[AxisGroup] = []
    rest = text.strip()
    while rest:
        if rest.startswith("("):
            inside, closed, rest = rest[1:].partition(")")
            if not closed:
                raise MappingError("a bracket is not closed", place=text, got="(" + inside)
            groups.append(tuple(inside.split()))
        else:
            name, _, rest = rest.partition(" ")
            groups.append((name,))
        rest = rest.strip()
    for axis in (axis for group in groups for axis in group):
        if not axis.isidentifier():
            raise MappingError("an axis name must be a word", place=text, got=axis)
    return tuple(groups)
