"""An object store, read: keys are `bucket/name/of/object`, questions are few, objects are pinned."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from shlex import quote
from typing import ClassVar

from ckpttools.core.errors import FormatError, StorageError
from ckpttools.stores.base import Costs, DirEntry, FileKind, Status, Store, Traffic
from ckpttools.stores.meter import Meter
from ckpttools.stores.objects import blocks
from ckpttools.stores.objects.client import Access, Bucket, Object, ObjectChangedError, require_obstore
from ckpttools.stores.objects.errors import Words
from ckpttools.stores.objects.file import ObjectFile
from ckpttools.stores.objects.known import Known
from ckpttools.stores.pace import USUAL, asked_for
from ckpttools.stores.reads import Reads


class ObjectStore(Store):
    """The buckets of one cloud.

    Attributes:
        words: what messages say of it.
    """

    words: ClassVar[Words]

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._lock = threading.Lock()
        self._known = Known(self)
        self._meter = Meter()
        self._blocks = blocks.Blocks()
        self._reads = Reads()

    @abstractmethod
    def access(self, bucket: str) -> Access:
        """How a bucket is reached, as the environment says it.

        Raises:
            StorageError: it says too little, or something that cannot be used.
        """

    @property
    def costs(self) -> Costs:
        return Costs(asked_for() or USUAL, self._reads.memory + blocks.MOST_BYTES)

    @property
    def traffic(self) -> Traffic:
        return self._meter.total

    def stat(self, key: str) -> Status | None:
        return self._known.status(key) if key else Status(FileKind.DIRECTORY)

    def list(self, key: str) -> Sequence[DirEntry]:
        if not key:
            raise self._no_name()
        names = self._known.names(key)
        if not names and "/" in key:
            raise self._no_directory(key)
        return [DirEntry(name, found.kind) for name, found in names.items()]

    def walk(self, key: str) -> Iterator[Object]:
        if not key:
            raise self._no_name()
        objects = self._known.objects(key)
        if not objects and "/" in key:
            raise self._no_directory(key)
        yield from objects

    def open(self, key: str, found: Status | None = None) -> ObjectFile:
        found = found or self.stat(key)
        if found is None or found.kind is not FileKind.FILE:
            got = "nothing of this name" if found is None else "a directory"
            raise FormatError(f"cannot look at {self.spelled(key)}", got=got)
        return ObjectFile(self, key, found)

    def instead_of_writing(self, key: str) -> str:
        bucket, _, rest = key.partition("/")
        command = self.words.copy.format(bucket=quote(bucket), key=quote(rest))
        return f"write to a local directory, then copy that there: {command}"

    def status_after(self, key: str, moment: float) -> Status | None:
        """What is at a key, asked for after a moment by the monotonic clock; errors as `stat`."""
        return self._known.status_after(key, moment)

    def read_into(self, file: ObjectFile, start: int, out: memoryview) -> None:
        """Fills `out` with bytes of a file of this store; errors as `File.read_into`."""
        fetch = partial(self._fetch, file)
        if self._blocks.takes(file.key, file.size, len(out)):
            name, read = (file.key, file.version), partial(self._reads.read_into, fetch=fetch)
            self._blocks.read_into(name, file.size, start, out, read)
        else:
            self._reads.read_into(start, out, fetch)

    def _fetch(self, file: ObjectFile, start: int, length: int) -> memoryview:
        bucket, key = self._at(file.key)
        try:
            return bucket.read(key, file.version, start, length)
        except (ObjectChangedError, FileNotFoundError):
            self._known.forget(file.key)
            raise file.changed(bucket.head(key)) from None

    # -- whom `Known` asks

    def head(self, key: str) -> Status | None:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.head(rest)

    def objects_below(self, key: str, most: int | None = None) -> Sequence[Object] | None:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.objects_below(rest, most)

    def names_below(self, key: str) -> Mapping[str, Status]:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.names_below(rest)

    def _at(self, key: str) -> tuple[Bucket, str]:
        name, _, rest = key.partition("/")
        with self._lock:
            if name not in self._buckets:
                require_obstore(self.scheme)
                access = self.access(name)
                self._buckets[name] = Bucket(name, self.spelled(name), access, self.words, self._meter)
            return self._buckets[name], rest

    def _no_name(self) -> StorageError:
        return StorageError(
            f"cannot list {self.scheme}://",
            got="no name",
            wanted=f"the name of a {self.words.bucket}: {self.scheme}://NAME/…",
            hint=f"`{self.words.list_buckets}` lists yours",
        )

    def _no_directory(self, key: str) -> StorageError:
        got = "nothing of this name" if self.stat(key) is None else "a file"
        hint = "check the spelling of the path"
        return StorageError(f"cannot list {self.spelled(key)}", got=got, hint=hint)
