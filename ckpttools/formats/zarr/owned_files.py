"""The files that belong to zarr arrays and to plain zarr hierarchies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from functools import cached_property

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError
from ckpttools.formats.orbax.entries import Entries, Files
from ckpttools.formats.zarr.array import ZARR2_DOCUMENT, ZARR3_DOCUMENT
from ckpttools.formats.zarr.chunks import ChunkTable, chunk_tables, key_below
from ckpttools.stores.base import DirEntry
from ckpttools.stores.location import Location

_ATTRIBUTES = ".zattrs"
_DOCUMENTS = (ZARR2_DOCUMENT, _ATTRIBUTES, ZARR3_DOCUMENT)
_CHUNK = re.compile(r"(c\.)?\d+(\.\d+)*")
# Empty chunk directories remain when their last chunk is deleted.
_CHUNK_KEY = re.compile(r"(c|\d+)(/\d+)*")


def owns(name: str) -> bool:
    """Return whether a file has the name of a document or a chunk."""
    last = name.rpartition("/")[2]
    return last in _DOCUMENTS or _CHUNK.fullmatch(last) is not None


def unowned_files(directory: Location, tree: Tree) -> Iterator[str]:
    """Yield files and directories at any depth that do not belong to a node or an array."""
    arrays = {"/".join(map(str, path)) for path in tree.arrays}
    inner = {"/".join(map(str, path[:depth])) for path in tree.arrays for depth in range(len(path))}
    groups = {key_below(name, ZARR3_DOCUMENT) for name in inner or {""}}
    own = own_files(Files(directory), arrays).and_these(groups)
    yield from (name for name, entry in directory.below() if not own.has(name, entry))


@dataclass(frozen=True)
class OwnFiles:
    """The known files in a directory.

    Attributes:
        names: File names relative to the directory.
        arrays: Names of zarr arrays stored as directories; "" for the directory itself.
    """

    names: Set[str]
    arrays: Set[str] = frozenset()

    def and_these(self, names: Iterable[str]) -> OwnFiles:
        """Return a copy with additional files."""
        return OwnFiles(self.names | set(names), self.arrays)

    def has(self, name: str, entry: DirEntry) -> bool:
        """Return whether an entry is one of the known files or one of their directories."""
        if not entry.is_dir:
            return name in self.names
        return name in self._directories or self._is_of_chunks(name)

    @cached_property
    def _directories(self) -> Set[str]:
        return {above for name in self.names for above in _parents(name)}

    def _is_of_chunks(self, name: str) -> bool:
        array = next((above for above in _parents(name) if above in self.arrays), None)
        return array is not None and _CHUNK_KEY.fullmatch(name[len(array) :].lstrip("/")) is not None


def own_files(entries: Entries, arrays: Iterable[str]) -> OwnFiles:
    """Return the documents of the named arrays, and the chunks within their grids.

    Args:
        entries: Entries of a directory in which every key is a file.
        arrays: Names of the arrays.

    Raises:
        StorageError: A document cannot be read, so that the array's own files are unknown.
    """
    result = chunk_tables(entries)
    arrays = list(arrays)
    for name in arrays:
        fault = result.faults.get(name)
        if isinstance(fault, StorageError):
            raise fault
    known = {name: result.tables[name] for name in arrays if name in result.tables}
    return OwnFiles({key for table in known.values() for key in _keys(table)}, known.keys())


def _keys(table: ChunkTable) -> Iterator[str]:
    yield key_below(table.name, table.document)
    if table.document == ZARR2_DOCUMENT:
        yield key_below(table.name, _ATTRIBUTES)
    yield from map(table.key, table.chunks)


def _parents(name: str) -> Iterator[str]:
    """Yield the parent directories of a name; the last is ""."""
    while name:
        name = name.rpartition("/")[0]
        yield name
