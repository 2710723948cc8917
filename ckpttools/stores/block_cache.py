"""A cache of object blocks, so that headers, indexes and short reads share requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
# Maximum size of a document. Readers read all of a document, some of them several times. The index of 91,000
# tensors takes 9 MB.
_DOCUMENT, _LARGEST_DOCUMENT = ".json", 16 << 20


def is_document(key: str, size: int) -> bool:
    """Return whether a file should be cached completely once any of it is read."""
    return key.endswith(_DOCUMENT) and size <= _LARGEST_DOCUMENT


class ByteCache(Generic[_Key]):
    """A thread-safe LRU cache of byte strings.

    Args:
        limit: Maximum total size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._contents: OrderedDict[_Key, bytes] = OrderedDict()
        self._nbytes = 0

    def get(self, name: _Key) -> bytes:
        """Return the bytes cached under a name; empty if the name is not cached."""
        with self._lock:
            if name in self._contents:
                self._contents.move_to_end(name)
            return self._contents.get(name, b"")

    def put(self, name: _Key, content: bytes) -> None:
        with self._lock:
            self._nbytes += len(content) - len(self._contents.pop(name, b""))
            self._contents[name] = content
            while self._nbytes > self._limit:
                self._nbytes -= len(self._contents.popitem(last=False)[1])


SIZE = 256 << 10
"""Size of a block in bytes; the header of a shard with 1,500 tensors fits in one block."""
MAX_BYTES = 32 << 20
"""Maximum total size of the cached blocks in bytes."""

# Number of preceding blocks that are checked to detect a sequential read. Half as many are read ahead, at
# most 2 MiB, which takes as long as one request.
_BLOCKS_AHEAD = 14
_Name: TypeAlias = tuple[str, str, int]
Fetch: TypeAlias = Callable[[int, memoryview], None]
"""Function that fills a buffer with an object's bytes from an offset."""


class BlockCache:
    """A thread-safe LRU cache of blocks; each block is requested by only one thread.

    Args:
        cache: The cache to use, which may be shared; None creates a separate one.
    """

    def __init__(self, cache: ByteCache[Any] | None = None) -> None:
        self._kept: ByteCache[_Name] = cache or ByteCache(MAX_BYTES)
        self._changed = threading.Condition()
        self._under_way: set[_Name] = set()

    def takes(self, key: str, size: int, length: int) -> bool:
        """Return whether a read of this length should use blocks."""
        return length < SIZE or is_document(key, size)

    def read_into(self, name: tuple[str, str], size: int, start: int, out: memoryview, fetch: Fetch) -> None:
        """Fill `out` with the bytes of an object from `start`; same errors as `fetch`.

        Args:
            name: Key and version of the object.
            size: Size of the object in bytes.
            start: Offset of the first byte to read.
            out: The destination; must be short unless the object should be cached completely.
            fetch: Reads uncached bytes.
        """
        stop = start + len(out)
        numbers = range(start // SIZE, (stop - 1) // SIZE + 1)
        blocks, missing = self._find_blocks(name, size, numbers)
        if missing:
            try:
                blocks |= self._fetch_blocks(name, size, missing, fetch)
            finally:
                with self._changed:
                    self._under_way -= {(*name, number) for number in missing}
                    self._changed.notify_all()
        for number in numbers:
            begin, end = max(start, number * SIZE), min(stop, (number + 1) * SIZE)
            out[begin - start : end - start] = blocks[number][begin - number * SIZE : end - number * SIZE]

    def _find_blocks(
        self, name: tuple[str, str], size: int, numbers: range
    ) -> tuple[dict[int, bytes], range]:
        """Return the cached blocks and the blocks to request, for which other threads will wait."""
        with self._changed:
            while True:
                blocks = {number: self._kept.get((*name, number)) for number in numbers}
                missing = [number for number, block in blocks.items() if not block]
                if not missing:
                    return blocks, range(0)
                if all((*name, number) not in self._under_way for number in missing):
                    expected = self._blocks_to_request(name, size, missing)
                    self._under_way |= {(*name, number) for number in expected}
                    return blocks, expected
                # Another thread is requesting these blocks. If that fails, this thread requests them.
                self._changed.wait()

    def _blocks_to_request(self, name: tuple[str, str], size: int, missing: list[int]) -> range:
        """Return the blocks to request: the missing ones, and more after a sequential read."""
        last = (size - 1) // SIZE
        if is_document(name[0], size):
            return range(last + 1)
        begin, end = missing[0], missing[-1] + 1
        before = next(
            (n for n in range(_BLOCKS_AHEAD) if not self._is_known(name, begin - 1 - n)), _BLOCKS_AHEAD
        )
        # Do not request blocks that are cached or already requested.
        stops = (n for n in range(end, end + before // 2) if n > last or self._is_known(name, n))
        return range(begin, next(stops, end + before // 2))

    def _is_known(self, name: tuple[str, str], number: int) -> bool:
        return (*name, number) in self._under_way or bool(self._kept.get((*name, number)))

    def _fetch_blocks(
        self, name: tuple[str, str], size: int, numbers: range, fetch: Fetch
    ) -> dict[int, bytes]:
        begin = numbers[0] * SIZE
        fetched = bytearray(min(size, (numbers[-1] + 1) * SIZE) - begin)
        fetch(begin, memoryview(fetched))
        starts = ((number, number * SIZE - begin) for number in numbers)
        blocks = {number: bytes(memoryview(fetched)[at : at + SIZE]) for number, at in starts}
        for number, block in blocks.items():
            self._kept.put((*name, number), block)
        return blocks
