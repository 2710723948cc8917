"""Read typed values from a parsed TOML or JSON file; errors name their location in the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpttools.core.errors import MappingError, did_you_mean

Reader = Callable[[Any, str], Any]
"""Function that converts a parsed value; the second argument is its location, for messages."""

_KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
    type(None): "null",
}


def fields(readers: Mapping[str, Reader], required: tuple[str, ...] = ()) -> Reader:
    """Return a reader for tables with known keys, which applies each key's own reader.

    Args:
        readers: The allowed keys.
        required: The keys that must be present.
    """

    def read(value: object, location: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _type_error(value, "a table", location.removesuffix(":"))
        for key in value:
            if key not in readers:
                raise _unknown(key, readers, location.removesuffix(":"))
        for key in required:
            if key not in value:
                expected = ", ".join(required)
                raise MappingError(
                    f"the key {key!r} is missing", location=location.removesuffix(":"), expected=expected
                )
        return {key: readers[key](item, location_of_key(location, key)) for key, item in value.items()}

    return read


def location_of_key(location: str, key: str) -> str:
    """Return the location of a key: `my.toml: sizes` in a file, `my.toml: sizes.layer` in a table."""
    return f"{location}{' ' if location.endswith(':') else '.'}{key}"


def _unknown(key: str, known: Mapping[str, Reader], location: str) -> MappingError:
    return MappingError(
        f"unknown key {key!r}",
        location=location,
        expected="one of " + ", ".join(known),
        hint=did_you_mean(key, known),
    )


def mapping(reader: Reader) -> Reader:
    """Return a reader of tables with arbitrary keys."""

    def read(value: object, location: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _type_error(value, "a table", location)
        return {key: reader(item, location_of_key(location, key)) for key, item in value.items()}

    return read


def list_of(reader: Reader) -> Reader:
    """Return a reader of lists, which become tuples."""

    def read(value: object, location: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _type_error(value, "a list", location)
        return tuple(reader(item, f"{location}[{number}]") for number, item in enumerate(value))

    return read


def text(value: object, location: str) -> str:
    if not isinstance(value, str):
        raise _type_error(value, "a string", location)
    return value


def text_or_texts(value: object, location: str) -> tuple[str, ...]:
    """Read a string or a list of strings; a single string becomes a list with one item."""
    texts: tuple[str, ...] = list_of(text)([value] if isinstance(value, str) else value, location)
    return texts


def truth(value: object, location: str) -> bool:
    if not isinstance(value, bool):
        raise _type_error(value, "true or false", location)
    return value


def length(value: object, location: str) -> int:
    """Read an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _type_error(value, "an integer", location)
    if value < 1:
        raise MappingError("not a length", location=location, got=value, expected="at least 1")
    return value


def scalar(value: object, location: str) -> object:
    if not isinstance(value, bool | int | float | str):
        raise _type_error(value, "a string, a number, true or false", location)
    return value


def _type_error(value: object, expected: str, location: str) -> MappingError:
    kind = _KINDS.get(type(value), "a date or time")
    text = kind if isinstance(value, list | dict) else f"{kind}, {value!r}"
    return MappingError("a value of the wrong type", location=location, got=text, expected=expected)


@contextmanager
def add_location(location: str) -> Iterator[None]:
    """Add the file location to every `MappingError` in the block; the error's own location becomes `got`."""
    try:
        yield
    except MappingError as error:
        got = ", ".join(item for item in (error.location, error.raw.got) if item) or None
        raise MappingError(
            error.raw.message, location=location, got=got, expected=error.raw.expected, hint=error.raw.hint
        ) from None


def pairs(text: str) -> Iterator[tuple[str, Any]]:
    """Parse a text of `NAME=JSON` words."""
    for word in text.split():
        name, _, value = word.partition("=")
        yield name, json.loads(value)
