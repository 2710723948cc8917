"""Names against key templates: which names a family's rows have, whatever the numbers in them are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.keys import Field, Key, key_of
from ckpttools.mapping.row import Row
from ckpttools.maxtext.family_layouts import layouts_of
from ckpttools.maxtext.view import MaxTextView
from ckpttools.model_families.family import Family

Alike = tuple[str, tuple[str | None, ...]]
"""What names have in common: their text with "#" for each number, and these; None for one that may be any."""

# Stands for the number of a field.
_OF_FIELD = "\0"
_NUMBER = re.compile(f"([0-9{_OF_FIELD}]+)")
# What any field without labels is matched as: which axes it counts, and from where, is all the same here.
_ANY = Field(("number",))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that a model has together, such as those of a group of layers: by what names of them are matched
    with, the key as it is written."""

    required: Mapping[Key, Key]
    optional: Mapping[Key, Key]

    @classmethod
    def of(cls, keys: Sequence[tuple[Key, Row]]) -> RowGroup:
        rows: dict[Key, list[Row]] = {}
        written: dict[Key, Key] = {}
        for key, row in keys:
            for form in _forms_of(key):
                rows.setdefault(form, []).append(row)
                written.setdefault(form, key)
        always = {form for form, choices in rows.items() if _always_there(choices)}
        return cls(
            {form: key for form, key in written.items() if form in always},
            {form: key for form, key in written.items() if form not in always},
        )

    @property
    def forms(self) -> frozenset[Key]:
        return frozenset((*self.required, *self.optional))


def _always_there(rows: Sequence[Row]) -> bool:
    """Whether one of the rows exists whatever the model's flags are."""
    if not all(row.when or row.unless for row in rows):
        return True
    flags = sorted(frozenset().union(*(row.flags for row in rows)))
    settings = product((False, True), repeat=len(flags))
    chosen = ([flag for flag, is_set in zip(flags, item, strict=True) if is_set] for item in settings)
    return all(any(row.applies(setting) for row in rows) for setting in chosen)


@dataclass(frozen=True)
class FamilyKeys:
    """A family's key templates as one kind of file writes them.

    Attributes:
        family: whose.
        groups: those outside of layers, then each group of layers.
        ignored: patterns of names that need no row.
    """

    family: Family
    groups: tuple[RowGroup, ...]
    ignored: tuple[str, ...]

    @cached_property
    def by_text(self) -> dict[str, list[tuple[Key, list[str | None]]]]:
        """The forms by their text with "#" for numbers, each with these; None for one that may be any."""
        result: dict[str, list[tuple[Key, list[str | None]]]] = {}
        for form in dict.fromkeys(form for group in self.groups for form in group.forms):
            text, numbers = _numbers_of(form)
            result.setdefault(text, []).append((form, numbers))
        return result

    def first_numbers(self, before: str) -> list[int]:
        """The least numbers that templates have right behind some text, one for each that has any."""
        keys = (k for group in self.groups for k in (*group.required.values(), *group.optional.values()))
        fields = (key.parts[1] for key in keys if len(key.parts) > 1 and key.parts[0] == before)
        return [field.offset for field in fields if isinstance(field, Field) and not field.labels]

    def required(self, met: frozenset[Key]) -> dict[Key, Key]:
        """What a model must have that has the names in `met`.

        Of groups of layers that differ in some names, only those count of which such a name is there; where
        that is none, all of them.
        """
        first, *layers = self.groups
        own = [group.forms.difference(*(o.forms for o in layers if o is not group)) for group in layers]
        live = [group for group, forms in zip(layers, own, strict=True) if not forms or forms & met]
        return {form: key for group in (first, *(live or layers)) for form, key in group.required.items()}


def family_keys(family: Family, view: MaxTextView) -> tuple[FamilyKeys, ...]:
    """The family's key templates as such a tree would write them, in each of the ways there are."""
    return _known_keys(family, view.is_maxtext, (view.scan_axis or 0) if view.is_stacked else None)


def hub_keys(family: Family) -> tuple[FamilyKeys, ...]:
    """Return the family's key templates as Hugging Face models spell them, one for each spelling."""
    return _known_keys(family, False, None)


# Those of all families take 40 ms, and each checkpoint is compared with all.
@lru_cache(maxsize=256)
def _known_keys(family: Family, is_maxtext: bool, scan_axis: int | None) -> tuple[FamilyKeys, ...]:
    return tuple(_keys_of(family, is_maxtext, scan_axis))


def _keys_of(family: Family, is_maxtext: bool, scan_axis: int | None) -> Iterator[FamilyKeys]:
    if is_maxtext:
        for layout in [family] if scan_axis is None else layouts_of(family):
            groups = _row_groups(layout, scan_axis)
            yield FamilyKeys(
                family, tuple(RowGroup.of([(a.left.key, b) for a, b in rows]) for rows in groups), ()
            )
        return
    groups = _row_groups(family, scan_axis)
    # A pattern with a number in it ignores some layers only; a configuration tells which.
    ignored = tuple(item for item in (*family.dropped, *family.homeless) if "{" not in item)
    for spelling in family.spellings:
        keys = (
            [(spelling.key(a.right.key), b) for a, b in rows if not isinstance(a.op, Fill)] for rows in groups
        )
        yield FamilyKeys(family, tuple(map(RowGroup.of, keys)), ignored)


def _row_groups(family: Family, scan_axis: int | None) -> list[list[tuple[Row, Row]]]:
    """The rows outside of layers, then those of each group of layers; each with its prefixes and without."""
    # A row below a group has the group's flags, too; here its own are what matters.
    # Layers of an incomplete cycle have the names of those in complete ones.
    known = [layer for layer in family.layers if layer.scanned]
    layers = [list(zip(item.all_rows(scan_axis), item.rows, strict=True)) for item in known]
    return [[(row, row) for row in family.rows], *layers]


def _forms_of(key: Key) -> Iterator[Key]:
    """What names of a key are matched with: one form, or where it has labels one for each."""
    choices: list[Sequence[str | Field]]
    choices = [(part,) if isinstance(part, str) else part.labels or (_ANY,) for part in key.parts]
    return (key_of(parts) for parts in product(*choices))


def _numbers_of(form: Key) -> tuple[str, list[str | None]]:
    """The text of a form with "#" for each number, and the numbers; None for one that may be any."""
    text, numbers = _split("".join(_OF_FIELD if isinstance(part, Field) else part for part in form.parts))
    return text, [None if _OF_FIELD in number else number for number in numbers]


def _split(name: str) -> tuple[str, list[str]]:
    """A name with "#" for each number, and the numbers."""
    pieces = _NUMBER.split(name)
    return "#".join(pieces[::2]), pieces[1::2]


def numberless(name: str) -> str:
    """A name with "#" for each number."""
    return _split(name)[0]


def alike(names: Iterable[str], keys: Iterable[FamilyKeys]) -> dict[Alike, list[str]]:
    """The names by what they have in common; only numbers count that some template has as they are."""
    fixed: dict[str, set[int]] = {}
    for text, forms in (item for key in keys for item in key.by_text.items()):
        locations = (k for _, numbers in forms for k, number in enumerate(numbers) if number is not None)
        fixed.setdefault(text, set()).update(locations)
    result: dict[Alike, list[str]] = {}
    for name in names:
        text, kept = _split(name)
        as_they_are = fixed.get(text)
        common: tuple[str | None, ...] = (None,) * len(kept)
        if as_they_are:
            common = tuple(number if k in as_they_are else None for k, number in enumerate(kept))
        result.setdefault((text, common), []).append(name)
    return result
