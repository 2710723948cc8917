"""An object that is read by position: the one that was there at the first look, and no other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from ckpttools.core.errors import FormatError, SourceChangedError
from ckpttools.core.message_terms import again
from ckpttools.stores.base import File, Status
from ckpttools.stores.costs import FAR, Costs

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ckpttools.stores.objects.store import ObjectStore


class ObjectFile(File):
    """An object as it was when it was looked at; every read asks for that version, and is refused another."""

    # What comes at 100 MB/s in the 20 ms that a request takes.
    gap: ClassVar[int] = 2 << 20
    price: ClassVar[int] = FAR

    __slots__ = ("_last_read", "key", "path", "size", "store", "version")

    def __init__(self, store: ObjectStore, key: str, result: Status) -> None:
        self.store = store
        self.key = key
        self.path = store.uri(key)
        self.size = result.size
        self.version = result.version
        self._last_read = time.monotonic()

    @property
    def costs(self) -> Costs:
        return self.store.costs

    def read_into(self, offset: int, out: Buffer) -> None:
        target = memoryview(out).cast("B")
        if offset + len(target) > self.size:
            raise FormatError(f"{self.path} ends too early", got=f"{self.size} bytes")
        if len(target):
            self.store.read_into(self, offset, target)
            self._last_read = time.monotonic()

    def check_unchanged(self) -> None:
        result = self.store.status_after(self.key, self._last_read)
        if result is None or result.version != self.version:
            raise self.changed(result)

    def changed(self, result: Status | None) -> FormatError:
        """The error of a file that is another one now, or gone."""
        if result is None:
            return FormatError(f"{self.path} was removed while it was read", hint=again())
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=f"{result.size} bytes, ETag {result.version}",
            expected=f"{self.size} bytes, ETag {self.version}",
            hint=again(),
        )
