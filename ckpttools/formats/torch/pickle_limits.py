"""Memory limits for the values of a pickle, proportional to its length.

A single byte of a pickle can create an empty set of 216 bytes, and keys with equal hashes make a dictionary
as slow as a list. The values that torch writes count as 20 to 40 times the pickle's length, which is an upper
bound of their memory.
"""

from __future__ import annotations

from typing import Any

from ckpttools.core.dataclass import dataclass

_FREE, _PER_BYTE = 64 << 20, 64
_MOST_NAMES, _MOST_TUPLES = 10_000, 10_000
# Python's hash of an integer is its remainder modulo this number, so larger integers can be chosen to
# collide.
_HASHED_APART = (1 << 61) - 1
# Bytes of memory per instruction (CPython 3.11): the object and its reference on the stack or in the memo.
# Sets take 216 bytes; they are rare and counted higher because nothing else takes as much per byte.
_COSTS = {
    **dict.fromkeys(b"(", 44),
    **dict.fromkeys(b"JMG\x8a\x8b", 56),
    **dict.fromkeys(b"XTUBC\x8c\x8d\x8e\x96", 72),
    **dict.fromkeys(b"})]ltd\x85\x86\x87", 88),
    **dict.fromkeys(b"\x8f\x91", 1000),
    **dict.fromkeys(b"qr\x94", 110),
    **dict.fromkeys(b"R\x81\x92", 300),
    **dict.fromkeys(b"Q", 80),
    **dict.fromkeys(b"s", 110),
    **dict.fromkeys(b"c", 64),
}
COSTS = tuple(_COSTS.get(code, 16) for code in range(256))
PER_ITEM = 60


class TooMuchError(Exception):
    """The values exceed what a valid pickle of this length needs."""


@dataclass(slots=True)
class Limits:
    """The remaining memory budget of a pickle."""

    memory: int
    copies: int
    tuples: int = _MOST_TUPLES

    @classmethod
    def of(cls, nbytes: int) -> Limits:
        return cls(_FREE + _PER_BYTE * nbytes, nbytes)

    def take(self, nbytes: int) -> None:
        self.memory -= nbytes
        if self.memory < 0:
            raise TooMuchError("its values take far more memory than its length allows")

    def copy(self, count: int) -> None:
        """Account for copied items, because a small pickle may request the same copies again and again."""
        self.copies -= count
        if self.copies < 0:
            raise TooMuchError("more copies than its length allows")

    def check_names(self, count: int) -> None:
        if count > _MOST_NAMES:
            raise TooMuchError(f"more than {_MOST_NAMES:,} classes and functions")

    def check_key(self, key: Any) -> None:
        """Limit the number and size of keys whose hashes can be chosen to collide."""
        members = key if isinstance(key, tuple) else (key,)
        if any(isinstance(member, int) and abs(member) >= _HASHED_APART for member in members):
            raise TooMuchError("an integer of more than 60 bits used as a key")
        self.tuples -= isinstance(key, tuple)
        if self.tuples < 0:
            raise TooMuchError(f"more than {_MOST_TUPLES:,} tuples used as keys")
