"""Key templates with fields: parsed from text, formatted at coordinates, and matched with names.

    model.layers.{layer}.self_attn.q_proj.weight

An index inside a key is an axis like any other. `{layer}` is a plain index, `{layer+3}` counts from 3,
`{6*block+position}` is a sum of multiples, `{layer+#dense}` counts from the length of `dense`, `{repeat
block}` is two axes merged into one index, and `{part:query,key,value}` spells coordinates as words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import gcd, prod
from operator import mul

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError

AxisGroup = tuple[str, ...]
"""The named axes that form one number or one axis of an array, outermost first."""

Coordinates = dict[str, int]
"""Maps axis names to coordinates."""

_DIGITS = "0123456789"
# Python refuses to parse integers with several thousand digits, and no coordinate has this many.
_MAX_DIGITS = 300


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a key that contains the coordinate of one or more axes.

    Attributes:
        axes: The axes, outermost first.
        strides: The factor of each coordinate in the sum; empty for axes merged into one number in C order.
        offset: A constant that is added to the number.
        counts: Axes whose lengths are added to the number.
        labels: Words in place of numbers, or empty.
    """

    axes: AxisGroup
    strides: tuple[int, ...] = ()
    offset: int = 0
    counts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def number(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> int:
        """Return the number at a coordinate, without the offset; for labels, the index of the label."""
        # Most fields have one axis, and a plan formats the names of 100,000 arrays.
        if len(self.axes) == 1 and not self.strides and not self.counts:
            return index[self.axes[0]]
        steps: Iterable[int] = map(mul, map(index.__getitem__, self.axes), self._steps(sizes))
        return sum(steps) + sum(map(sizes.__getitem__, self.counts))

    def indices(self, number: int, sizes: Mapping[str, int]) -> Iterator[Coordinates]:
        """Yield every coordinate that gives `number`; an axis of unknown length may have any coordinate."""
        steps = zip(self._steps(sizes), self.axes, strict=True)
        terms = [(step, axis, sizes.get(axis)) for step, axis in sorted(steps, key=lambda item: -item[0])]
        return _indices(number - sum(map(sizes.__getitem__, self.counts)), terms)

    def _steps(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the factor of each coordinate."""
        if self.strides or len(self.axes) == 1:
            return self.strides or (1,)
        return tuple(prod(sizes[axis] for axis in self.axes[k:]) for k in range(1, len(self.axes) + 1))

    def text(self, number: int) -> str:
        """Format a number as it appears in a key."""
        if not self.labels:
            return str(number + self.offset)
        if number < len(self.labels):
            return self.labels[number]
        raise MappingError(
            "there are more coordinates than labels",
            location=self,
            got=f"coordinate {number}",
            expected=f"at most {len(self.labels) - 1}, the one of {self.labels[-1]!r}",
        )

    def readings(self, name: str, start: int, after: str | Field) -> Iterator[tuple[int, int]]:
        """Yield each possible end of the field, with its number.

        The field begins at `start` and is followed by `after`.
        """
        if self.labels:
            for word in sorted(self.labels, key=lambda label: -len(label)):
                if name.startswith(word, start):
                    yield start + len(word), self.labels.index(word)
            return
        # A leading 0 ends the number, because 07 would not format back to the same text.
        limit = 1 if name.startswith("0", start) else _MAX_DIGITS
        end = start
        while end < len(name) and name[end] in _DIGITS and end < start + limit:
            end += 1
        # Text that does not begin with a digit comes after all digits of the number.
        is_apart = isinstance(after, str) and after[:1] not in _DIGITS
        for stop in range(end, end - 1 if is_apart and end > start else start, -1):
            number = int(name[start:stop]) - self.offset
            if number >= 0:
                yield stop, number

    def __str__(self) -> str:
        if self.labels:
            return f"{{{self.axes[0]}:{','.join(self.labels)}}}"
        if not self.strides:
            return f"{{{' '.join(self.axes)}}}"
        terms = [axis if n == 1 else f"{n}*{axis}" for n, axis in zip(self.strides, self.axes, strict=True)]
        terms += [f"#{count}" for count in self.counts] + [str(self.offset)] * bool(self.offset)
        return f"{{{'+'.join(terms)}}}"


def _indices(number: int, terms: Sequence[tuple[int, str, int | None]]) -> Iterator[Coordinates]:
    """Yield coordinates whose multiples add up to `number`; terms are (step, axis, length)."""
    (step, axis, length), *rest = terms
    if number < 0 or number % gcd(*(item for item, _, _ in terms)):
        return
    limit = number // step if length is None else min(number // step, length - 1)
    if not rest:
        yield from [{axis: limit}] if limit * step == number else ()
        return
    lengths = [(item, size) for item, _, size in rest if size is not None]
    reach = sum(item * (size - 1) for item, size in lengths) if len(lengths) == len(rest) else number
    for coordinate in range(limit, max(0, -((reach - number) // step)) - 1, -1):
        for inner in _indices(number - coordinate * step, rest):
            yield {axis: coordinate, **inner}


@dataclass(frozen=True)
class Key:
    """A key template: alternating literal text and fields."""

    parts: tuple[str | Field, ...]

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return tuple(part for part in self.parts if isinstance(part, Field))

    @cached_property
    def axes(self) -> AxisGroup:
        return tuple([axis for part in self.parts if isinstance(part, Field) for axis in part.axes])

    @cached_property
    def needs(self) -> frozenset[str]:
        """Return the axes whose lengths are needed to format all keys."""
        return frozenset(self.axes) | {count for field in self.fields for count in field.counts}

    def is_open_on(self, axis: str) -> bool:
        """Return whether names give the coordinate of an axis without knowing the axis's length."""
        locations = [field for field in self.fields if axis in field.axes and not field.labels]
        inner = any(axis in (*field.counts, *(field.axes[1:] * (not field.strides))) for field in self.fields)
        return bool(locations) and not inner

    def format(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        """Format the key at one coordinate for each of its axes.

        Raises:
            MappingError: A coordinate has no label.
        """
        texts = [
            part if isinstance(part, str) else part.text(part.number(index, sizes)) for part in self.parts
        ]
        return "".join(texts)

    def filled(self, numbers: Iterable[int]) -> str:
        """Fill each field with a number; raises the errors of `format`."""
        left = iter(numbers)
        return "".join(part if isinstance(part, str) else part.text(next(left)) for part in self.parts)

    def match(self, name: str, sizes: Mapping[str, int]) -> Coordinates | None:
        """Return the coordinates for which the key is `name`, or None; the inverse of `format`.

        Args:
            name: The name of an array.
            sizes: Lengths of the axes. An axis that is alone in its field, or is the outermost of merged
                axes, may be left out and then has any coordinate.
        """
        for end, numbers in self.readings(name):
            if end == len(name):
                index = next(
                    _merge_coordinates(list(zip(self.fields, numbers, strict=True)), {}, sizes), None
                )
                if index is not None:
                    return index
        return None

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers in the fields of `name` for any lengths; None if `name` does not match."""
        return next((numbers for end, numbers in self.readings(name) if end == len(name)), None)

    def readings(self, name: str, part: int = 0, start: int = 0) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each possible end of the key in `name`, with the field numbers.

        `part` and `start` select the rest of the key, starting at a part.
        """
        parts = self.parts
        while part < len(parts):
            text, part = parts[part], part + 1
            if isinstance(text, Field):
                after = parts[part] if part < len(parts) else ""
                for end, number in text.readings(name, start, after):
                    for stop, numbers in self.readings(name, part, end):
                        yield stop, (number, *numbers)
                return
            if not name.startswith(text, start):
                return
            start += len(text)
        yield start, ()

    def first(self, sizes: Mapping[str, int] | None = None) -> str:
        """Format the key at coordinate 0 of each axis; unknown lengths count as 0."""
        return self.format(dict.fromkeys(self.axes, 0), {**dict.fromkeys(self.needs, 0), **(sizes or {})})

    def below(self, prefix: Key) -> Key:
        """Return this key under another one, joined by a dot."""
        return key_of((*prefix.parts, ".", *self.parts)) if prefix.parts else self

    def __str__(self) -> str:
        return "".join(map(str, self.parts))


def _merge_coordinates(
    fields: Sequence[tuple[Field, int]], index: Coordinates, sizes: Mapping[str, int]
) -> Iterator[Coordinates]:
    """Yield coordinates that give every field its number.

    An axis in several fields has the same coordinate in all of them.
    """
    if not fields:
        yield index
        return
    (field, number), *rest = fields
    for coordinates in field.indices(number, sizes):
        if all(index.get(axis, at) == at for axis, at in coordinates.items()):
            yield from _merge_coordinates(rest, index | coordinates, sizes)


def key_of(parts: Iterable[str | Field]) -> Key:
    """Create a key from parts, merging adjacent literals as when the full key is parsed."""
    merged: list[str | Field] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return Key(tuple(merged))


def longest_stride(keys: Iterable[Key]) -> int:
    """Return the largest step between numbers of adjacent coordinates in these keys.

    The step is 1 if all numbers are consecutive.
    """
    return max((stride for key in keys for field in key.fields for stride in field.strides), default=1)


def parse_key(text: str) -> Key:
    """Parse a key template; the inverse of `str`.

    Raises:
        MappingError: Braces are unbalanced, a field is invalid, or a label occurs twice in a field.
    """
    parts: list[str | Field] = []
    rest = text
    while rest:
        literal, brace, rest = rest.partition("{")
        if "}" in literal:
            raise MappingError("a brace is not opened", location=text, got=literal)
        if literal:
            parts.append(literal)
        if brace:
            inside, closed, rest = rest.partition("}")
            if not closed:
                raise MappingError("a brace is not closed", location=text, got="{" + inside)
            parts.append(_parse_field(inside, text))
    return Key(tuple(parts))


def _parse_field(inside: str, text: str) -> Field:
    names, colon, words = inside.partition(":")
    field = _parse_sum(names, text) if {"+", "*"} & set(names) else Field(tuple(names.split()))
    named = all(axis.isidentifier() for axis in (*field.axes, *field.counts))
    if not (field.axes and named and all(field.strides)):
        raise MappingError("a field must hold axis names", location=text, got="{" + inside + "}")
    if not colon:
        return field
    labels = tuple(words.split(","))
    if len(field.axes) != 1 or field.strides or not all(labels):
        raise MappingError("labels need a single plain axis", location=text, got="{" + inside + "}")
    duplicates = [label for label in labels if labels.count(label) > 1]
    if duplicates:
        raise MappingError(
            "a field has one word for two coordinates",
            location=text,
            got=f"{duplicates[0]} twice in {{{inside}}}",
            expected="each word once",
        )
    return Field(field.axes, labels=labels)


def _parse_sum(names: str, text: str) -> Field:
    """Parse `6*block+position+#dense+3`: multiples of axes, lengths of axes, and numbers."""
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
            raise MappingError("a field must hold axis names", location=text, got="{" + names + "}")
        else:
            strides[axis.strip()] = int(factor) if times else 1
    return Field(tuple(strides), tuple(strides.values()), offset, tuple(counts))
