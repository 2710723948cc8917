"""Parse JSON documents of limited depth, from texts or files."""

from __future__ import annotations

import json
import reprlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.formats.lookalikes import refuse_pointer
from ckpttools.stores.location import Location

# Maximum depth that recursive code, such as Python's own JSON encoder, can handle.
DEEPEST = 200

Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs: Pairs | None = None, *, is_walked: bool = True) -> Any:
    """Parse a JSON text and return its value.

    Args:
        text: The text, in UTF-8 if it is bytes.
        pairs: Builds each object from its keys and values, as in `json.loads`.
        is_walked: Whether the caller may recurse into the document. If not, its depth is not checked, which
            saves a third of the reading time.

    Raises:
        ValueError: The text is not JSON, is nested too deep, or has strings that are not Unicode.
    """
    text = text if isinstance(text, str) else text.removeprefix(BOM_UTF8).decode()
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if is_walked and is_deep(value):
        raise ValueError(_TOO_DEEP)
    # An unpaired surrogate can only be written as an escape; such a name can be neither displayed nor stored.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"an unpaired surrogate, \\u{ord(error.object[error.start]):x}") from None
    return value


_TOO_DEEP = f"nested more than {DEEPEST} levels deep"


_CONTAINERS = (dict, list)


def is_deep(value: object) -> bool:
    """Return whether a value is nested deeper than `DEEPEST` levels."""
    level: list[dict[Any, Any] | list[Any]] = [[value]]
    for _ in range(DEEPEST + 1):
        inside = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in inside if isinstance(item, _CONTAINERS)]
        if not level:
            return False
    return True


def read_json(path: Location, *, is_walked: bool = True) -> dict[str, Any]:
    """Read a JSON object from a file; `is_walked` is as for `parse_json`.

    Raises:
        StorageError: The file cannot be read.
        FormatError: The file is not a JSON object.
    """
    text = path.read_bytes()
    try:
        document = parse_json(text, is_walked=is_walked)
    except ValueError as error:
        refuse_pointer(text, str(path), FormatError)
        raise FormatError("not a JSON file", location=path, got=error) from error
    if not isinstance(document, dict):
        raise FormatError("not a JSON object", location=path, got=type(document).__name__)
    return document


class _UnusableError(ValueError):
    """Raised for valid JSON that cannot be used, such as duplicate keys."""


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary and reject duplicate keys; the default for `json_object`."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    duplicates = [repr(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    raise _UnusableError(f"duplicate key {', '.join(duplicates[:5])}")


def json_object(
    raw: bytes | bytearray,
    location: str,
    kind: type[CheckpointError],
    hint: str,
    make: Callable[[list[tuple[str, Any]]], Any] | None = reject_duplicates,
) -> dict[str, Any]:
    """Parse `raw` and return its JSON object.

    Args:
        raw: UTF-8 text.
        location: Where `raw` was read from, for messages, which append line and column.
        kind: The class of error to raise.
        hint: The hint of the error.
        make: Builds an object from its keys and values; None for a dictionary that allows duplicate keys.

    Raises:
        CheckpointError: `raw` is not UTF-8, not JSON or not an object. The class is `kind`.
    """
    try:
        value = parse_json(raw.decode("utf-8"), make)
    except UnicodeDecodeError as error:
        where = _line_and_column(raw, error.start)
        message, got = "not UTF-8 text", f"byte 0x{raw[error.start]:02x}"
    except json.JSONDecodeError as error:
        where = f":{error.lineno}:{error.colno}"
        message, got = f"not JSON: {error.msg}", repr(error.doc[error.pos : error.pos + 30] or "the end")
    except ValueError as error:
        where, message, got = "", f"not usable JSON: {error}", None
    else:
        if isinstance(value, dict):
            return value
        where, message, got = ":1:1", "JSON, but not an object", reprlib.repr(value)
    refuse_pointer(raw, location, kind)
    raise kind(message, location=location + where, got=got, expected="a JSON object in UTF-8", hint=hint)


def _line_and_column(raw: bytes | bytearray, position: int) -> str:
    """Format a byte position as ":line:column", both counted from one."""
    before = raw[:position]
    return f":{before.count(10) + 1}:{position - before.rfind(10)}"
