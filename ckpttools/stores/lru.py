"""What was read last, kept in memory within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=Hashable)
# Whoever looks into a document reads all of it, some several times. The index of 91,000 tensors has 9 MB.
_DOCUMENT, _LARGEST_DOCUMENT = ".json", 16 << 20


def is_document(key: str, size: int) -> bool:
    """Whether all of a file is worth keeping once any of it is read."""
    return key.endswith(_DOCUMENT) and size <= _LARGEST_DOCUMENT


class ByteCache(Generic[_Name]):
    """Bytes by name, those that were used last; for many threads at once.

    Args:
        limit: bytes that are kept at most.
    """

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._lock = threading.Lock()
        self._found: OrderedDict[_Name, bytes] = OrderedDict()
        self._nbytes = 0

    def get(self, name: _Name) -> bytes:
        """What has this name; empty if nothing is kept of it."""
        with self._lock:
            if name in self._found:
                self._found.move_to_end(name)
            return self._found.get(name, b"")

    def put(self, name: _Name, content: bytes) -> None:
        with self._lock:
            self._nbytes += len(content) - len(self._found.pop(name, b""))
            self._found[name] = content
            while self._nbytes > self._most:
                self._nbytes -= len(self._found.popitem(last=False)[1])
