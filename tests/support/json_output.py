"""Outputs of `--json`, validated with the published schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from support.locations import DOCS

SCHEMAS = DOCS / "schemas"
COMMANDS: dict[str, list[str]] = json.loads((SCHEMAS / "commands.json").read_text())


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        json.loads((SCHEMAS / f"{name}.json").read_text()), format_checker=FormatChecker()
    )


def mismatches(name: str, value: Any) -> list[str]:
    """Return how a value differs from a schema."""
    return [f"{error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(value)]


def schemas_of(value: Any, names: Sequence[str]) -> list[str]:
    """Return the schemas that a value has; raise an error with the mismatches if it has none of them."""
    result = {name: mismatches(name, value) for name in names}
    assert [] in result.values(), result
    return [name for name, wrong in result.items() if not wrong]
