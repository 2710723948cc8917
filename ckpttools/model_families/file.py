"""Load a family from a user's file: TOML, or Python with `FAMILY = Family(...)`.

Rows that several groups of layers share may be in `[sets]`, each set under a name; a list of rows may
refer to these names. Nothing in a TOML file is executed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from runpy import run_path
from traceback import extract_tb

from ckpttools.core.errors import FormatError, MappingError, UsageError, did_you_mean, system_error
from ckpttools.core.user_code import check_code
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.axes import parse_side
from ckpttools.mapping.documents import (
    Reader,
    add_location,
    fields,
    length,
    list_of,
    mapping,
    scalar,
    text,
    text_or_texts,
    truth,
)
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.row import Layers, Row, rows
from ckpttools.mapping.row_text import ARROW, parse_op
from ckpttools.mapping.settings import SettingRules, setting_rules
from ckpttools.mapping.sizes import Alternatives
from ckpttools.mapping.values import ValueOp
from ckpttools.model_families.family import Family, FlagRule, Spelling, UnsupportedPart
from ckpttools.model_families.registry import SUFFIXES

_NAME = "FAMILY"


def family_from_file(path: Path) -> Family:
    """Load a family from a file. Python files are executed; TOML files are only parsed.

    Raises:
        StorageError: The file cannot be read.
        UsageError: The file is neither TOML nor Python.
        CodeNotAllowedError: Only a plan, not the user, names the Python file.
        FormatError: The file is not valid TOML, or running it fails. The message names the line.
        MappingError: The file does not describe a family.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError("a family is described in a file that ends in .toml or .py", got=path)
    if path.suffix == ".py":
        check_code("family", str(path))
    content = _content(path)
    family = family_from_toml(content, str(path)) if path.suffix == ".toml" else _run(path)
    for scan_axis in (None, 1):
        with add_location(str(path)):
            family.all_rows(scan_axis)
    return family


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise system_error("cannot read", path, error, "check the path") from error
    except UnicodeDecodeError as error:
        raise FormatError("not a text file in UTF-8", location=path, got=error) from error


def _run(path: Path) -> Family:
    """Run a Python file and return its FAMILY."""
    try:
        names = run_path(str(path), run_name="ckpttools_family_file")
    except MappingError as error:
        with add_location(_line(error, path)):
            raise
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        raise FormatError("running the file fails", location=_line(error, path), got=got) from error
    family = names.get(_NAME)
    if isinstance(family, Family):
        return family
    family_names = [name for name, value in names.items() if isinstance(value, Family)]
    got = (
        f"{_NAME} of type {type(family).__name__}"
        if _NAME in names
        else ", ".join(family_names) or "no family"
    )
    raise MappingError(
        "the file does not define a family", location=path, got=got, expected=f"{_NAME} = Family(...)"
    )


def _line(error: BaseException, path: Path) -> str:
    """Return the file name with the line at which running the file failed."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f"{path}, line {lines[-1]}" if lines else str(path)


Rows = tuple[Row, ...]
Sets = Mapping[str, Rows]


def family_from_toml(content: str, location: str) -> Family:
    """Return the family that a file describes.

    Args:
        content: The content of the file.
        location: Name of the file, for messages.

    Raises:
        FormatError: The content is not valid TOML.
        MappingError: The content does not describe a family. The message names the table, the key, the value
            and the expected value.
    """
    try:
        document = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError("not a TOML file", location=location, got=error) from error
    sets = mapping(partial(_rows, {}))(document.get("sets", {}), f"{location}: sets")
    entries = fields(_family_readers(sets), required=("name", "rows"))(document, f"{location}:")
    entries.pop("sets", None)
    return Family(**{"model_types": (), "models": (), "layers": (), "sizes": {}, **entries})


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
        "no_scan_reason": text,
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
        # Sets are read first, because other entries refer to them.
        "sets": lambda *_: sets,
    }


def _part(value: object, location: str) -> UnsupportedPart:
    readers: Mapping[str, Reader] = {"keys": list_of(_key), "promise": text_or_texts, "idle": truth}
    return UnsupportedPart(**fields(readers, required=("keys",))(value, location))


def _alternatives(value: object, location: str) -> Alternatives:
    """Read names of configuration fields, with an optional default length at the end."""
    items = value if isinstance(value, list) else [value]
    default = items[-1] if items and isinstance(items[-1], int) and not isinstance(items[-1], bool) else None
    names = text_or_texts(items if default is None else items[:-1], location)
    if not names or (default is not None and default < 0):
        raise MappingError(
            "this does not give a length",
            location=location,
            got=value,
            expected="names of configuration fields, with an optional default number at the end",
            hint="move a length that all models share to [constants]",
        )
    return names if default is None else (*names, default)


def _formula(value: object, location: str) -> str:
    formula = text(value, location)
    with add_location(location):
        axes_in(formula)
    return formula


def _key(value: object, location: str) -> str:
    template = text(value, location)
    with add_location(location):
        parse_key(template)
    return template


def _settings(value: object, location: str) -> SettingRules:
    lines = text(value, location)
    with add_location(location):
        return setting_rules(lines)


def _op(value: object, location: str) -> ValueOp:
    described = text(value, location)
    with add_location(location):
        return parse_op(described)


def _flag(value: object, location: str) -> FlagRule:
    readers: Mapping[str, Reader] = {
        "field": text_or_texts,
        "equals": list_of(scalar),
        "default": truth,
        "remedy": text,
        "by_arrays": truth,
    }
    return FlagRule(**{"field": (), **fields(readers)(value, location)})


def _spelling(value: object, location: str) -> Spelling:
    readers: Mapping[str, Reader] = {
        "prefixes": mapping(text),
        "inner": mapping(text),
        "model_types": list_of(text),
        "name": text,
        "architecture": text,
        "without": list_of(text),
        "defaults": mapping(scalar),
    }
    return Spelling(**fields(readers)(value, location))


def _vocabularies(value: object, location: str) -> dict[int, int]:
    vocabularies = mapping(length)(value, location)
    for key in vocabularies:
        if not key.isdecimal():
            raise MappingError("not a number of rows", location=location, got=key, expected="an integer")
    return {int(key): rows for key, rows in vocabularies.items()}


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


def _rows(sets: Sets, value: object, location: str) -> Rows:
    """Read rows from a text with one row per line, or from a list of such texts, tables and set names."""
    if isinstance(value, str):
        return _rows_from_text(value, location)
    row_groups: tuple[Rows, ...] = list_of(partial(_row_or_set, sets))(value, location)
    return tuple(item for rows in row_groups for item in rows)


def _rows_from_text(value: str, location: str) -> Rows:
    with add_location(location):
        return rows(value)


def _rows_from_table(value: Mapping[str, object], location: str) -> Rows:
    left = value.get("left")
    named = f"{location} ({left})" if isinstance(left, str) else location
    entries = fields(_ROW, required=_SIDES)(value, named)
    with add_location(named):
        left, right = (
            parse_side(entries.pop(side), entries.pop(f"{side}_axes")) for side in ("left", "right")
        )
        return (Row(left, right, **entries),)


def _row_or_set(sets: Sets, value: object, location: str) -> Rows:
    if isinstance(value, dict):
        return _rows_from_table(value, location)
    named = text(value, location)
    if named in sets:
        return sets[named]
    if ARROW in named:
        return _rows_from_text(named, location)
    raise MappingError(
        f"unknown set of rows {named!r}",
        location=location,
        expected="one of " + ", ".join(sets) if sets else "rows, or a set in [sets]",
        hint=did_you_mean(named, sets),
    )


def _layers(sets: Sets, value: object, location: str) -> Layers:
    readers: Mapping[str, Reader] = {
        "right": _key,
        "left": _key,
        "scanned": _key,
        "stacked": list_of(text),
        "rows": partial(_rows, sets),
        "when": text,
        "unless": text,
    }
    entries = fields(readers, required=("right", "left", "stacked", "rows"))(value, location)
    group = Layers(**{"scanned": "", **entries})
    for scan_axis in (None, 1):
        with add_location(location):
            list(group.all_rows(scan_axis))
    return group
