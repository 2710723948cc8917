"""Rules out of a file of one's own, TOML or JSON with the same two keys.

    axes = [["embed", "fsdp"], ["mlp", "tensor"], ["vocab", ["tensor", "fsdp"]]]     as `logical_axis_rules`

    [arrays]
    "*/token_embedder/embedding" = "P('tensor', 'fsdp')"

`axes` may be a table, too, where each name comes once.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

from ckpttools.core.errors import FormatError, MappingError, UsageError
from ckpttools.formats.json_file import parse_json
from ckpttools.mapping.documents import fields, mapping, text
from ckpttools.sharding.rules import Rules, rules_from
from ckpttools.sharding.specs import Spec, parse_spec
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse


def read_rules(file: str) -> Rules:
    """The rules in a file.

    Raises:
        StorageError: it cannot be read.
        FormatError: it is not TOML or JSON.
        MappingError: it has other keys, or a value is no rule; says which.
    """
    place = parse(file)
    document = _document(place)
    try:
        found = fields({"axes": _axes, "arrays": mapping(_spec)})(document, f"{place}:")
        by_axes = rules_from(found.get("axes", ()), str(place))
    except UsageError as error:
        raise MappingError(
            error.message, place=error.place or place, got=error.got, wanted=error.wanted, hint=error.hint
        ) from error
    return replace(by_axes, arrays=tuple(found.get("arrays", {}).items()))


def _spec(value: object, place: str) -> Spec:
    return parse_spec(text(value, place))


def _document(place: Place) -> Any:
    content = place.read_bytes()
    try:
        return tomllib.loads(content.decode()) if place.suffix == ".toml" else parse_json(content)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if place.suffix == ".toml" else "JSON"
        raise FormatError(f"not a {kind} file", place=place, got=error) from error


def _axes(value: object, place: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        value = [[name, axes] for name, axes in value.items()]
    if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 2 for each in value):
        wanted = 'a list of pairs, [["embed", "fsdp"], ...], or a table'
        raise MappingError("not rules of axes", place=place, wanted=wanted)
    return [(name, axes) for name, axes in value]
