"""Everything that a directory of arrays stores by key, with the bytes that the index itself takes.

`entries` answers for one key at a time, for those who read arrays; here all of it is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttools.core.errors import FormatError
from ckpttools.formats.orbax.index import Index, index_of, read_index
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES, Entry, Extent
from ckpttools.stores.local.file import LocalFile, storage_error


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
        FormatError, StorageError: an index is damaged or cannot be read, or processes differ.
    """
    index = index_of(directory, max_index_bytes)
    if index is not None:
        return _decoded(directory, index)
    return Database(
        directory, (), {name: Extent(name, 0, status.st_size) for name, status in files_below(directory)}, ()
    )


def read_database(directory: Path, max_index_bytes: int = MAX_INDEX_BYTES) -> Database:
    """The OCDBT database whose manifest is in a directory; errors as of `database_of`."""
    return _decoded(directory, read_index(directory, max_index_bytes))


def _decoded(directory: Path, index: Index) -> Database:
    named = {key.decode(errors="surrogateescape"): entry for key, entry in index.entries.items()}
    return Database(directory, index.manifests, named, index.nodes)


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
