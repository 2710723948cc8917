"""What a directory of arrays holds, by key: as its OCDBT index says, or in a file for each key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import ClassVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError
from ckpttools.formats.orbax.index import PROCESSES, Index, index_of, named_file
from ckpttools.formats.orbax.ocdbt import MANIFEST, MAX_INDEX_BYTES, Entry, Extent
from ckpttools.stores.base import File, FileKind, Status
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class FileFault:
    """A data file that is missing, or ends before what the index has in it.

    Attributes:
        path: of it.
        nbytes: its size; None where it cannot be looked at.
        end: where the last entry ends that the index has in it, in bytes.
        reason: why it cannot be looked at.
        is_absent: whether that is because there is none.
    """

    path: Location
    nbytes: int | None
    end: int
    reason: str = ""
    is_absent: bool = False

    def __str__(self) -> str:
        if self.nbytes is None:
            return f"{self.path}: {self.reason}"
        return f"{self.path} ends after {self.nbytes:,} of {self.end:,} bytes"

    @property
    def hint(self) -> str:
        """What to do about it."""
        if self.nbytes is None and not self.is_absent:
            return "check who owns it, the directories above it, and their mode bits"
        cause = "deleted or not copied" if self.is_absent else "cut short"
        return f"it was {cause}: fetch the checkpoint again"

    def takes(self, extent: Extent) -> bool:
        """Return whether it takes a range of its file away."""
        return self.nbytes is None or extent.offset + extent.length > self.nbytes


class Entries(ABC):
    """The keys of a directory of arrays, and what they stand for: the one index that all who look ask.

    Attributes:
        directory: paths of extents are relative to it.
        manifests: of the OCDBT indexes that were read, relative to it; empty where every key is a file.
        nodes: byte ranges of manifests and nodes.
        missing: what to say of a key that is not there.
    """

    manifests: tuple[str, ...] = ()
    nodes: tuple[Extent, ...] = ()
    missing: ClassVar[str]

    def __init__(self, directory: Location) -> None:
        self.directory = directory

    @property
    @abstractmethod
    def all(self) -> Mapping[str, Entry]:
        """Every key."""

    @property
    def faults(self) -> Mapping[str, FileFault]:
        """The files that do not hold all that is said to be in them, by name."""
        return {}

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """What a key stands for, None if it is not there."""

    @abstractmethod
    def below(self, prefix: str) -> Iterator[str]:
        """Yield the rest of each key that starts with a prefix, which is empty or ends in a slash."""

    def file(self, extent: Extent) -> File:
        """Return the file that a range is in.

        Raises:
            FormatError: it is not there.
            StorageError: it cannot be accessed.
        """
        return named_file(self.directory, extent.file)

    def read(self, entry: Entry) -> bytes:
        """Return the value of an entry.

        Raises:
            FormatError, StorageError: the file ends before, is not there or cannot be read.
        """
        if isinstance(entry, bytes):
            return entry
        source = self.file(entry)
        if entry.offset + entry.length > source.size:
            raise FormatError(
                f"{source.path} ends too early",
                got=f"a file of {source.size} bytes",
                expected=f"bytes {entry.offset} to {entry.offset + entry.length}",
            )
        return source.read(entry.offset, entry.length)


def entries_of(
    directory: Location, is_required: bool = False, max_index_bytes: int = MAX_INDEX_BYTES
) -> Entries:
    """What is stored in a directory: by its OCDBT index, by those of the processes of a save, or in files.

    Args:
        directory: of an item, or a plain hierarchy.
        is_required: whether its metadata lists arrays that are in OCDBT.
        max_index_bytes: as in `ckpttools.formats.base.ReadOptions`.

    Raises:
        FormatError, StorageError: there is no index where one must be, it is damaged, or processes differ.
    """
    index = index_of(directory, max_index_bytes)
    if index is not None:
        return Indexed(directory, index)
    if is_required:
        raise FormatError(
            f"there is no {MANIFEST}",
            location=directory,
            expected=f"{MANIFEST} here or in {PROCESSES}: the metadata says that the arrays are in OCDBT",
            hint="the save did not finish, or the file was not copied",
        )
    return Files(directory)


class Indexed(Entries):
    """The keys of an OCDBT index; data files are opened once and shared."""

    missing = "no entry in the index"

    def __init__(self, directory: Location, index: Index) -> None:
        super().__init__(directory)
        self.manifests, self.nodes = index.manifests, index.nodes
        # As os.fsdecode does with file names: two different keys stay different.
        self._entries = {key.decode(errors="surrogateescape"): item for key, item in index.entries.items()}
        self._files: dict[str, File] = {}

    @property
    def all(self) -> Mapping[str, Entry]:
        return self._entries

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def below(self, prefix: str) -> Iterator[str]:
        for position in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[position]
            if not key.startswith(prefix):
                return
            yield key[len(prefix) :]

    @cached_property
    def faults(self) -> Mapping[str, FileFault]:
        ends: dict[str, int] = {}
        for entry in self._entries.values():
            if isinstance(entry, Extent):
                ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.length)
        result = {file: _fault(self.directory / file, end) for file, end in ends.items()}
        return {file: fault for file, fault in result.items() if fault is not None}

    def file(self, extent: Extent) -> File:
        if extent.file not in self._files:
            self._files[extent.file] = super().file(extent)
        return self._files[extent.file]


def _fault(path: Location, end: int) -> FileFault | None:
    """What keeps a file from being read up to an end, None if nothing does that looking at it tells."""
    try:
        result = path.status()
    except StorageError as error:
        return FileFault(path, None, end, error.got or "it cannot be looked at")
    if result is None:
        return FileFault(path, None, end, "No such file or directory", is_absent=True)
    return FileFault(path, result.size, end) if result.size < end else None


class Files(Entries):
    """A directory for each array, with a file for each key. Files are opened for each read: there may be
    more of them than a process may have open."""

    missing = "no such file"

    @cached_property
    def all(self) -> Mapping[str, Entry]:
        return {name: Extent(name, 0, status.size) for name, status in files_below(self.directory)}

    def get(self, key: str) -> Entry | None:
        if ".." in key.split("/") or "\0" in key:
            return None
        result = (self.directory / key).status()
        return Extent(key, 0, result.size) if result and result.kind is FileKind.FILE else None

    def below(self, prefix: str) -> Iterator[str]:
        if "\0" in prefix:  # no file system has such a name
            return
        top = self.directory / prefix.rstrip("/")
        if top.is_dir():
            yield from (name for name, entry in top.below() if not entry.is_dir)


def files_below(directory: Location) -> Iterator[tuple[str, Status]]:
    """Name and status of every regular file at or below a directory, by name; links to files are followed.

    Raises:
        StorageError: a directory may not be listed.
    """
    yield from sorted(directory.walk(), key=lambda result: _in_order(result[0]))


def _in_order(name: str) -> list[tuple[bool, str]]:
    """Sort names by directory: its own files come before those of directories in it."""
    *above, last = name.split("/")
    return [*((True, part) for part in above), (False, last)]
