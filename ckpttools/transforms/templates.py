"""Names matched by templates of the row language: which numbers stand in their fields.

    "decoder.layers_{layer}.mlp.wi_0.kernel"  and  "decoder.layers_3.mlp.wi_0.kernel"  give  layer = 3

`{...}`, at most once in a template, stands for any text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.core.errors import MappingError
from ckpttools.mapping.axes import Field, Key, parse_key

_ANY = "{...}"

Slot = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""What a field is filled with: its axes, their strides, axes whose lengths are added."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What a name has where its template has fields.

    Attributes:
        numbers: for each field its number, as counted from 0.
        text: what `{...}` stands for, or None.
    """

    numbers: Mapping[Slot, int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """A template of names.

    Attributes:
        before: what precedes `{...}`, or all of it.
        after: what follows `{...}`, or None where there is none.
    """

    before: Key
    after: Key | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.before.fields + (self.after.fields if self.after else ())

    def match(self, name: str) -> Filled | None:
        """What `name` has in the fields; None where it is not of this template."""
        begin = _prefix(self.before, name)
        if begin is None:
            return None
        end, numbers = begin
        if self.after is None:
            return Filled(numbers) if end == len(name) else None
        for start in range(end + 1, len(name) + 1):
            rest = _prefix(self.after, name[start:])
            if rest and start + rest[0] == len(name) and numbers | rest[1] == rest[1] | numbers:
                return Filled(numbers | rest[1], name[end:start])
        return None

    def spell(self, filled: Filled) -> str:
        """The name that has this in its fields.

        Raises:
            MappingError: a number for which the template has no label.
        """
        text = _spelled(self.before, filled)
        return text if self.after is None else f"{text}{filled.text}{_spelled(self.after, filled)}"

    def __str__(self) -> str:
        return str(self.before) if self.after is None else f"{self.before}{_ANY}{self.after}"


def parse_template(text: str) -> Template:
    """The template that `text` is.

    Raises:
        MappingError: not in the row language, or with several `{...}`.
    """
    before, *after = text.split(_ANY)
    if len(after) > 1:
        raise MappingError(f"{_ANY} may stand in a template once", place=text)
    return Template(parse_key(before), parse_key(after[0]) if after else None)


def slot(field: Field) -> Slot:
    """What a field is filled with; `{layer}`, `{layer+3}` and `{layer:a,b}` are filled with the same."""
    plain = len(field.axes) == 1 and field.strides in ((), (1,))
    return field.axes, () if plain else field.strides, field.counts


def _prefix(key: Key, name: str) -> tuple[int, dict[Slot, int]] | None:
    """Where the beginning of `name` that is of this template ends, and its numbers."""
    position = 0
    numbers: dict[Slot, int] = {}
    for part in key.parts:
        if isinstance(part, str):
            if not name.startswith(part, position):
                return None
            position += len(part)
            continue
        text = _text_of(part, name[position:])
        number = _number(part, text)
        if number is None or numbers.setdefault(slot(part), number) != number:
            return None
        position += len(text)
    return position, numbers


def _text_of(field: Field, rest: str) -> str:
    """What of `rest` the field takes: its longest label, or all digits."""
    if field.labels:
        return max((label for label in field.labels if rest.startswith(label)), key=len, default="")
    count = next((n for n, character in enumerate(rest) if not character.isdecimal()), len(rest))
    return rest[:count]


def _number(field: Field, text: str) -> int | None:
    if field.labels:
        return field.labels.index(text) if text else None
    # 07 would not come back as it was.
    if not text.isascii() or not text.isdecimal() or str(int(text)) != text:
        return None
    number = int(text) - field.offset
    return None if number < 0 else number


def _spelled(key: Key, filled: Filled) -> str:
    return "".join(part if isinstance(part, str) else _field_text(part, filled) for part in key.parts)


def _field_text(field: Field, filled: Filled) -> str:
    number = filled.numbers[slot(field)]
    if not field.labels:
        return str(number + field.offset)
    if number >= len(field.labels):
        raise MappingError(
            "there are more coordinates than labels", place=field, got=number, wanted=len(field.labels)
        )
    return field.labels[number]
