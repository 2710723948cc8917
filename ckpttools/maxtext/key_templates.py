"""Names against key templates: which names a family's rows spell, whatever the numbers in them are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ckpttools.families.family import Family
from ckpttools.mapping.axes import Field, Key
from ckpttools.mapping.row import Row
from ckpttools.maxtext.view import MaxTextView

Form = tuple[str, tuple[str | None, ...]]
"""A name as text with "#" for each number in it, and these numbers; None for one that may be any."""

_NUMBER = re.compile("([0-9]+)")
# A field of a key template as text, `{layer}` or `{4*block+3}`, but none with labels.
_FIELD = re.compile(r"\{[^}:]*?(?:\+(?P<offset>[0-9]+))?\}")
# No name has this character, so it stands for a number that may be any.
_ANY = "\0"
_NUMBER_OR_ANY = re.compile(f"([0-9]+|{_ANY})")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that a model has together, such as those of a group of layers; key template by form."""

    required: Mapping[Form, str]
    optional: Mapping[Form, str]

    @classmethod
    def of(cls, keys: Sequence[tuple[Key, Row]]) -> Group:
        rows: dict[Form, list[Row]] = {}
        texts: dict[Form, str] = {}
        for key, row in keys:
            for form in _forms_of(key):
                rows.setdefault(form, []).append(row)
                texts.setdefault(form, str(key))
        always = {form for form, choices in rows.items() if _always_there(choices)}
        return cls(
            {form: text for form, text in texts.items() if form in always},
            {form: text for form, text in texts.items() if form not in always},
        )

    @property
    def forms(self) -> frozenset[Form]:
        return frozenset((*self.required, *self.optional))


def _always_there(rows: Sequence[Row]) -> bool:
    """Whether one of the rows exists whatever the model's flags are."""
    flags = sorted(frozenset().union(*(row.flags for row in rows)))
    settings = product((False, True), repeat=len(flags))
    chosen = ([flag for flag, is_set in zip(flags, each, strict=True) if is_set] for each in settings)
    return all(any(row.applies(setting) for row in rows) for setting in chosen)


@dataclass(frozen=True)
class Spelled:
    """A family's key templates in one spelling.

    Attributes:
        family: whose.
        groups: those outside of layers, then each group of layers.
        ignored: patterns of names that need no row.
    """

    family: Family
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]

    def by_text(self) -> dict[str, list[Form]]:
        found: dict[str, list[Form]] = {}
        for form in dict.fromkeys(form for group in self.groups for form in group.forms):
            found.setdefault(form[0], []).append(form)
        return found

    def first_numbers(self, before: str) -> list[int]:
        """The least numbers that templates have right behind some text, one for each that has any."""
        texts = (
            text
            for group in self.groups
            for forms in (group.required, group.optional)
            for text in forms.values()
        )
        found = (_FIELD.match(text, len(before)) for text in texts if text.startswith(before))
        return [int(field["offset"] or 0) for field in found if field]

    def required(self, met: frozenset[Form]) -> dict[Form, str]:
        """What a model must have that has the names in `met`.

        Of groups of layers that differ in some names, only those count of which such a name is there; where
        that is none, all of them.
        """
        first, *layers = self.groups
        own = [group.forms.difference(*(o.forms for o in layers if o is not group)) for group in layers]
        live = [group for group, forms in zip(layers, own, strict=True) if not forms or forms & met]
        return {form: text for group in (first, *(live or layers)) for form, text in group.required.items()}


def spellings(family: Family, view: MaxTextView) -> Iterator[Spelled]:
    """The family's key templates as such a tree would spell them, in each way that there is."""
    scan_axis = (view.scan_axis or 0) if view.is_stacked else None
    # A row below a group has the group's flags, too; here its own are what matters.
    layers = [list(zip(each.spelled(scan_axis), each.rows, strict=True)) for each in family.layers]
    groups = [[(row, row) for row in family.rows], *layers]
    if view.is_maxtext:
        yield Spelled(family, tuple(Group.of([(a.left.key, b) for a, b in rows]) for rows in groups), ())
        return
    # A pattern with a number in it ignores some layers only; a configuration tells which.
    ignored = tuple(each for each in (*family.dropped, *family.left_out) if "{" not in each)
    for spelling in family.spellings:
        keys = ([(spelling.key(a.right.key), b) for a, b in rows] for rows in groups)
        yield Spelled(family, tuple(map(Group.of, keys)), ignored)


def _forms_of(key: Key) -> Iterator[Form]:
    """A key template's forms: one, or where it has labels one for each."""
    for words in product(*map(_words, key.parts)):
        pieces = _NUMBER_OR_ANY.split("".join(words))
        yield "#".join(pieces[::2]), tuple(None if each == _ANY else each for each in pieces[1::2])


def _words(part: str | Field) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part.labels or (_ANY,)


def forms_of_names(names: Iterable[str], spelled: Iterable[Spelled]) -> dict[Form, list[str]]:
    """The names by form; of numbers only those are kept that some template has as they are."""
    literal: dict[str, set[int]] = {}
    for text, numbers in (form for each in spelled for group in each.groups for form in group.forms):
        literal.setdefault(text, set()).update(k for k, number in enumerate(numbers) if number is not None)
    found: dict[Form, list[str]] = {}
    for name in names:
        pieces = _NUMBER.split(name)
        text, kept = "#".join(pieces[::2]), pieces[1::2]
        places = literal.get(text, ())
        numbers = tuple(number if k in places else None for k, number in enumerate(kept))
        found.setdefault((text, numbers), []).append(name)
    return found


def meets(name: Form, template: Form) -> bool:
    """Whether a name has the numbers that a template of the same text has as they are."""
    # A name with "#" in it may have the text of a template, but fewer numbers.
    if len(name[1]) != len(template[1]):
        return False
    return all(wanted in (None, number) for number, wanted in zip(name[1], template[1], strict=True))
