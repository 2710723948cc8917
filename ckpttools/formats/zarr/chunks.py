"""The zarr arrays among the keys of a database: what each one's metadata says, and which chunks are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.json_file import parse_json
from ckpttools.formats.orbax.entries import Entries
from ckpttools.formats.orbax.ocdbt import Entry
from ckpttools.formats.zarr import zarr2, zarr3
from ckpttools.formats.zarr.array import ZarrArray
from ckpttools.stores.location import Location

PARSERS: Mapping[str, Callable[[Mapping[str, Any], str], ZarrArray]] = {
    zarr3.DOCUMENT: zarr3.parse_array,
    zarr2.DOCUMENT: zarr2.parse_array,
}
DOCUMENTS = tuple(PARSERS)
"""File names of the metadata of arrays: where there are several, the first counts."""
# Directories that `has_array` lists before it gives up.
_MAX_SEARCHED = 100


def has_array(path: Location) -> bool:
    """Return whether a directory contains an array at any depth; searches a limited number of directories."""
    rest, searched = [path], 0
    while rest and searched < _MAX_SEARCHED:
        folder, searched = rest.pop(), searched + 1
        entries = folder.entries()
        if any(entry.name in DOCUMENTS for entry in entries):
            return True
        rest += [folder / entry.name for entry in reversed(entries) if entry.is_dir]
    return False


@dataclass(frozen=True)
class ChunkTable:
    """One array.

    Attributes:
        name: what comes before the names of its chunks, without the slash; "" for an array alone.
        document: file name of its metadata, which tells the version of zarr.
        array: what that says.
        chunks: those that are there, by index in the grid.
        strays: names of chunks for which the grid has no room.
    """

    name: str
    document: str
    array: ZarrArray
    chunks: Mapping[Shape, Entry]
    strays: tuple[str, ...]

    @property
    def missing(self) -> int:
        """How many chunks are not there."""
        return prod(self.array.grid) - len(self.chunks)

    def first_missing(self) -> Shape:
        """Return the first chunk in C order that is not there; one must be missing."""
        return self.array.first_missing(len(self.chunks), self.chunks.__contains__)

    def key(self, index: Shape) -> str:
        """Return the key of a chunk in the database."""
        return key_below(self.name, self.array.keys.key(index))


def key_below(name: str, rest: str) -> str:
    """Return the key of what belongs to an array; one alone has no name."""
    return f"{name}/{rest}" if name else rest


@dataclass(frozen=True)
class ChunkTables:
    """All arrays of a database.

    Attributes:
        tables: by name.
        faults: what is wrong with the metadata of those that have no table.
        documents: for each name the metadata documents there, those of groups, too.
    """

    tables: Mapping[str, ChunkTable]
    faults: Mapping[str, CheckpointError]
    documents: Mapping[str, Sequence[str]]


def chunk_tables(database: Entries) -> ChunkTables:
    """Return the arrays of a database; what is wrong with one of them is kept beside the others."""
    documents: dict[str, list[str]] = defaultdict(list)
    for key in database.all:
        name, _, last = key.rpartition("/")
        if last in PARSERS:
            documents[name].append(last)
    below = _by_array(database.all, documents)
    tables: dict[str, ChunkTable] = {}
    faults: dict[str, CheckpointError] = {}
    known: _Known = {}
    for name, result in documents.items():
        try:
            table = _table(database, name, _preferred(result), below.get(name, ()), known)
        except CheckpointError as error:
            faults[name] = error
        else:
            if table is not None:
                tables[name] = table
    return ChunkTables(tables, faults, documents)


def _preferred(documents: Sequence[str]) -> str:
    return next(name for name in PARSERS if name in documents)


def _by_array(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, list[str]]:
    """For each array the rest of its keys, documents left out."""
    known = set(names)
    result: dict[str, list[str]] = defaultdict(list)
    for key in entries:
        if key.rpartition("/")[2] in PARSERS:
            continue
        head = key
        while head:
            head = head.rpartition("/")[0]
            if head in known:
                result[head].append(key[len(head) + 1 :] if head else key)
                break
    return result


# (name of the document, its text) -> what it says; None for a group. Arrays of one shape share theirs.
_Known = dict[tuple[str, bytes], ZarrArray | None]


def _table(
    database: Entries, name: str, document: str, keys: Iterable[str], known: _Known
) -> ChunkTable | None:
    """Return the chunks of one array; None where the document is that of a group."""
    key = key_below(name, document)
    text, location = database.read(database.all[key]), f"{database.directory}: {key}"
    if (document, text) not in known:
        known[document, text] = _parsed(document, text, location)
    array = known[document, text]
    if array is None:
        return None
    chunks: dict[Shape, Entry] = {}
    strays: list[str] = []
    for rest in keys:
        index = array.keys.index(rest, len(array.grid))
        if index is None:
            continue
        if array.has_room(index):
            chunks[index] = database.all[key_below(name, rest)]
        else:
            strays.append(rest)
    return ChunkTable(name, document, array, chunks, tuple(strays))


def _parsed(document: str, text: bytes, location: str) -> ZarrArray | None:
    fields = _json(text, location)
    return None if fields.get("node_type") == "group" else _array(document, fields, location)


def parse_array(document: str, text: bytes, location: str) -> ZarrArray:
    """What a metadata document says.

    Args:
        document: file name of it, one of `PARSERS`.
        text: its content.
        location: for messages.

    Raises:
        FormatError: it is not the metadata of an array.
    """
    return _array(document, _json(text, location), location)


def _array(document: str, fields: Mapping[str, Any], location: str) -> ZarrArray:
    try:
        return PARSERS[document](fields, location)
    # Documents that are put together wrongly, such as with codecs that are not a list of objects.
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        version = "v2" if document == zarr2.DOCUMENT else "v3"
        raise FormatError(
            f"not the metadata of a zarr {version} array",
            location=location,
            got=f"{type(error).__name__}: {error}",
        ) from error


def _json(text: bytes, location: str) -> Mapping[str, Any]:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise FormatError("not JSON", location=location, got=error) from error
    if not isinstance(fields, dict):
        raise FormatError("JSON, but not an object", location=location)
    return fields
