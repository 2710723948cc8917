"""Values of a parsed TOML or JSON file with their types checked: errors say where in the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpttools.core.errors import MappingError, did_you_mean

Reader = Callable[[Any, str], Any]
"""Makes of a value what it stands for; the second argument is its place, for messages."""

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a table",
    type(None): "null",
}


def fields(readers: Mapping[str, Reader], required: tuple[str, ...] = ()) -> Reader:
    """A reader of tables with known keys: a dict of what each key's own reader makes.

    Args:
        readers: the keys that there may be.
        required: those that there must be.
    """

    def read(value: object, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _of_another_kind(value, "a table", place.removesuffix(":"))
        for key in value:
            if key not in readers:
                raise _unknown(key, readers, place.removesuffix(":"))
        for key in required:
            if key not in value:
                wanted = ", ".join(required)
                raise MappingError(
                    f"the key {key!r} is missing", place=place.removesuffix(":"), wanted=wanted
                )
        return {key: readers[key](each, place_of_key(place, key)) for key, each in value.items()}

    return read


def place_of_key(place: str, key: str) -> str:
    """The place of a key: `my.toml: sizes` in a file, `my.toml: sizes.layer` in a table."""
    return f"{place}{' ' if place.endswith(':') else '.'}{key}"


def _unknown(key: str, known: Mapping[str, Reader], place: str) -> MappingError:
    return MappingError(
        f"unknown key {key!r}",
        place=place,
        wanted="one of " + ", ".join(known),
        hint=did_you_mean(key, known),
    )


def mapping(reader: Reader) -> Reader:
    """A reader of tables whose keys are free."""

    def read(value: object, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _of_another_kind(value, "a table", place)
        return {key: reader(each, place_of_key(place, key)) for key, each in value.items()}

    return read


def list_of(reader: Reader) -> Reader:
    """A reader of lists, which become tuples."""

    def read(value: object, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _of_another_kind(value, "a list", place)
        return tuple(reader(each, f"{place}[{number}]") for number, each in enumerate(value))

    return read


def text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _of_another_kind(value, "a text", place)
    return value


def text_or_texts(value: object, place: str) -> tuple[str, ...]:
    """One text is as good as a list of one."""
    found: tuple[str, ...] = list_of(text)([value] if isinstance(value, str) else value, place)
    return found


def truth(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        raise _of_another_kind(value, "true or false", place)
    return value


def length(value: object, place: str) -> int:
    """A whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _of_another_kind(value, "a whole number", place)
    if value < 1:
        raise MappingError("not a length", place=place, got=value, wanted="at least 1")
    return value


def scalar(value: object, place: str) -> object:
    if not isinstance(value, bool | int | float | str):
        raise _of_another_kind(value, "a text, a number, true or false", place)
    return value


def _of_another_kind(value: object, wanted: str, place: str) -> MappingError:
    kind = _KINDS.get(type(value), "a date or time")
    shown = kind if isinstance(value, list | dict) else f"{kind}, {value!r}"
    return MappingError("a value of the wrong type", place=place, got=shown, wanted=wanted)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Within it, a `MappingError` says where in the file it is; its own place is what was got."""
    try:
        yield
    except MappingError as error:
        got = ", ".join(each for each in (error.place, error.got) if each) or None
        raise MappingError(
            error.message, place=place, got=got, wanted=error.wanted, hint=error.hint
        ) from None


def pairs(text: str) -> Iterator[tuple[str, Any]]:
    """The words `NAME=JSON` of a text, taken apart."""
    for word in text.split():
        name, _, value = word.partition("=")
        yield name, json.loads(value)
