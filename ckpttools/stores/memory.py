"""Bytes in memory: a store that lives as long as the process, and small values embedded in an index."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    DestinationExistsError,
    FormatError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckpttools.core.message_terms import option, retry_term
from ckpttools.stores.abilities import LinkTrials
from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import SUFFIX, JobInfo, LockedError, Record, Series, Unfinished, check_name

if TYPE_CHECKING:
    from typing_extensions import Buffer


_VERSIONS = count(1)


@dataclass(frozen=True)
class Bytes(File):
    """Bytes with the interface of a file.

    Attributes:
        path: Name for messages.
        data: The bytes.
    """

    path: str
    data: bytes

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.data)

    @property
    def version(self) -> str:  # type: ignore[override]
        """Return a checksum of the content."""
        return str(zlib.crc32(self.data))

    def read_into(self, offset: int, out: Buffer) -> None:
        """See `File.read_into`; raises FormatError if the data is too short."""
        _fill(self.path, self.data, offset, out)


@dataclass(frozen=True)
class _StoredBytes:
    """The content of a key: bytes that change only while no reader uses them, and a unique number."""

    data: bytes | bytearray
    number: int = field(default_factory=lambda: next(_VERSIONS))

    @property
    def status(self) -> Status:
        return Status(FileKind.FILE, len(self.data), str(self.number))


@dataclass(frozen=True)
class MemoryFile(File):
    """A file of a `MemoryStore`, with its content at the time of opening."""

    path: str
    data: bytes | bytearray
    version: str
    store: MemoryStore
    key: str

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.data)

    def read_into(self, offset: int, out: Buffer) -> None:
        _fill(self.path, self.data, offset, out)

    def check_unchanged(self) -> None:
        current = self.store.stat(self.key)
        if current is None:
            raise _absent(self.path)
        if current.version != self.version:
            raise SourceChangedError(
                f"{self.path} was changed while it was read",
                got=f"{current.size} bytes, version {current.version}",
                expected=f"{self.size} bytes, version {self.version}",
                hint=retry_term(),
            )


class MemoryStore(Store):
    """A store with files in a dictionary. A directory is a common prefix of keys that ends before a `/`.

    Attributes:
        lock: Held during changes.
        begun: Unfinished conversions, by the key of their staging directory.
    """

    scheme: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._files: dict[str, _StoredBytes] = {}
        self.begun: dict[str, StartedWork] = {}

    def stat(self, key: str) -> Status | None:
        with self.lock:
            result = self._files.get(key)
            if result is not None:
                return result.status
            return Status(FileKind.DIRECTORY) if next(self._below(key), None) is not None else None

    def list(self, key: str) -> Sequence[DirEntry]:
        with self.lock:
            names = [name.partition("/") for name in self._below(key)]
        if not names:
            got = "a file" if key in self._files else "it does not exist"
            raise StorageError(f"cannot list {self.uri(key)}", got=got)
        kinds = {name: FileKind.DIRECTORY if rest else FileKind.FILE for name, _, rest in names}
        return [DirEntry(name, kind) for name, kind in kinds.items()]

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        with self.lock:
            result = [(name, self._files[_join_key(key, name)].status) for name in self._below(key)]
        if not result:
            self.list(key)
        yield from result

    def open(self, key: str, status: Status | None = None) -> MemoryFile:
        content = self._files.get(key)
        if content is None:
            raise _absent(self.uri(key))
        return MemoryFile(self.uri(key), content.data, str(content.number), self, key)

    def put(self, key: str, content: bytes) -> None:
        with self.lock:
            location = self.uri(key)
            if not key or next(self._below(key), None) is not None:
                raise StorageError(f"cannot write {location}", got="a directory")
            above = [key[:at] for at, letter in enumerate(key) if letter == "/"]
            if file := next((item for item in above if item in self._files), None):
                raise StorageError(f"cannot write {location}", got=f"{self.uri(file)} is a file")
            self._files[key] = _StoredBytes(content)

    def write(self, key: str, content: bytes) -> None:
        self.put(key, content)

    def write_at(self, key: str, offset: int, content: bytes | memoryview) -> None:
        with self.lock:
            if key not in self._files:
                raise StorageError(f"cannot write {self.uri(key)}", got="it does not exist")
            data = self._files[key].data
            if not isinstance(data, bytearray) or offset + len(content) > len(data):
                data = bytearray(data).ljust(offset + len(content), b"\0")
            data[offset : offset + len(content)] = content
            self._files[key] = _StoredBytes(data)

    def remove(self, key: str) -> None:
        """Remove a file, or everything below a key, if it exists."""
        with self.lock:
            self._files.pop(key, None)
            for name in list(self._below(key)):
                del self._files[_join_key(key, name)]

    def link_trials(self, key: str) -> LinkTrials:
        return _MemoryTrials()

    def link(self, source: File, key: str) -> bool:
        if not isinstance(source, MemoryFile):
            return False
        source.check_unchanged()
        with self.lock:
            self._files[key] = source.store._files[source.key]
        return True

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        data = bytearray(source.size)
        for start, stop in parts:
            source.read_into(start, memoryview(data)[start:stop])
        self.put(key, bytes(data))

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> MemoryStaging:

        return MemoryStaging(self, key, overwrite, check_replaced)

    def unfinished(self, key: str) -> Unfinished | None:
        return Unfinished(Location(self, key)) if key in self.begun else None

    def find_unfinished(self, key: str) -> Unfinished | None:
        return self.unfinished(key + SUFFIX)

    def _below(self, key: str) -> Iterator[str]:
        """Iterate over the relative paths of all keys below a key."""
        start = _join_key(key, "")
        return (file[len(start) :] for file in self._files if file.startswith(start))

    def move(self, old: str, new: str) -> None:
        """Move everything below a key to another key, replacing existing content."""
        with self.lock:
            moved = ((_join_key(new, name), self._files[_join_key(old, name)]) for name in self._below(old))
            # Readers keep the old bytes, because a later `write_at` copies the moved ones.
            files = {name: _StoredBytes(bytes(result.data), result.number) for name, result in moved}
            self.remove(old)
            self.remove(new)
            self._files.update(files)


class _MemoryTrials:
    """Link tests for files in memory, which can all be linked to each other."""

    def refusal(self, source: File) -> str | None:
        return None if isinstance(source, MemoryFile) else "it is not in memory"


def _fill(path: str, data: bytes | bytearray, offset: int, out: Buffer) -> None:
    target = memoryview(out).cast("B")
    part = memoryview(data)[offset : offset + len(target)]
    if len(part) != len(target):
        raise FormatError(f"{path} ends too early", got=f"{len(data)} bytes")
    target[:] = part


def _absent(path: str) -> FormatError:
    return FormatError(f"cannot inspect {path}", got="it does not exist")


def _join_key(key: str, name: str) -> str:
    return f"{key}/{name}" if key else name


STORE = MemoryStore()


@dataclass
class StartedWork:
    """An unfinished conversion; other stores keep this information in a journal."""

    purpose: JobInfo
    records: list[Record] = field(default_factory=list)
    is_locked: bool = False


@dataclass(frozen=True)
class MemoryStaging:
    """A destination in memory; see `ckpttools.stores.publishing.Staging`."""

    store: MemoryStore
    key: str
    overwrite: bool
    check_replaced: Callable[[], None]

    @property
    def partial(self) -> str:
        return self.key + SUFFIX

    @property
    def taken(self) -> tuple[Location, Location]:
        return Location(self.store, self.key), Location(self.store, self.partial)

    def check(self, plan: str, nbytes: int) -> None:
        result, location = self.store.stat(self.key), self.store.uri(self.key)
        check_name(self.taken[0])
        if result is None:
            return
        if result.kind is FileKind.FILE:
            raise DestinationExistsError(f"{location} is a file", hint="choose another destination")
        self.check_replaced()
        if not self.overwrite:
            hint = f"choose another destination, or allow its replacement with {option('overwrite', True)}"
            raise DestinationExistsError(
                f"{location} exists", expected="a new name, or an empty directory", hint=hint
            )

    @contextmanager
    def opened(self, purpose: JobInfo, nbytes: int = 0) -> Iterator[MemoryWork]:
        work = self._start_work(purpose)
        try:
            self.check(purpose.plan, nbytes)
            yield MemoryWork(self, work)
        finally:
            work.is_locked = False
            if not work.records and self.store.stat(self.partial) is None:
                self.store.begun.pop(self.partial, None)

    def _start_work(self, purpose: JobInfo) -> StartedWork:
        with self.store.lock:
            work = self.store.begun.get(self.partial)
            if work is not None and work.is_locked:
                raise LockedError("another thread is writing this checkpoint", location=self.taken[0])
            if work is None or work.purpose.plan != purpose.plan:
                if work is not None and not self.overwrite:
                    raise UsageError(
                        f"{self.taken[1]} contains the beginning of another conversion",
                        got=work.purpose.source,
                        hint=f"discard it with {option('overwrite', True)}",
                    )
                self.store.remove(self.partial)
                work = StartedWork(purpose)
            work.is_locked = True
            self.store.begun[self.partial] = work
            return work


@dataclass(frozen=True)
class MemoryWork:
    """A destination in memory that is owned by one thread; see `ckpttools.stores.publishing.Work`."""

    staging: MemoryStaging
    begun: StartedWork
    is_complete: ClassVar[bool] = False

    @property
    def content(self) -> Location:
        return Location(self.staging.store, f"{self.staging.partial}/content")

    @property
    def records(self) -> Sequence[Record]:
        return self.begun.records

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> MemoryDataFiles:
        return MemoryDataFiles(self.content, sizes, heads)

    def record(self, records: Iterable[Record]) -> None:
        self.begun.records += records

    def discard(self) -> None:
        self.staging.store.remove(self.content.key)
        self.begun.records.clear()

    def publish(self) -> None:
        with self.staging.store.lock:
            self.staging.check(self.begun.purpose.plan, 0)
            self.staging.store.move(self.content.key, self.staging.key)
            self.begun.records.clear()

    def finalize(self) -> None:
        """See `Work`. There is nothing to remove."""


class MemoryDataFiles:
    """Data files in memory; see `ckpttools.stores.publishing.DataFiles`."""

    is_dry_pass: ClassVar[bool] = False

    def __init__(self, content: Location, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> None:
        self._content = content
        self._heads = heads
        self._series = Series()
        self._lock = threading.Lock()
        for name, size in sizes.items():
            self._grown(name, size)

    def write_passes(self, group: int) -> Generator[MemoryDataFiles]:
        yield self

    def write_heads(self) -> None:
        for name, head in self._heads.items():
            (self._content / name).write_at(0, head)

    def _grown(self, name: str, size: int) -> tuple[MemoryStore, str]:
        location = self._content / name
        assert isinstance(location.store, MemoryStore)
        with self._lock:
            result = location.store.stat(location.key)
            if result is None:
                location.store.put(location.key, b"")
            if result is None or result.size < size:
                location.store.write_at(location.key, size, b"")
        return location.store, location.key

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        store, key = self._grown(name, loose or 0)
        store.write_at(key, offset, data)

    def write_whole(self, name: str, data: bytes) -> None:
        (self._content / name).write_bytes(data)

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        file, end = self._series.take(name, limit, len(data))
        self.write(file, end, memoryview(data), 0)
        return file, end

    def extend(self, name: str, end: int) -> None:
        self._series.extend(name, end)

    def sync(self) -> None:
        """Do nothing, because memory needs no sync."""

    def close(self) -> None:
        """Do nothing, because no resources are held."""
