"""Bytes that are in memory already, read like a file: small values that an index holds itself."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttools.core.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Bytes:
    """A byte string that answers like a file.

    Attributes:
        path: what messages call it.
        data: the bytes.
    """

    path: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def version(self) -> str:
        """The content itself, as a checksum."""
        return str(zlib.crc32(self.data))

    def read_into(self, offset: int, out: Buffer) -> None:
        """Fills `out` with the bytes from `offset` on.

        Raises:
            FormatError: there are not so many.
        """
        target = memoryview(out).cast("B")
        part = self.data[offset : offset + len(target)]
        if len(part) != len(target):
            raise FormatError(f"{self.path} ends too early", got=f"{self.size} bytes")
        target[:] = part
