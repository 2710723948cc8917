"""Names matched by templates of the row language: which numbers stand in their fields.

    "decoder.layers_{layer}.mlp.wi_0.kernel"  and  "decoder.layers_3.mlp.wi_0.kernel"  give  layer = 3

`{...}`, at most once in a template, stands for any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError
from ckpttools.mapping.keys import Field, Key, parse_key

_ANY = "{...}"

Slot = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""What a field is filled with: its axes, their strides, axes whose lengths are added."""


@dataclass(frozen=True, slots=True)
class Bindings:
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

    def match(self, name: str) -> Bindings | None:
        """What `name` has in the fields; None where it is not of this template."""
        found = ((self._numbers(numbers), text) for numbers, text in self._readings(name))
        return next((Bindings(numbers, text) for numbers, text in found if numbers is not None), None)

    def _readings(self, name: str) -> Iterator[tuple[Sequence[int], str | None]]:
        """Numbers for all fields, and the text between."""
        for end, numbers in self.before.readings(name):
            if self.after is None:
                yield from [(numbers, None)] if end == len(name) else ()
                continue
            for start in range(end + 1, len(name) + 1):
                for stop, rest in self.after.readings(name, 0, start):
                    yield from [((*numbers, *rest), name[end:start])] if stop == len(name) else ()

    def _numbers(self, numbers: Sequence[int]) -> dict[Slot, int] | None:
        """The numbers by slot; None where one has several."""
        pairs = set(zip(map(slot, self.fields), numbers, strict=True))
        found = dict(pairs)
        return found if len(found) == len(pairs) else None

    def format(self, filled: Bindings) -> str:
        """The name that has this in its fields.

        Raises:
            MappingError: a number for which the template has no label.
        """
        before, after = (
            key.filled(filled.numbers[slot(field)] for field in key.fields) if key else ""
            for key in (self.before, self.after)
        )
        return f"{before}{filled.text or ''}{after}"

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
