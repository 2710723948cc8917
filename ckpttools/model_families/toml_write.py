"""Write a family as a TOML file, the inverse of `family_from_file`, as a start for a custom family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count, groupby

from ckpttools.core.errors import MappingError
from ckpttools.mapping.row import Layers, Row, rows_text
from ckpttools.mapping.row import row as parse_row
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.family import PLAIN, Family, FlagRule, Spelling, UnsupportedPart

Rows = tuple[Row, ...]
_WIDTH = 100
_QUOTES = "'''"


def family_to_toml(family: Family) -> str:
    """Return a text from which `family_from_toml` creates the same family.

    Raises:
        MappingError: A row cannot be written as text, because of its value op or spaces in a name.
    """
    sets = _shared_rows(family.layers)
    lines = [
        f"name = {_value(family.name)}",
        *_entries(
            {
                "model_types": family.model_types,
                "models": family.models,
                "dropped": family.dropped,
                "left_out": family.left_out,
                "no_scan_reason": family.no_scan_reason,
                "unscanned_with_towers": family.unscanned_with_towers,
                "towers": family.towers,
            }
        ),
        *_rows("rows", family.rows),
        *_settings(family.settings),
        *_table("sizes", family.sizes),
        *_table("derived", family.derived),
        *_table("constants", family.constants),
        *(line for name, rule in family.flags.items() for line in _fields("flags", name, rule)),
        *(line for name, part in family.parts.items() for line in _fields("parts", name, part)),
        *(line for name, rule in family.others.items() for line in _fields("others", name, rule)),
        *_table("maxtext_vocab", {str(rows): expected for rows, expected in family.maxtext_vocab.items()}),
        *_table("hints", family.hints),
        *(
            line
            for spelling in family.spellings
            for line in _write_spelling(spelling)
            if family.spellings != (PLAIN,)
        ),
        *(["", "[sets]"] if sets else []),
        *(line for rows, name in sets.items() for line in _rows(_key(name), rows)),
        *(line for group in family.layers for line in _layers(group, family.layers, sets)),
    ]
    return "\n".join(lines) + "\n"


def _shared_rows(layers: Sequence[Layers]) -> dict[Rows, str]:
    """Return names for rows that groups of layers share, and for the other rows of those groups."""
    runs = [_runs(group, layers) for group in layers]
    times = [rows for run in runs for rows in set(run)]
    sets: dict[Rows, str] = {}
    for group, item in zip(layers, runs, strict=True):
        if not any(times.count(rows) > 1 for rows in item):
            continue
        for rows in item:
            stem = "shared" if times.count(rows) > 1 else _stem(group)
            sets.setdefault(rows, _free(stem, set(sets.values())))
    return sets


def _runs(group: Layers, layers: Sequence[Layers]) -> list[Rows]:
    """Split a group's rows where the set of groups that share them changes."""
    runs = groupby(group.rows, key=lambda row: tuple(row in other.rows for other in layers))
    return [tuple(rows) for _, rows in runs]


def _stem(group: Layers) -> str:
    """Return the last word of a group's name in a scanned model."""
    return group.scanned.split("{")[0].rstrip("_").rpartition(".")[2] or "layers"


def _free(stem: str, taken: set[str]) -> str:
    names = (stem if number == 1 else f"{stem}_{number}" for number in count(1))
    return next(name for name in names if name not in taken)


def _layers(group: Layers, layers: Sequence[Layers], sets: Mapping[Rows, str]) -> Iterator[str]:
    yield from ("", "[[layers]]")
    yield from _entries({"right": group.right, "left": group.left, "scanned": group.scanned})
    yield f"stacked = {_value(group.stacked)}"
    yield from _entries({"when": group.when, "unless": group.unless})
    runs = _runs(group, layers)
    if all(rows in sets for rows in runs):
        yield f"rows = {_value([sets[rows] for rows in runs])}"
    else:
        yield from _rows("rows", group.rows)


def _rows(name: str, rows: Rows) -> Iterator[str]:
    """Yield the rows as a text with one row per line."""
    for row in rows:
        if parse_row(text := str(row)) != row:
            raise MappingError(
                "this row cannot be written as text", got=text, hint="remove the spaces from names"
            )
    lines = rows_text(rows, _WIDTH).split("\n") if rows else []
    yield "\n".join([f'{name} = """', *(_value(line)[1:-1] for line in lines), '"""'])


def _settings(rules: SettingRules) -> Iterator[str]:
    """Yield the rules as a literal string, because they contain many quotes."""
    text = str(rules)
    if _QUOTES in text:
        raise MappingError("TOML cannot contain this text as a literal string", got=_QUOTES)
    if text:
        yield f"settings = {_QUOTES}\n{text}\n{_QUOTES}"


def _fields(table: str, name: str, rule: FlagRule | UnsupportedPart) -> Iterator[str]:
    yield from ("", f"[{table}.{_key(name)}]")
    yield from _entries({field.name: getattr(rule, field.name) for field in fields(rule)})


def _write_spelling(spelling: Spelling) -> Iterator[str]:
    yield from ("", "[[spellings]]", f"name = {_value(spelling.name)}")
    yield from _entries(
        {
            "model_types": spelling.model_types,
            "architecture": spelling.architecture,
            "without": spelling.without,
        }
    )
    yield from _table("spellings.prefixes", spelling.prefixes, gap=False)
    yield from _table("spellings.inner", spelling.inner, gap=False)
    yield from _table("spellings.defaults", spelling.defaults, gap=False)


def _table(name: str, values: Mapping[str, object], gap: bool = True) -> Iterator[str]:
    if values:
        yield from [""] * gap
        yield f"[{name}]"
        yield from (_entry(_key(key), value) for key, value in values.items())


def _entries(values: Mapping[str, object]) -> Iterator[str]:
    """Yield the non-empty keys and values."""
    for key, value in values.items():
        if value not in ("", (), False):
            yield _entry(key, value)


def _entry(key: str, value: object) -> str:
    line = f"{key} = {_value(value)}"
    return line if len(line) <= _WIDTH or not isinstance(value, tuple) else _long(key, value)


def _long(key: str, values: Sequence[object]) -> str:
    return "\n".join([f"{key} = [", *(f"    {_value(value)}," for value in values), "]"])


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if plain else _value(name)


def _value(value: object) -> str:
    """Format a value as TOML: JSON syntax, except for one character that TOML requires to be escaped."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    # TOML allows characters that control a terminal, such as C1 codes and bidirectional overrides.
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
