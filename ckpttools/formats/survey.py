"""The files of an opened checkpoint with their contents, from indexes and metadata; reads no array data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked, Stored
from ckpttools.array.storage import Storage, StoredArray, StoredFile
from ckpttools.array.tree import Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, grid_shape
from ckpttools.formats.orbax.entries import entries_of, files_below
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES, Extent, length_of
from ckpttools.formats.zarr.chunks import ChunkTable, chunk_tables, key_below
from ckpttools.stores.base import Status
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse


@dataclass
class _Use:
    """Accumulates the uses of a file."""

    live: list[tuple[int, int]] = field(default_factory=list)
    index: list[tuple[int, int]] = field(default_factory=list)
    arrays: set[str] = field(default_factory=set)

    def add(self, extent: Extent, array: str) -> None:
        self.live.append((extent.offset, extent.offset + extent.length))
        self.arrays.add(array)

    def file(self, name: str, status: Status, *, may_be_unused: bool) -> StoredFile:
        kind = "data" if self.live else "index" if self.index else "unused" if may_be_unused else "other"
        return self._file(name, kind, status.size, status.links)

    def missing(self, name: str) -> StoredFile:
        """Return the entry of a missing file."""
        return self._file(name, "missing", 0, 1)

    def _file(self, name: str, kind: str, size: int, links: int) -> StoredFile:
        live, index = (_covered_bytes(ranges, size) for ranges in (self.live, self.index))
        lost = _covered_bytes(self.live) + _covered_bytes(self.index) - live - index
        return StoredFile(name, kind, size, live, index, len(self.arrays), len(self.live), links, lost)


def _covered_bytes(ranges: Iterable[tuple[int, int]], size: int | None = None) -> int:
    """Return how many bytes of a file of this size are in at least one of the ranges."""
    total = reached = 0
    for begin, end in sorted((begin, end if size is None else min(end, size)) for begin, end in ranges):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def zarr_storage(tree: Tree, max_index_bytes: int = MAX_INDEX_BYTES) -> Storage:
    """Survey a checkpoint of zarr arrays below the opened directory.

    Args:
        tree: The tree as opened by its format.
        max_index_bytes: See `ckpttools.formats.base.ReadOptions`.

    Raises:
        FormatError, StorageError: An index or the metadata of an array is damaged or cannot be read.
    """
    database = entries_of(parse(tree.metadata.location), max_index_bytes=max_index_bytes)
    uses: dict[str, _Use] = defaultdict(_Use)
    for node in database.nodes:
        uses[node.file].index.append((node.offset, node.offset + node.length))
    result = chunk_tables(database)
    for error in result.faults.values():
        raise error
    for name, documents in result.documents.items():
        for document in documents:
            entry = database.all[key_below(name, document)]
            if isinstance(entry, Extent):
                uses[entry.file].index.append((entry.offset, entry.offset + entry.length))
    for name, table in result.tables.items():
        for entry in table.chunks.values():
            if isinstance(entry, Extent):
                uses[entry.file].add(entry, name)
    names = {dotted(path): keystr(path) for path in tree.arrays}
    order = {name: position for position, name in enumerate(names)}
    tables = sorted(result.tables.values(), key=lambda table: order.get(table.name, len(order)))
    files = [
        uses.pop(name, _Use()).file(name, status, may_be_unused=_is_data(name))
        for name, status in files_below(database.directory)
    ]
    files += [use.missing(name) for name, use in sorted(uses.items())]
    arrays = tuple(_describe_stored(table, names.get(table.name, table.name)) for table in tables)
    return Storage(str(database.directory), database.manifests, tuple(files), arrays)


def _is_data(name: str) -> bool:
    """Return whether a file has the name of an OCDBT data file."""
    return name.startswith(("d/", "ocdbt.process_", "ocdbt_data/", "ocdbt_meta/"))


def _describe_stored(table: ChunkTable, path: str) -> StoredArray:
    array = table.array
    nbytes = sum(map(length_of, table.chunks.values()))
    return StoredArray(
        path=path,
        shape=array.shape,
        dtype=array.dtype,
        chunk=array.chunk,
        piece=array.coding.shape,
        codecs=array.codecs,
        compressed=array.is_compressed,
        transposed=array.is_transposed,
        chunks=prod(array.grid),
        missing=table.missing,
        nbytes=nbytes,
    )


def plain_storage(tree: Tree) -> Storage:
    """Survey a checkpoint whose arrays know their locations in files."""
    location = parse(tree.metadata.location)
    root = location.folder()
    uses: dict[str, _Use] = defaultdict(_Use)
    for path, array in tree.arrays.items():
        if isinstance(array, Stored):
            extent = Extent(array.source.path, array.offset, array.stored_nbytes)
            uses[_relative_name(root, extent.file)].add(extent, keystr(path))
    for use in uses.values():
        # The range before the first tensor is the header.
        use.index.append((0, min(begin for begin, _ in use.live)))
    suffixes = {(root / name).suffix for name in uses}
    files = tuple(
        uses[name].file(name, status, may_be_unused=(root / name).suffix in suffixes)
        for name, status in _iter_files(location, uses)
    )
    arrays = tuple(_describe_array(keystr(path), array) for path, array in tree.arrays.items())
    return Storage(str(root), (), files, arrays)


def _relative_name(root: Location, file: str) -> str:
    """Return the name of a file relative to a directory, or the full path if it is elsewhere."""
    location = parse(file)
    return location.relative_to(root) if root in location.parents else file


def _iter_files(location: Location, uses: Mapping[str, object]) -> Iterator[tuple[str, Status]]:
    """Yield the files in use and, if a directory was opened, the other files in it."""
    root = location.folder()
    entries = {entry.name for entry in root.entries() if entry.is_file} if location.is_dir() else set()
    for name in sorted({*entries, *uses}):
        yield name, (root / name).stat()


def _describe_array(path: str, array: LazyArray) -> StoredArray:
    chunk: Shape = array.chunk if isinstance(array, Chunked) else array.shape
    return StoredArray(
        path=path,
        shape=array.shape,
        dtype=array.dtype,
        chunk=chunk,
        piece=None if isinstance(array, Stored) else chunk,
        codecs=(),
        chunks=prod(grid_shape(array.shape, chunk)) if all(chunk) else 0,
        missing=0,
        nbytes=array.read_cost(Region.whole(array.shape)).nbytes,
    )
