"""A family out of a TOML file: the fields of `Family` and `Layers`, rows as text or tables; nothing else.

Rows that several groups of layers have may stand in `[sets]` under a name; in a list of rows it is all of
them. Nothing in such a file is run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import partial

from ckpttools.core.errors import FormatError, MappingError, did_you_mean
from ckpttools.families.family import Family, FlagRule, Spelling, UnsupportedPart
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.axes import parse_side
from ckpttools.mapping.documents import (
    Reader,
    fields,
    length,
    list_of,
    mapping,
    placed,
    scalar,
    text,
    text_or_texts,
    truth,
)
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.op_text import parse_op
from ckpttools.mapping.row import Row, rows
from ckpttools.mapping.row_text import ARROW
from ckpttools.mapping.settings import SettingRules, setting_rules
from ckpttools.mapping.sizes import Alternatives
from ckpttools.mapping.values import ValueOp

Rows = tuple[Row, ...]
Sets = Mapping[str, Rows]


def family_from_toml(content: str, place: str) -> Family:
    """The family that a file describes.

    Args:
        content: of the file.
        place: its name, for messages.

    Raises:
        FormatError: not TOML.
        MappingError: not a family; says in which table, under which key, what is there and what should be.
    """
    try:
        document = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError("not a TOML file", place=place, got=error) from error
    sets = mapping(partial(_rows, {}))(document.get("sets", {}), f"{place}: sets")
    found = fields(_family_readers(sets), required=("name", "rows"))(document, f"{place}:")
    found.pop("sets", None)
    return Family(**{"model_types": (), "models": (), "layers": (), "sizes": {}, **found})


def _family_readers(sets: Sets) -> dict[str, Reader]:
    return {
        "name": text,
        "model_types": list_of(text),
        "models": list_of(text),
        "sizes": mapping(_alternatives),
        "derived": mapping(_formula),
        "constants": mapping(length),
        "flags": mapping(_flag),
        "others": mapping(_flag),
        "never_scanned": text,
        "unscanned_with_towers": text,
        "dropped": list_of(text),
        "left_out": list_of(_key),
        "parts": mapping(_part),
        "towers": list_of(text),
        "spellings": list_of(_spelling),
        "maxtext_vocab": _vocabularies,
        "hints": mapping(text),
        "settings": _settings,
        "rows": partial(_rows, sets),
        "layers": list_of(partial(_layers, sets)),
        # Read before the others, which name them.
        "sets": lambda *_: sets,
    }


def _part(value: object, place: str) -> UnsupportedPart:
    readers: Mapping[str, Reader] = {"keys": list_of(_key), "promise": text_or_texts, "idle": truth}
    return UnsupportedPart(**fields(readers, required=("keys",))(value, place))


def _alternatives(value: object, place: str) -> Alternatives:
    """Configuration fields, at the end perhaps the length where none is there."""
    items = value if isinstance(value, list) else [value]
    default = items[-1] if items and isinstance(items[-1], int) and not isinstance(items[-1], bool) else None
    names = text_or_texts(items if default is None else items[:-1], place)
    if not names or (default is not None and default < 0):
        raise MappingError(
            "this gives no length",
            place=place,
            got=value,
            wanted="names of configuration fields, and at the end perhaps a number for where none is there",
            hint="a length that all models have belongs in [constants]",
        )
    return names if default is None else (*names, default)


def _formula(value: object, place: str) -> str:
    formula = text(value, place)
    with placed(place):
        axes_in(formula)
    return formula


def _key(value: object, place: str) -> str:
    template = text(value, place)
    with placed(place):
        parse_key(template)
    return template


def _settings(value: object, place: str) -> SettingRules:
    lines = text(value, place)
    with placed(place):
        return setting_rules(lines)


def _op(value: object, place: str) -> ValueOp:
    described = text(value, place)
    with placed(place):
        return parse_op(described)


def _flag(value: object, place: str) -> FlagRule:
    readers: Mapping[str, Reader] = {
        "field": text_or_texts,
        "equals": list_of(scalar),
        "default": truth,
        "remedy": text,
        "by_arrays": truth,
    }
    return FlagRule(**{"field": (), **fields(readers)(value, place)})


def _spelling(value: object, place: str) -> Spelling:
    readers: Mapping[str, Reader] = {
        "prefixes": mapping(text),
        "inner": mapping(text),
        "model_types": list_of(text),
        "name": text,
        "architecture": text,
        "without": list_of(text),
        "defaults": mapping(scalar),
    }
    return Spelling(**fields(readers)(value, place))


def _vocabularies(value: object, place: str) -> dict[int, int]:
    found = mapping(length)(value, place)
    for key in found:
        if not key.isdecimal():
            raise MappingError("not a number of rows", place=place, got=key, wanted="a whole number")
    return {int(key): rows for key, rows in found.items()}


_ROW: Mapping[str, Reader] = {
    "left": text,
    "left_axes": text,
    "right": text,
    "right_axes": text,
    "op": _op,
    "when": text,
    "unless": text,
    "above": text,
}
_SIDES = ("left", "left_axes", "right", "right_axes")


def _rows(sets: Sets, value: object, place: str) -> Rows:
    """Rows as the lines of a text, or a list of such texts, of tables and of names of sets, in any order."""
    if isinstance(value, str):
        return _of_text(value, place)
    found: tuple[Rows, ...] = list_of(partial(_row_or_set, sets))(value, place)
    return tuple(each for some in found for each in some)


def _of_text(value: str, place: str) -> Rows:
    with placed(place):
        return rows(value)


def _of_table(value: Mapping[str, object], place: str) -> Rows:
    left = value.get("left")
    named = f"{place} ({left})" if isinstance(left, str) else place
    said = fields(_ROW, required=_SIDES)(value, named)
    with placed(named):
        left, right = (parse_side(said.pop(side), said.pop(f"{side}_axes")) for side in ("left", "right"))
        return (Row(left, right, **said),)


def _row_or_set(sets: Sets, value: object, place: str) -> Rows:
    if isinstance(value, dict):
        return _of_table(value, place)
    named = text(value, place)
    if named in sets:
        return sets[named]
    if ARROW in named:
        return _of_text(named, place)
    raise MappingError(
        f"there is no set of rows {named!r}",
        place=place,
        wanted="one of " + ", ".join(sets) if sets else "rows, or a set that [sets] makes",
        hint=did_you_mean(named, sets),
    )


def _layers(sets: Sets, value: object, place: str) -> Layers:
    readers: Mapping[str, Reader] = {
        "right": _key,
        "left": _key,
        "scanned": _key,
        "stacked": list_of(text),
        "rows": partial(_rows, sets),
        "when": text,
        "unless": text,
    }
    stated = fields(readers, required=("right", "left", "stacked", "rows"))(value, place)
    found = Layers(**{"scanned": "", **stated})
    for scan_axis in (None, 1):
        with placed(place):
            list(found.all_rows(scan_axis))
    return found
