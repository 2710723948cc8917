"""How a checkpoint grows in memory: the shortest of all that keep to `ckpttools.stores.publishing`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import ClassVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.base import FileKind
from ckpttools.stores.location import Location
from ckpttools.stores.memory import MemoryStore
from ckpttools.stores.publishing import SUFFIX, JobInfo, LockedError, Record, Series, check_name


@dataclass
class Begun:
    """A conversion that has been begun: what a journal says elsewhere."""

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
        begun = self._begun(purpose)
        try:
            self.check(purpose.plan, nbytes)
            yield MemoryWork(self, begun)
        finally:
            begun.is_locked = False
            if not begun.records and self.store.stat(self.partial) is None:
                self.store.begun.pop(self.partial, None)

    def _begun(self, purpose: JobInfo) -> Begun:
        with self.store.lock:
            begun = self.store.begun.get(self.partial)
            if begun is not None and begun.is_locked:
                raise LockedError("another thread is writing this checkpoint", location=self.taken[0])
            if begun is None or begun.purpose.plan != purpose.plan:
                if begun is not None and not self.overwrite:
                    raise UsageError(
                        f"{self.taken[1]} holds the beginning of another conversion",
                        got=begun.purpose.source,
                        hint=f"discard it with {option('overwrite', True)}",
                    )
                self.store.remove(self.partial)
                begun = Begun(purpose)
            begun.is_locked = True
            self.store.begun[self.partial] = begun
            return begun


@dataclass(frozen=True)
class MemoryWork:
    """A destination in memory that is one thread's; see `ckpttools.stores.publishing.Work`."""

    staging: MemoryStaging
    begun: Begun
    is_complete: ClassVar[bool] = False

    @property
    def content(self) -> Location:
        return Location(self.staging.store, f"{self.staging.partial}/content")

    @property
    def records(self) -> Sequence[Record]:
        return self.begun.records

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> MemoryDataFiles:
        return MemoryDataFiles(self.content, sizes, heads)

    def enter(self, records: Iterable[Record]) -> None:
        self.begun.records += records

    def discard(self) -> None:
        self.staging.store.remove(self.content.key)
        self.begun.records.clear()

    def publish(self) -> None:
        with self.staging.store.lock:
            self.staging.check(self.begun.purpose.plan, 0)
            self.staging.store.move(self.content.key, self.staging.key)
            self.begun.records.clear()

    def conclude(self) -> None:
        """See `Work`: what is in memory has nothing left that tells of it."""


class MemoryDataFiles:
    """Data files in memory; see `ckpttools.stores.publishing.DataFiles`."""

    is_rehearsal: ClassVar[bool] = False

    def __init__(self, content: Location, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> None:
        self._content = content
        self._heads = heads
        self._series = Series()
        self._lock = threading.Lock()
        for name, size in sizes.items():
            self._grown(name, size)

    def passes(self, group: int) -> Generator[MemoryDataFiles]:
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
        """What is in memory lasts as long as the process at once."""

    def close(self) -> None:
        """There is nothing to give back."""
