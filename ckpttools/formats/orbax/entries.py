"""What an item holds, as a map from key to bytes: through its OCDBT index, or as a file for each key."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ckpttools.core.errors import FormatError
from ckpttools.formats.orbax.index import PROCESSES, index_of, named_file
from ckpttools.formats.orbax.ocdbt import MANIFEST, Entry, Extent
from ckpttools.stores.local.file import LocalFile, storage_error


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

    path: Path
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
        """Whether it takes a range of its file away."""
        return self.nbytes is None or extent.offset + extent.length > self.nbytes


class Entries(Protocol):
    """The keys of an item."""

    @property
    def faults(self) -> Mapping[str, FileFault]:
        """The files that do not hold all that is said to be in them, by name."""

    @property
    def missing(self) -> str:
        """What to say of a key that is not there."""

    def get(self, key: str) -> Entry | None:
        """What a key stands for, None if it is not there."""

    def below(self, prefix: str) -> Iterator[str]:
        """The rest of each key that starts with a prefix, which is empty or ends in a slash."""

    def file(self, extent: Extent) -> LocalFile:
        """The file that a range is in.

        Raises:
            FormatError: it is not there.
            StorageError: it may not be looked at.
        """


def entries_of(directory: Path, use_ocdbt: bool | None, max_index_bytes: int) -> Entries:
    """The keys of the item in a directory.

    Args:
        directory: the item.
        use_ocdbt: what its metadata says, None if nothing.
        max_index_bytes: as in `ckpttools.formats.base.ReadOptions`.

    Raises:
        FormatError, StorageError: there is no index where one must be, or it is damaged.
    """
    index = index_of(directory, max_index_bytes)
    if index is not None:
        return Indexed(directory, index.entries)
    if use_ocdbt:
        raise FormatError(
            f"there is no {MANIFEST}",
            place=directory,
            wanted=f"{MANIFEST} here or in {PROCESSES}: the metadata says that the arrays are in OCDBT",
            hint="the save did not finish, or the file was not copied",
        )
    return Files(directory)


class Indexed:
    """The keys of an OCDBT index; data files are opened once and shared."""

    missing = "no entry in the index"

    def __init__(self, directory: Path, index: Mapping[bytes, Entry]) -> None:
        self._directory, self._index = directory, index
        self._files: dict[str, LocalFile] = {}

    @cached_property
    def _keys(self) -> list[bytes]:
        return sorted(self._index)

    def get(self, key: str) -> Entry | None:
        return self._index.get(key.encode(errors="surrogateescape"))

    def below(self, prefix: str) -> Iterator[str]:
        start = prefix.encode(errors="surrogateescape")
        for position in range(bisect_left(self._keys, start), len(self._keys)):
            key = self._keys[position]
            if not key.startswith(start):
                return
            # As os.fsdecode does with file names: two different keys stay different.
            yield key[len(start) :].decode(errors="surrogateescape")

    @cached_property
    def faults(self) -> Mapping[str, FileFault]:
        ends: dict[str, int] = {}
        for entry in self._index.values():
            if isinstance(entry, Extent):
                ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.length)
        found = {file: _fault(self._directory / file, end) for file, end in ends.items()}
        return {file: fault for file, fault in found.items() if fault is not None}

    def file(self, extent: Extent) -> LocalFile:
        if extent.file not in self._files:
            self._files[extent.file] = named_file(self._directory, extent.file)
        return self._files[extent.file]


def _fault(path: Path, end: int) -> FileFault | None:
    """What keeps a file from being read up to an end, None if nothing does that looking at it tells."""
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        reason = error.strerror or "it cannot be looked at"
        return FileFault(path, None, end, reason, isinstance(error, FileNotFoundError))
    return FileFault(path, nbytes, end) if nbytes < end else None


class Files:
    """A directory for each array, with a file for each key. Files are opened for each read: there may be
    more of them than a process may have open."""

    missing = "no such file"
    faults: Mapping[str, FileFault] = MappingProxyType({})

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> Entry | None:
        if ".." in key.split("/") or "\0" in key:
            return None
        path = self._directory / key
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error("cannot look at", path, error) from error
        return Extent(key, 0, status.st_size) if path.is_file() else None

    def below(self, prefix: str) -> Iterator[str]:
        if "\0" in prefix:  # no file system has such a name
            return
        top = self._directory / prefix
        for directory, _, files in os.walk(top):
            yield from (os.path.relpath(f"{directory}/{file}", top) for file in files)

    def file(self, extent: Extent) -> LocalFile:
        return named_file(self._directory, extent.file)
