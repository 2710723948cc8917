"""A buffer for the small files of an unpublished checkpoint in a bucket or on the Hub.

Readers recognize a checkpoint by these files. They are therefore written after all data, and the files that
mark the checkpoint as complete are written last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from ckpttools.stores.abilities import LinkTrials, SupportsLinks
from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.concurrency import map_in_threads, write_concurrency
from ckpttools.stores.memory import Bytes

if TYPE_CHECKING:
    from collections.abc import Callable

# An item and a step each have one file that marks them as complete.
_LAST = 2


class PendingFiles(Store):
    """A store that buffers new files in memory, with the keys of the underlying store.

    Args:
        store: The underlying store.
        note_link: Called with the key of a file before another file is copied to it.
    """

    scheme: ClassVar[str] = "pending"

    def __init__(self, store: Store, note_link: Callable[[str], None]) -> None:
        self._store, self._note_link = store, note_link
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> Iterable[str]:
        """Return the keys of the buffered files, in the order in which they were written."""
        return list(self._files)

    def stat(self, key: str) -> Status | None:
        with self._lock:
            if key in self._files:
                content = Bytes(key, self._files[key])
                return Status(FileKind.FILE, content.size, content.version)
            if any(file.startswith(f"{key}/") for file in self._files):
                return Status(FileKind.DIRECTORY)
        return self._store.stat(key)

    def list(self, key: str) -> Iterator[DirEntry]:
        with self._lock:
            names = [
                file[len(key) + 1 :].partition("/") for file in self._files if file.startswith(f"{key}/")
            ]
        kinds = {name: FileKind.DIRECTORY if rest else FileKind.FILE for name, _, rest in names}
        stored = self._store.list(key) if not kinds or self._store.stat(key) else ()
        yield from (entry for entry in stored if entry.name not in kinds)
        yield from (DirEntry(name, kind) for name, kind in kinds.items())

    def open(self, key: str, status: Status | None = None) -> File:
        with self._lock:
            content = self._files.get(key)
        return self._store.open(key) if content is None else Bytes(self.uri(key), content)

    def write(self, key: str, content: bytes) -> None:
        """See `SupportsWrite.write`. The file is written at publication."""
        with self._lock:
            self._files.pop(key, None)
            self._files[key] = content

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """See `SupportsWrite.write_at`. The file must be buffered."""
        with self._lock:
            data = bytearray(self._files[key])
            data[offset : offset + len(content)] = content
            self._files[key] = bytes(data)

    def put_all(self, put: Callable[[str, bytes], None]) -> None:
        """Write all buffered files: first all but two, then the last two one after the other.

        Args:
            put: Writes one file.
        """
        names = list(self._files)
        map_in_threads(write_concurrency(), lambda key: put(key, self._files[key]), names[:-_LAST])
        for key in names[-_LAST:]:
            put(key, self._files[key])

    def uri(self, key: str) -> str:
        return self._store.uri(key)

    def link_trials(self, key: str) -> LinkTrials:
        return self._links.link_trials(key)

    def link(self, source: File, key: str) -> bool:
        self._note_link(key)
        return self._links.link(source, key)

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        self._note_link(key)
        self._links.copy_parts(source, key, parts)

    @property
    def _links(self) -> SupportsLinks:
        assert isinstance(self._store, SupportsLinks)
        return self._store
