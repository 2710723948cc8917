"""The pickle virtual machine: its stack, memo and instruction position."""

from __future__ import annotations

import struct
from typing import Any

from ckpttools.formats.torch.pickle_limits import Limits
from ckpttools.formats.torch.pickled import DamagedPickleError, Global, Persistent, Record

_KEYS = (str, int, float, bytes, Record, Global, Persistent)


class Machine:
    """The state of the machine; `pickle_instructions` implements the instructions."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.limits = Limits.of(len(data))

    def take(self, length: int) -> bytes:
        """Consume and return the next bytes of the program."""
        start, stop = self.at, self.at + length
        if stop > len(self.data):
            raise DamagedPickleError("it is truncated")
        self.at = stop
        return self.data[start:stop]

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop(self) -> Any:
        """Pop the top of the stack, above the last mark."""
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("the stack is empty above the mark")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        result = self.stack[start:]
        del self.stack[start:]
        return result

    def top(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise DamagedPickleError("the stack is empty above the mark")
        return self.stack[-1]

    def named(self, module: object, name: object) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedPickleError("a name that is not a string")
        self.limits.check_names(len(self.globals))
        return self.globals.setdefault((module, name), Global(module, name))

    def key(self, value: Any) -> Any:
        """Check that a mapping key or set member has a type that compares in constant time, and return it."""
        members = value if isinstance(value, tuple) else (value,)
        if not all(member is None or isinstance(member, _KEYS) for member in members):
            raise DamagedPickleError(f"a {type(value).__name__} used as a key")
        if type(value) is not str:
            self.limits.check_key(value)
        return value
