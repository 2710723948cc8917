"""Read msgpack by byte ranges, leaving large values in the file.

Format: https://github.com/msgpack/msgpack/blob/master/spec.md. The number of values, their nesting and their
lengths are limited, regardless of what a file declares.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.formats.json_file import DEEPEST
from ckpttools.stores.base import File

_WINDOW = 64 << 10
_MAX_VALUES, _LONGEST_TEXT = 2_000_000, 1 << 20


class DamagedError(Exception):
    """The bytes are not valid msgpack, are truncated, or declare values that no program writes."""


@dataclass(frozen=True, slots=True)
class Span:
    """The byte range of an unread value: offset in the file, and length."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extension:
    """A value of an application-defined type."""

    code: int
    span: Span


class Reader:
    """Reads consecutive values from a byte range of a file.

    Args:
        file: The file.
        start, stop: The byte range; by default the full file.
        values: The remaining number of values, in a list that several readers may share.
    """

    def __init__(
        self, file: File, start: int = 0, stop: int | None = None, values: list[int] | None = None
    ) -> None:
        self._file, self.at, self._stop = file, start, file.size if stop is None else stop
        self._left = [_MAX_VALUES] if values is None else values
        self._window, self._begin = b"", start

    @property
    def is_at_end(self) -> bool:
        return self.at >= self._stop

    def within(self, span: Span) -> Reader:
        """Return a reader of the values in a byte range, which count toward the same limit."""
        return Reader(self._file, span.start, span.start + span.nbytes, self._left)

    def value(self, depth: int = 0) -> Any:
        """Read the next value as a dictionary, list, number, text, None, `Span` or `Extension`.

        Raises:
            DamagedError: The bytes are not a valid value.
        """
        self._left[0] -= 1
        if self._left[0] < 0 or depth > DEEPEST:
            raise DamagedError(f"more than {_MAX_VALUES:,} values, or nested more than {DEEPEST} levels deep")
        code = self._take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code < 0x90:
            return self._mapping(code & 0x0F, depth)
        if code < 0xA0:
            return self._list(code & 0x0F, depth)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code in _SIZED:
            layout, kind = _SIZED[code]
            return kind(self, int(self._number(layout)), depth)
        if code in _FIXED:
            return self._extension(_FIXED[code], depth)
        raise DamagedError(f"no value starts with {code:#04x}")

    def _take(self, count: int) -> bytes:
        start = self.at
        if start + count > self._stop:
            raise DamagedError("it is truncated")
        if start < self._begin or start + count > self._begin + len(self._window):
            self._begin = start
            self._window = self._file.read(start, min(max(count, _WINDOW), self._stop - start))
        self.at = start + count
        return self._window[start - self._begin : self.at - self._begin]

    def _number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _text(self, count: int, depth: int = 0) -> str:
        if count > _LONGEST_TEXT:
            raise DamagedError(f"a text of {count:,} bytes")
        try:
            return self._take(count).decode()
        except UnicodeDecodeError as error:
            raise DamagedError("a text that is not UTF-8") from error

    def _bytes(self, count: int, depth: int = 0) -> Span:
        span = Span(self.at, count)
        self.at += count
        if self.at > self._stop:
            raise DamagedError("it is truncated")
        return span

    def _extension(self, count: int, depth: int = 0) -> Extension:
        (code,) = _SIGNED.unpack(self._take(1))
        return Extension(code, self._bytes(count))

    def _list(self, count: int, depth: int) -> list[Any]:
        self._check_count(count)
        return [self.value(depth + 1) for _ in range(count)]

    def _mapping(self, count: int, depth: int) -> dict[str | int, Any]:
        self._check_count(2 * count)
        result: dict[str | int, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if type(key) not in (str, int):
                raise DamagedError(f"a {type(key).__name__} used as a key")
            if key in result:
                raise DamagedError(f"duplicate key: {key!r}")
            result[key] = self.value(depth + 1)
        return result

    def _check_count(self, count: int) -> None:
        if count > self._stop - self.at:
            raise DamagedError("it is truncated")


_SIGNED = struct.Struct(">b")
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    **{0xCC + location: struct.Struct(f">{item}") for location, item in enumerate("BHIQbhiq")},
}
_Kind = Callable[[Reader, int, int], Any]
_SIZES = [struct.Struct(item) for item in (">B", ">H", ">I")]
_SIZED: dict[int, tuple[struct.Struct, _Kind]] = {
    **{0xC4 + location: (size, Reader._bytes) for location, size in enumerate(_SIZES)},
    **{0xC7 + location: (size, Reader._extension) for location, size in enumerate(_SIZES)},
    **{0xD9 + location: (size, Reader._text) for location, size in enumerate(_SIZES)},
    **{0xDC + location: (size, Reader._list) for location, size in enumerate(_SIZES[1:])},
    **{0xDE + location: (size, Reader._mapping) for location, size in enumerate(_SIZES[1:])},
}
_FIXED = {0xD4 + location: 1 << location for location in range(5)}
