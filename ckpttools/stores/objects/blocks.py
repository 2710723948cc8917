"""Blocks of objects that were read: headers, indexes and short runs of an array share their requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

SIZE = 256 << 10
"""Bytes of a block. The header of a shard with 1,500 tensors fits into one."""
MOST_BYTES = 32 << 20
"""Bytes of all blocks that are kept."""

Fetch: TypeAlias = Callable[[int, memoryview], None]
"""Fills a buffer with an object's bytes from one on."""


class Blocks:
    """The blocks that were used last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def read_into(self, name: tuple[str, str], size: int, start: int, out: memoryview, fetch: Fetch) -> None:
        """Fills `out` with the bytes of an object from `start` on; errors as `fetch`.

        Args:
            name: key and version of the object.
            size: its length in bytes.
            start: first byte wanted.
            out: shorter than a block.
            fetch: reads what is not here, whole blocks in one request.
        """
        stop = start + len(out)
        first, last = start // SIZE, (stop - 1) // SIZE
        blocks = {number: self._taken((*name, number)) for number in range(first, last + 1)}
        missing = [number for number, block in blocks.items() if block is None]
        if missing:
            begin = missing[0] * SIZE
            fetched = bytearray(min(size, (missing[-1] + 1) * SIZE) - begin)
            fetch(begin, memoryview(fetched))
            for number in missing:
                at = number * SIZE - begin
                blocks[number] = self._kept((*name, number), bytes(fetched[at : at + SIZE]))
        for number, block in blocks.items():
            assert block is not None
            begin, end = max(start, number * SIZE), min(stop, (number + 1) * SIZE)
            out[begin - start : end - start] = block[begin - number * SIZE : end - number * SIZE]

    def _taken(self, name: tuple[str, str, int]) -> bytes | None:
        with self._lock:
            if name in self._blocks:
                self._blocks.move_to_end(name)
            return self._blocks.get(name)

    def _kept(self, name: tuple[str, str, int], block: bytes) -> bytes:
        with self._lock:
            self._nbytes += len(block) - len(self._blocks.get(name, b""))
            self._blocks[name] = block
            while self._nbytes > MOST_BYTES:
                self._nbytes -= len(self._blocks.popitem(last=False)[1])
        return block
