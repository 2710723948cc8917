"""Blocks of objects that were read: headers, indexes and short runs of an array share their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ckpttools.stores.kept import Kept, is_document

SIZE = 256 << 10
"""Bytes of a block. The header of a shard with 1,500 tensors fits into one."""
MOST_BYTES = 32 << 20
"""Bytes of all blocks that are kept."""

Fetch: TypeAlias = Callable[[int, memoryview], None]
"""Fills a buffer with an object's bytes from one on."""


class Blocks:
    """The blocks that were used last."""

    def __init__(self) -> None:
        self._kept: Kept[tuple[str, str, int]] = Kept(MOST_BYTES)

    def takes(self, key: str, size: int, length: int) -> bool:
        """Whether a read of so many bytes of an object goes by blocks."""
        return length < SIZE or is_document(key, size)

    def read_into(self, name: tuple[str, str], size: int, start: int, out: memoryview, fetch: Fetch) -> None:
        """Fills `out` with the bytes of an object from `start` on; errors as `fetch`.

        Args:
            name: key and version of the object.
            size: its length in bytes.
            start: first byte wanted.
            out: not long, unless all of the object is worth keeping.
            fetch: reads what is not here.
        """
        stop = start + len(out)
        first, last = start // SIZE, (stop - 1) // SIZE
        blocks = {number: self._kept.get((*name, number)) for number in range(first, last + 1)}
        missing = [number for number, block in blocks.items() if not block]
        if missing:
            if is_document(name[0], size):
                missing = [*range((size - 1) // SIZE + 1)]
            begin = missing[0] * SIZE
            fetched = bytearray(min(size, (missing[-1] + 1) * SIZE) - begin)
            fetch(begin, memoryview(fetched))
            for number in missing:
                at = number * SIZE - begin
                blocks[number] = bytes(fetched[at : at + SIZE])
                self._kept.put((*name, number), blocks[number])
        for number, block in blocks.items():
            begin, end = max(start, number * SIZE), min(stop, (number + 1) * SIZE)
            out[begin - start : end - start] = block[begin - number * SIZE : end - number * SIZE]
