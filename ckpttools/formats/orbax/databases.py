"""Everything that a directory of arrays stores by key, with the bytes that the index itself takes.

`orbax_entries` answers for one key at a time, for those who read arrays; here all of it is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttools.core.errors import FormatError
from ckpttools.formats.orbax.entries import processes_of, read_index
from ckpttools.formats.orbax.ocdbt import MANIFEST, MAX_INDEX_BYTES, Entry, Extent
from ckpttools.stores.local import LocalFile, storage_error


@dataclass(frozen=True)
class Database:
    """The keys of a directory and what they stand for.

    Attributes:
        directory: paths of extents are relative to it.
        manifests: of the indexes that were read, relative to it; empty where every key is a file.
        entries: key -> inline value or byte range.
        nodes: byte ranges of manifests and nodes.
    """

    directory: Path
    manifests: tuple[str, ...]
    entries: Mapping[str, Entry]
    nodes: tuple[Extent, ...]

    def read(self, entry: Entry) -> bytes:
        """The value of an entry.

        Raises:
            FormatError, StorageError: the file ends before, is not there or cannot be read.
        """
        if isinstance(entry, bytes):
            return entry
        source = LocalFile.at(self.directory / entry.file)
        try:
            if entry.offset + entry.length > source.size:
                raise FormatError(
                    f"{source.path} ends too early",
                    got=f"a file of {source.size} bytes",
                    wanted=f"bytes {entry.offset} to {entry.offset + entry.length}",
                )
            return source.read(entry.offset, entry.length)
        finally:
            source.close()


def database_of(directory: Path, max_index_bytes: int = MAX_INDEX_BYTES) -> Database:
    """What is stored in a directory: by its OCDBT index, by those of the processes of a save, or in files.

    Raises:
        FormatError, StorageError: an index is damaged or cannot be read.
    """
    if (directory / MANIFEST).is_file():
        return read_database(directory, max_index_bytes)
    processes = processes_of(directory)
    return _united(directory, processes, max_index_bytes) if processes else _files(directory)


def read_database(directory: Path, max_index_bytes: int = MAX_INDEX_BYTES) -> Database:
    """The OCDBT database in a directory.

    Raises:
        FormatError, StorageError: it is damaged or cannot be read.
    """
    nodes: list[Extent] = []
    entries = read_index(directory, max_index_bytes, nodes.append)
    named = {key.decode(errors="surrogateescape"): entry for key, entry in entries.items()}
    return Database(directory, (MANIFEST,), named, tuple(nodes))


def _united(directory: Path, processes: list[Path], max_index_bytes: int) -> Database:
    """The databases of several processes as one; of what is in several, the first counts."""
    entries: dict[str, Entry] = {}
    nodes: list[Extent] = []
    for process in processes:
        found = moved(read_database(process, max_index_bytes), process.name)
        entries = {**found.entries, **entries}
        nodes.extend(found.nodes)
    manifests = tuple(f"{process.name}/{MANIFEST}" for process in processes)
    return Database(directory, manifests, dict(sorted(entries.items())), tuple(nodes))


def moved(database: Database, below: str) -> Database:
    """A database as seen from the directory above, in which its own is called `below`."""

    def outside(entry: Entry) -> Entry:
        return replace(entry, file=f"{below}/{entry.file}") if isinstance(entry, Extent) else entry

    return Database(
        database.directory.parent,
        tuple(f"{below}/{name}" for name in database.manifests),
        {key: outside(entry) for key, entry in database.entries.items()},
        tuple(replace(node, file=f"{below}/{node.file}") for node in database.nodes),
    )


def _files(directory: Path) -> Database:
    entries = {name: Extent(name, 0, status.st_size) for name, status in files_below(directory)}
    return Database(directory, (), entries, ())


def files_below(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Name and status of every regular file at or below a directory, by name; links to files are followed.

    Raises:
        StorageError: a directory may not be listed.
    """

    def refuse(error: OSError) -> None:
        raise storage_error("cannot list", error.filename, error) from error

    for place, inner, names in os.walk(directory, onerror=refuse):
        inner.sort()
        for name in sorted(names):
            path = Path(place, name)
            if path.is_file():
                yield path.relative_to(directory).as_posix(), path.stat()
