"""The OCDBT index of a directory: the merged index, or the union of the indexes of all processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.message_terms import action
from ckpttools.formats.orbax import ocdbt_files
from ckpttools.formats.orbax.ocdbt import MANIFEST, Entry, Extent, length_of
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

PROCESSES = "ocdbt.process_*"
_COMPARE_BYTES = 1 << 20
# Number of bytes that are compared at both ends of a value that several processes have, whenever the index is
# read. Values of different steps differ there, and opening a replicated checkpoint does not read all its
# data.
_COMPARED_ENDS = 64 << 10


@dataclass(frozen=True)
class Index:
    """The keys of a directory and their values.

    Attributes:
        manifests: Manifest files of the index, relative to the directory.
        entries: Key -> inline value or byte range, sorted by key.
        nodes: Byte ranges of manifests and nodes.
    """

    manifests: tuple[str, ...]
    entries: Mapping[bytes, Entry]
    nodes: tuple[Extent, ...]


def index_of(directory: Location, max_bytes: int) -> Index | None:
    """Return the index in use: the merged one, else the union of all processes' indexes, else None.

    Args:
        directory: Directory of the item.
        max_bytes: Memory limit for an index that expands to more than its size on disk suggests.

    Raises:
        FormatError: The index is damaged, or processes disagree on a key.
        StorageError: The index cannot be read.
    """
    if (directory / MANIFEST).is_file():
        return read_index(directory, max_bytes)
    return union_of(directory, max_bytes) if processes_of(directory) else None


def processes_of(directory: Location) -> list[Location]:
    """Return the databases of a save's processes, which exist until Orbax merges them."""
    return sorted(location.parent for location in directory.glob(f"{PROCESSES}/{MANIFEST}"))


def read_index(directory: Location, max_bytes: int) -> Index:
    """Read the OCDBT database in a directory; arguments and errors as for `index_of`."""
    nodes: list[Extent] = []

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        source = named_file(directory, file, "a file of the index")
        try:
            rest = max(0, source.size - offset)
            nodes.append(Extent(file, offset, rest if length is None else length))
            # If a node extends past the end of its file, the read is short, and the length check fails.
            return source.read(min(offset, source.size), rest if length is None else min(length, rest))
        finally:
            source.close()

    try:
        return Index((MANIFEST,), ocdbt_files.read(fetch, max_bytes), tuple(nodes))
    except FormatError as error:
        raise error.at(directory / (error.location or MANIFEST)) from error


def union_of(directory: Location, max_bytes: int, *, compare_all: bool = False) -> Index:
    """Return the union of the databases of all processes; other arguments and errors as for `index_of`.

    Replicated arrays are in several databases and must have the same bytes. Otherwise the databases are from
    different saves, and either could be wrong.

    Args:
        compare_all: Whether to compare all bytes of replicated values, not only their ends.
    """
    processes = processes_of(directory)
    entries: dict[bytes, Entry] = {}
    nodes: list[Extent] = []
    values = _Values(directory, compare_all)
    for process in processes:
        result = read_index(process, max_bytes)
        nodes += [_relative_extent(node, process.name) for node in result.nodes]
        for key, inner in result.entries.items():
            entry = _relative_extent(inner, process.name) if isinstance(inner, Extent) else inner
            if not values.agree(entries.setdefault(key, entry), entry):
                raise FormatError(
                    "two processes disagree",
                    location=f"{process}: {key.decode(errors='surrogateescape')}",
                    hint="these directories are from different saves: keep the one that belongs here",
                )
    manifests = tuple(f"{process.name}/{MANIFEST}" for process in processes)
    return Index(manifests, dict(sorted(entries.items())), tuple(nodes))


def _relative_extent(extent: Extent, name: str) -> Extent:
    return replace(extent, file=f"{name}/{extent.file}")


class _Values:
    """Reads the values of entries in parts and compares them."""

    def __init__(self, directory: Location, compare_all: bool) -> None:
        self._directory = directory
        self._compare_all = compare_all
        self._files: dict[str, File] = {}

    def agree(self, a: Entry, b: Entry) -> bool:
        """Return whether two entries have the same bytes; unreadable files are reported elsewhere."""
        if a == b or length_of(a) != length_of(b):
            return a == b
        try:
            return all(self._part(a, part) == self._part(b, part) for part in self._parts(length_of(a)))
        except CheckpointError:
            return True

    def _parts(self, length: int) -> Iterator[range]:
        if self._compare_all:
            step = _COMPARE_BYTES
            yield from (range(start, min(start + step, length)) for start in range(0, length, step))
        else:
            yield range(min(length, _COMPARED_ENDS))
            yield range(max(0, length - _COMPARED_ENDS), length)

    def _part(self, entry: Entry, part: range) -> bytes:
        if isinstance(entry, bytes):
            return entry[part.start : part.stop]
        if entry.file not in self._files:
            self._files[entry.file] = (self._directory / entry.file).open()
        return self._files[entry.file].read(entry.offset + part.start, len(part))


def named_file(directory: Location, name: str, subject: str = "a data file") -> File:
    """Open a file that an item refers to.

    Raises:
        FormatError: The file does not exist.
        StorageError: The file cannot be accessed.
    """
    path = directory / name
    result = path.status()
    if result is None:
        raise FormatError(
            f"{subject} is missing: {path}",
            got="no such file",
            hint="it was deleted or not copied: fetch the checkpoint again; "
            f"{action('doctor', str(directory))} lists what else is missing",
        )
    return path.open(result)
