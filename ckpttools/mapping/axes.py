"""One side of a row: a key with axes in it and an array with named axes.

    "model.layers.{layer}.self_attn.q_proj.weight", "(heads head_dim) embed"

An index inside a key is an axis like any other. `{layer}` is a plain one, `{layer+3}` counts from 3,
`{repeat block}` is two axes merged into one number, `{part:query,key,value}` spells its coordinates with
words. In the array, `(heads head_dim)` is two axes merged into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.errors import MappingError

Group = tuple[str, ...]
"""The named axes that make up one array axis, outermost first."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a key that is filled with the coordinate of one or more axes.

    Attributes:
        axes: the axes, outermost first; several make one number, C order.
        offset: added to the number.
        labels: words instead of numbers, or empty.
    """

    axes: Group
    offset: int = 0
    labels: tuple[str, ...] = ()

    def spell(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        number = 0
        for axis in self.axes:
            number = number * sizes[axis] + index[axis]
        return self.labels[number] if self.labels else str(number + self.offset)


@dataclass(frozen=True, slots=True)
class Key:
    """A key template: literal text and fields in turn."""

    parts: tuple[str | Field, ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(part for part in self.parts if isinstance(part, Field))

    @property
    def axes(self) -> Group:
        return tuple(axis for field in self.fields for axis in field.axes)

    def spell(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        """The key at one coordinate of each of its axes."""
        return "".join(part if isinstance(part, str) else part.spell(index, sizes) for part in self.parts)

    def without(self, axis: str) -> Key:
        """The key with the field of `axis` gone, and the "_" or "." that led to it."""
        parts: list[str | Field] = []
        for part in self.parts:
            if isinstance(part, str) or axis not in part.axes:
                parts.append(part)
            elif part.axes != (axis,):
                raise MappingError("an axis merged with others cannot leave the key", place=self, got=axis)
            elif parts and isinstance(parts[-1], str):
                parts[-1] = parts[-1][:-1] if parts[-1][-1:] in ("_", ".") else parts[-1]
        return Key(tuple(parts))

    def __str__(self) -> str:
        return "".join(
            part if isinstance(part, str) else "{" + " ".join(part.axes) + "}" for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class Side:
    """A key template and the axes of the array under each such key."""

    key: Key
    groups: tuple[Group, ...]

    @property
    def array_axes(self) -> Group:
        return tuple(axis for group in self.groups for axis in group)

    @property
    def axes(self) -> Group:
        return (*self.key.axes, *self.array_axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The array's shape at these sizes."""
        return tuple(prod(sizes[axis] for axis in group) for group in self.groups)

    def indices(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Every coordinate of the key's axes, the last axis fastest."""
        yield from _indices(self.key.axes, sizes)

    def keys(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Every key of this side at these sizes."""
        for index in self.indices(sizes):
            yield self.key.spell(index, sizes)

    def stacked(self, axis: str, at: int) -> Side:
        """This side with `axis` moved out of the key and into the array, before position `at`.

        An array of too low a rank gets it as its last axis.
        """
        at = min(at, len(self.groups))
        return Side(self.key.without(axis), (*self.groups[:at], (axis,), *self.groups[at:]))

    def __str__(self) -> str:
        groups = (" ".join(g) if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)
        return f"{self.key} [{' '.join(groups)}]"


def _indices(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    if not axes:
        yield {}
        return
    for first in range(sizes[axes[0]]):
        for rest in _indices(axes[1:], sizes):
            yield {axes[0]: first, **rest}


def parse_side(key: str, axes: str) -> Side:
    """The side that a row's two strings describe.

    Raises:
        MappingError: unbalanced brackets, an empty name, an axis that occurs twice.
    """
    side = Side(parse_key(key), parse_groups(axes))
    for axis in side.axes:
        if side.axes.count(axis) > 1:
            raise MappingError("an axis occurs twice on one side", place=side, got=axis)
    return side


def parse_key(text: str) -> Key:
    """A key template; errors as `parse_side`."""
    parts: list[str | Field] = []
    rest = text
    while rest:
        literal, brace, rest = rest.partition("{")
        if "}" in literal:
            raise MappingError("a brace is not opened", place=text)
        if literal:
            parts.append(literal)
        if brace:
            inside, closed, rest = rest.partition("}")
            if not closed:
                raise MappingError("a brace is not closed", place=text)
            parts.append(_parse_field(inside, text))
    return Key(tuple(parts))


def _parse_field(inside: str, text: str) -> Field:
    names, colon, words = inside.partition(":")
    names, plus, offset = names.partition("+")
    axes = tuple(names.split())
    labels = tuple(words.split(",")) if colon else ()
    if not all(axis.isidentifier() for axis in (axes or ("",))) or (plus and not offset.strip().isdigit()):
        raise MappingError("a field must hold axis names", place=text, got="{" + inside + "}")
    return Field(axes, int(offset) if plus else 0, labels)


def parse_groups(text: str) -> tuple[Group, ...]:
    """Array axes such as `(heads head_dim) embed`; errors as `parse_side`."""
    groups: list[Group] = []
    rest = text.strip()
    while rest:
        if rest.startswith("("):
            inside, closed, rest = rest[1:].partition(")")
            if not closed:
                raise MappingError("a bracket is not closed", place=text)
            groups.append(tuple(inside.split()))
        else:
            name, _, rest = rest.partition(" ")
            groups.append((name,))
        rest = rest.strip()
    if any(not axis.isidentifier() for group in groups for axis in group):
        raise MappingError("an axis name must be a word", place=text)
    return tuple(groups)
