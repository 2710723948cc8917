"""One side of a row: a key with axes in it and an array with named axes.

    model.layers.{layer}.self_attn.q_proj.weight: (heads head_dim) embed

An index inside a key is an axis like any other. `{layer}` is a plain one, `{layer+3}` counts from 3,
`{6*block+position}` is a sum of multiples, `{layer+#dense}` counts from the length of `dense`,
`{repeat block}` is two axes merged into one number, `{part:query,key,value}` spells its coordinates with
words. In the array, `(heads head_dim)` is two axes merged into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.core.errors import MappingError

Group = tuple[str, ...]
"""The named axes that make up one array axis, outermost first."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a key that is filled with the coordinate of one or more axes.

    Attributes:
        axes: the axes, outermost first.
        strides: what each coordinate is multiplied by before they are added up; empty for axes merged
            into one number, C order.
        offset: added to the number.
        counts: axes whose lengths are added to the number.
        labels: words instead of numbers, or empty.
    """

    axes: Group
    strides: tuple[int, ...] = ()
    offset: int = 0
    counts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def spell(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        number = 0
        if self.strides:
            number = sum(stride * index[axis] for stride, axis in zip(self.strides, self.axes, strict=True))
        else:
            for axis in self.axes:
                number = number * sizes[axis] + index[axis]
        if self.labels:
            return self.labels[number]
        return str(number + self.offset + sum(sizes[count] for count in self.counts))

    def told(self, text: str, sizes: Mapping[str, int]) -> int | None:
        """The coordinate of the field's only axis that is spelled `text`, None where there is none."""
        if len(self.axes) != 1 or self.labels or not text.isdecimal():
            return None
        number = int(text) - self.offset - sum(sizes[count] for count in self.counts)
        coordinate, rest = divmod(number, self.strides[0] if self.strides else 1)
        return None if rest or coordinate < 0 else coordinate

    def __str__(self) -> str:
        if self.labels:
            return f"{{{self.axes[0]}:{','.join(self.labels)}}}"
        if not self.strides:
            return f"{{{' '.join(self.axes)}}}"
        terms = [axis if n == 1 else f"{n}*{axis}" for n, axis in zip(self.strides, self.axes, strict=True)]
        terms += [f"#{count}" for count in self.counts] + [str(self.offset)] * bool(self.offset)
        return f"{{{'+'.join(terms)}}}"


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

    @property
    def needs(self) -> frozenset[str]:
        """Axes whose lengths must be known to spell all of its keys."""
        return frozenset(self.axes) | {count for field in self.fields for count in field.counts}

    def spell(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        """The key at one coordinate of each of its axes."""
        return "".join(part if isinstance(part, str) else part.spell(index, sizes) for part in self.parts)

    def first(self) -> str:
        """The key at coordinate 0 of each of its axes; lengths that it counts from are taken as 0."""
        return self.spell(dict.fromkeys(self.axes, 0), dict.fromkeys(self.needs, 0))

    def below(self, prefix: Key) -> Key:
        """This key under another one, joined by a dot."""
        return Key(_merged((*prefix.parts, ".", *self.parts))) if prefix.parts else self

    def __str__(self) -> str:
        return "".join(map(str, self.parts))


def _merged(parts: Iterable[str | Field]) -> tuple[str | Field, ...]:
    """Literals that follow each other are one, as where the whole key is parsed."""
    merged: list[str | Field] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return tuple(merged)


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
        MappingError: no key, unbalanced brackets, an empty name, an axis that occurs twice.
    """
    side = Side(parse_key(key), parse_groups(axes))
    if not side.key.parts:
        raise MappingError("a key is empty", place=f": {axes}")
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
            raise MappingError("a brace is not opened", place=text, got=literal)
        if literal:
            parts.append(literal)
        if brace:
            inside, closed, rest = rest.partition("}")
            if not closed:
                raise MappingError("a brace is not closed", place=text, got="{" + inside)
            parts.append(_parse_field(inside, text))
    return Key(tuple(parts))


def _parse_field(inside: str, text: str) -> Field:
    names, colon, words = inside.partition(":")
    field = _parse_sum(names, text) if {"+", "*"} & set(names) else Field(tuple(names.split()))
    if not field.axes or not all(axis.isidentifier() for axis in (*field.axes, *field.counts)):
        raise MappingError("a field must hold axis names", place=text, got="{" + inside + "}")
    if not colon:
        return field
    labels = tuple(words.split(","))
    if len(field.axes) != 1 or field.strides or not all(labels):
        raise MappingError("labels are for one plain axis", place=text, got="{" + inside + "}")
    return Field(field.axes, labels=labels)


def _parse_sum(names: str, text: str) -> Field:
    """`6*block+position+#dense+3`: multiples of axes, lengths of axes, and numbers."""
    strides: dict[str, int] = {}
    counts: list[str] = []
    offset = 0
    for term in (term.strip() for term in names.split("+")):
        factor, times, axis = term.rpartition("*")
        if term.isdecimal():
            offset += int(term)
        elif term.startswith("#"):
            counts.append(term[1:])
        elif times and not factor.strip().isdecimal():
            raise MappingError("a field must hold axis names", place=text, got="{" + names + "}")
        else:
            strides[axis.strip()] = int(factor) if times else 1
    return Field(tuple(strides), tuple(strides.values()), offset, tuple(counts))


def parse_groups(text: str) -> tuple[Group, ...]:
    """Array axes such as `(heads head_dim) embed`; errors as `parse_side`."""
    groups: list[Group] = []
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
