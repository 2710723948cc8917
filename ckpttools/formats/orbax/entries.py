"""The contents of a directory of arrays by key, from its OCDBT index or from one file per key."""

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
    """A data file that is missing or truncated.

    Attributes:
        path: Path of the file.
        nbytes: Size of the file in bytes; None if it cannot be accessed.
        end: End of the file's last entry according to the index, in bytes.
        reason: Why the file cannot be accessed.
        is_absent: Whether the file does not exist.
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
        """A hint for the user."""
        if self.nbytes is None and not self.is_absent:
            return "check who owns it, the directories above it, and their mode bits"
        cause = "deleted or not copied" if self.is_absent else "truncated"
        return f"it was {cause}: fetch the checkpoint again"

    def takes(self, extent: Extent) -> bool:
        """Return whether the fault affects a byte range of the file."""
        return self.nbytes is None or extent.offset + extent.length > self.nbytes


class Entries(ABC):
    """The keys and values of a directory of arrays; all readers use this index.

    Attributes:
        directory: Root of the paths in extents.
        manifests: OCDBT manifests that were read, relative to the directory; empty if every key is a file.
        nodes: Byte ranges of manifests and nodes.
        missing: Message for a missing key.
    """

    manifests: tuple[str, ...] = ()
    nodes: tuple[Extent, ...] = ()
    missing: ClassVar[str]

    def __init__(self, directory: Location) -> None:
        self.directory = directory

    @property
    @abstractmethod
    def all(self) -> Mapping[str, Entry]:
        """All keys with their entries."""

    @property
    def faults(self) -> Mapping[str, FileFault]:
        """The faults of missing and truncated files, by file name."""
        return {}

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """Return the entry of a key; None if it does not exist."""

    @abstractmethod
    def below(self, prefix: str) -> Iterator[str]:
        """Yield the keys below a prefix without the prefix, which is empty or ends in a slash."""

    def file(self, extent: Extent) -> File:
        """Return the file that contains a byte range.

        Raises:
            FormatError: The file does not exist.
            StorageError: The file cannot be accessed.
        """
        return named_file(self.directory, extent.file)

    def read(self, entry: Entry) -> bytes:
        """Return the value of an entry.

        Raises:
            FormatError, StorageError: The file is truncated or missing, or cannot be read.
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
    """Return the contents of a directory, from its OCDBT index, its per-process indexes, or its files.

    Args:
        directory: An item, or a plain hierarchy.
        is_required: Whether the metadata lists arrays in OCDBT.
        max_index_bytes: See `ckpttools.formats.base.ReadOptions`.

    Raises:
        FormatError, StorageError: A required index is missing, an index is damaged, or processes disagree.
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
    """The keys of an OCDBT index. Data files are opened once and shared."""

    missing = "no entry in the index"

    def __init__(self, directory: Location, index: Index) -> None:
        super().__init__(directory)
        self.manifests, self.nodes = index.manifests, index.nodes
        # Decode as os.fsdecode decodes file names, so that distinct keys stay distinct.
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
    """Return the fault of a file that is missing or shorter than `end`, judged by its status, or None."""
    try:
        result = path.status()
    except StorageError as error:
        return FileFault(path, None, end, error.raw.got or "it cannot be accessed")
    if result is None:
        return FileFault(path, None, end, "No such file or directory", is_absent=True)
    return FileFault(path, result.size, end) if result.size < end else None


class Files(Entries):
    """A directory per array with a file per key.

    Files are opened for each read, because there may be more files than a process can keep open.
    """

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
        if "\0" in prefix:  # File systems do not allow such names.
            return
        top = self.directory / prefix.rstrip("/")
        if top.is_dir():
            yield from (name for name, entry in top.below() if not entry.is_dir)


def files_below(directory: Location) -> Iterator[tuple[str, Status]]:
    """Yield the name and status of every regular file at or below a directory, sorted; follows links.

    Raises:
        StorageError: A directory cannot be listed.
    """
    yield from sorted(directory.walk(), key=lambda result: _sort_key(result[0]))


def _sort_key(name: str) -> list[tuple[bool, str]]:
    """Return a sort key that puts a directory's files before its subdirectories."""
    *above, last = name.split("/")
    return [*((True, part) for part in above), (False, last)]
