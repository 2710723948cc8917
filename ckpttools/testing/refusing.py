"""A reader that refuses to read: what has been planned with it has been planned without any data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ReadRefusedError(AssertionError):
    """Data was asked for where none may be read."""


@dataclass(frozen=True)
class Refusing:
    """A file of any size that takes no room and cannot be read.

    Attributes:
        path: what messages call it.
        size: bytes that it claims to hold.
        version: what it claims to be a version of.
    """

    path: str
    size: int = 0
    version: str = "0"

    def read_into(self, offset: int, out: Buffer) -> None:
        """Always an error, which names the bytes asked for."""
        count = memoryview(out).nbytes
        raise ReadRefusedError(f"{count} bytes of {self.path} were read, from {offset} on")
