"""JSON documents: parsed as deep as anyone nests them, and read from files of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ckpttools.core.errors import FormatError
from ckpttools.stores.place import Place

# Whatever walks through a document by calling itself, as Python's own writer of JSON does, gets so far.
DEEPEST = 200

Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs: Pairs | None = None) -> Any:
    """The value of a JSON text.

    Args:
        text: in UTF-8, if it is bytes.
        pairs: makes each object, as `json.loads` calls it.

    Raises:
        ValueError: it is not JSON, nested too deep, or has strings that no text can hold.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if _is_deep(value):
        raise ValueError(_TOO_DEEP)
    # A lone surrogate can only be written as an escape; a name that has one can be neither shown nor stored.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a surrogate pair, \\u{ord(error.object[error.start]):x}") from None
    return value


_TOO_DEEP = f"nested more than {DEEPEST} levels deep"


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        below = [each for each in level if isinstance(each, dict | list)]
        if not below:
            return False
        level = [inner for each in below for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def read_json(path: Place) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        StorageError: the file cannot be read.
        FormatError: it holds no JSON object.
    """
    text = path.read_bytes()
    try:
        document = parse_json(text)
    except ValueError as error:
        raise FormatError("not a JSON file", place=path, got=error) from error
    if not isinstance(document, dict):
        raise FormatError("not a JSON object", place=path, got=type(document).__name__)
    return document
