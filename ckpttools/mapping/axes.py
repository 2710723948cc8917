"""A side of a row: a key (`ckpttools.mapping.keys`) and an array with named axes.

    model.layers.{layer}.self_attn.q_proj.weight: (heads head_dim) embed

In the array, `(heads head_dim)` is two axes merged into one. A `+` marks one of several parts that are
concatenated along an axis: `(heads +query)` within each head, `+(heads query)` across the full axis. Each
part has its own row, and the parts are stored in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError
from ckpttools.mapping.keys import AxisGroup, Coordinates, Key, parse_key


@dataclass(frozen=True, slots=True)
class Join:
    """The position of a side among the parts that are concatenated into an array.

    Attributes:
        at: Index of the concatenated group.
        depth: Number of axes in that group before the parts.
        parts: The axes of every part; empty if only this part is known.
        number: Index of this part.
    """

    at: int
    depth: int
    parts: tuple[AxisGroup, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """A key template and the axes of the array under each such key, or of one part of that array."""

    key: Key
    groups: tuple[AxisGroup, ...]
    join: Join | None = None

    @property
    def array_axes(self) -> AxisGroup:
        return tuple([axis for group in self.groups for axis in group])

    @property
    def axes(self) -> AxisGroup:
        return (*self.key.axes, *self.array_axes)

    @property
    def parts(self) -> tuple[AxisGroup, ...]:
        """Return the axes of each part in the concatenated group; empty if the array has no parts."""
        if self.join is None:
            return ()
        return self.join.parts or (self.groups[self.join.at][self.join.depth :],)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the full array at these sizes, including all parts."""
        own = [prod(sizes[axis] for axis in group) for group in self.groups]
        if self.join is not None:
            outside = self.groups[self.join.at][: self.join.depth]
            lengths = [prod(sizes[axis] for axis in part) for part in self.parts]
            own[self.join.at] = prod(sizes[axis] for axis in outside) * sum(lengths)
        return tuple(own)

    def indices(self, sizes: Mapping[str, int]) -> Iterator[Coordinates]:
        """Yield every coordinate of the key's axes, with the last axis varying fastest."""
        axes = self.key.axes
        for at in product(*(range(sizes[axis]) for axis in axes)):
            yield dict(zip(axes, at, strict=True))

    def keys(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield every key of this side at these sizes."""
        for index in self.indices(sizes):
            yield self.key.format(index, sizes)

    def below(self, prefix: Key, stacked: Sequence[str] = (), at: int = 0) -> Side:
        """Return this side under a prefix, with additional array axes before position `at`.

        If the array has fewer axes than `at`, the new axes become its last ones.
        """
        at = min(at, len(self.groups))
        added = tuple((axis,) for axis in stacked)
        join = self.join
        if join is not None and join.at >= at:
            join = replace(join, at=join.at + len(added))
        return Side(self.key.below(prefix), (*self.groups[:at], *added, *self.groups[at:]), join)

    def __str__(self) -> str:
        groups = (_group_text(group, self._mark(k)) for k, group in enumerate(self.groups))
        return f"{self.key}: {' '.join(groups)}".rstrip()

    def _mark(self, at: int) -> int | None:
        """Return the axis of a group before which a part begins; None if the group has no part."""
        return self.join.depth if self.join is not None and self.join.at == at else None


def _group_text(group: AxisGroup, mark: int | None) -> str:
    axes = [f"+{axis}" if mark == k > 0 else axis for k, axis in enumerate(group)]
    return "+" * (mark == 0) + (axes[0] if len(axes) == 1 else f"({' '.join(axes)})")


def parse_side(key: str, axes: str) -> Side:
    """Parse a side from a row's two strings.

    Raises:
        MappingError: The key or a name is empty, brackets are unbalanced, or an axis occurs twice.
    """
    groups = parse_groups(axes)
    side = Side(
        parse_key(key), tuple(tuple(a.removeprefix("+") for a in g) for g in groups), _join(groups, axes)
    )
    if not side.key.parts:
        raise MappingError("a key is empty", location=f": {axes}")
    for axis in side.axes:
        if side.axes.count(axis) > 1:
            raise MappingError("an axis occurs twice on one side", location=side, got=axis)
    return side


def _join(groups: Sequence[AxisGroup], text: str) -> Join | None:
    marked = [(at, depth) for at, group in enumerate(groups) for depth, a in enumerate(group) if a[0] == "+"]
    if len(marked) > 1:
        raise MappingError("an array has parts on one axis only", location=text, got=groups[marked[1][0]])
    return Join(*marked[0]) if marked else None


def parse_groups(text: str) -> tuple[AxisGroup, ...]:
    """Parse array axes such as `(heads head_dim) embed`, with a `+` before the axes that begin a part.

    Raises:
        MappingError: As for `parse_side`.
    """
    groups: list[AxisGroup] = []
    remaining = text.strip()
    while remaining:
        if remaining.startswith(("(", "+(")):
            plus, _, remaining = remaining.partition("(")
            inside, closed, remaining = remaining.partition(")")
            if not closed:
                raise MappingError("a bracket is not closed", location=text, got="(" + inside)
            groups.append(tuple((plus + inside).split()))
        else:
            name, _, remaining = remaining.partition(" ")
            groups.append((name,))
        remaining = remaining.strip()
    for axis in (axis for group in groups for axis in group):
        if not axis.removeprefix("+").isidentifier():
            raise MappingError("an axis name must be a word", location=text, got=axis)
    return tuple(groups)
