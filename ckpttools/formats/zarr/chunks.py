"""The zarr arrays in a database: their metadata, which chunks exist, and links to directories of arrays.

Cycles are rejected, and so are chains of links that double the number of names at each level.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from math import prod
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.json_file import parse_json
from ckpttools.formats.orbax.entries import Entries
from ckpttools.formats.orbax.ocdbt import Entry
from ckpttools.formats.zarr.array import ZARR2_DOCUMENT, ZARR3_DOCUMENT, ZarrArray
from ckpttools.stores.base import DirEntry
from ckpttools.stores.location import Location

DOCUMENTS = (ZARR3_DOCUMENT, ZARR2_DOCUMENT)
"""File names of array metadata; if there are several, the first one counts."""
# Number of directories that `has_array` lists before it gives up.
_MAX_SEARCHED = 100


def _parser(document: str) -> Callable[[Mapping[str, Any], str], ZarrArray]:
    """Return the metadata parser for a document; most checkpoints use only one version of zarr."""
    if document == ZARR2_DOCUMENT:
        from ckpttools.formats.zarr import zarr2

        return zarr2.parse_array
    from ckpttools.formats.zarr import zarr3

    return zarr3.parse_array


def has_array(path: Location) -> bool:
    """Return whether a directory has an array at any depth, searching a limited number of directories."""
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
    """The metadata and existing chunks of an array.

    Attributes:
        name: Prefix of the chunks' names without the slash; "" for the only array.
        document: File name of the metadata, which identifies the version of zarr.
        array: The parsed metadata.
        chunks: The existing chunks, by grid index.
        strays: Names of chunks outside the grid.
    """

    name: str
    document: str
    array: ZarrArray
    chunks: Mapping[Shape, Entry]
    strays: tuple[str, ...]

    @property
    def missing(self) -> int:
        """The number of missing chunks."""
        return prod(self.array.grid) - len(self.chunks)

    def first_missing(self) -> Shape:
        """Return the first missing chunk in C order; at least one must be missing."""
        return self.array.first_missing(len(self.chunks), self.chunks.__contains__)

    def key(self, index: Shape) -> str:
        """Return the key of a chunk in the database."""
        return key_below(self.name, self.array.keys.key(index))


def key_below(name: str, rest: str) -> str:
    """Return the key of an array's document or chunk; the only array has an empty name."""
    return f"{name}/{rest}" if name else rest


@dataclass(frozen=True)
class ChunkTables:
    """All arrays of a database.

    Attributes:
        tables: Arrays by name.
        faults: Errors in the metadata of arrays without a table.
        documents: Names of the metadata documents, by array or group.
    """

    tables: Mapping[str, ChunkTable]
    faults: Mapping[str, CheckpointError]
    documents: Mapping[str, Sequence[str]]


def chunk_tables(database: Entries) -> ChunkTables:
    """Return the arrays of a database; faulty ones are listed separately."""
    documents: dict[str, list[str]] = defaultdict(list)
    for key in database.all:
        name, _, last = key.rpartition("/")
        if last in DOCUMENTS:
            documents[name].append(last)
    below = _group_by_array(database.all, documents)
    tables: dict[str, ChunkTable] = {}
    faults: dict[str, CheckpointError] = {}
    known: _Known = {}
    for name, result in documents.items():
        try:
            table = _table(database, name, _preferred_document(result), below.get(name, ()), known)
        except CheckpointError as error:
            faults[name] = error
        else:
            if table is not None:
                tables[name] = table
    return ChunkTables(tables, faults, documents)


def _preferred_document(documents: Sequence[str]) -> str:
    return next(name for name in DOCUMENTS if name in documents)


def _group_by_array(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, list[str]]:
    """Group keys by array, without the array's name and without documents."""
    known = set(names)
    result: dict[str, list[str]] = defaultdict(list)
    for key in entries:
        if key.rpartition("/")[2] in DOCUMENTS:
            continue
        head = key
        while head:
            head = head.rpartition("/")[0]
            if head in known:
                result[head].append(key[len(head) + 1 :] if head else key)
                break
    return result


# A cache of (document name, text) -> array, or None for a group. Arrays of the same shape share an entry.
_Known = dict[tuple[str, bytes], ZarrArray | None]


def _table(
    database: Entries, name: str, document: str, keys: Iterable[str], known: _Known
) -> ChunkTable | None:
    """Return the chunks of one array; None for a group's document."""
    key = key_below(name, document)
    text, location = database.read(database.all[key]), f"{database.directory}: {key}"
    if (document, text) not in known:
        known[document, text] = _parse_array(document, text, location)
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


def _parse_array(document: str, text: bytes, location: str) -> ZarrArray | None:
    fields = _json(text, location)
    return None if fields.get("node_type") == "group" else _array(document, fields, location)


def parse_array(document: str, text: bytes, location: str) -> ZarrArray:
    """Parse a metadata document of an array.

    Args:
        document: File name of the document, one of `DOCUMENTS`.
        text: Content of the document.
        location: The location for messages.

    Raises:
        FormatError: The document is not valid array metadata.
    """
    return _array(document, _json(text, location), location)


def _array(document: str, fields: Mapping[str, Any], location: str) -> ZarrArray:
    try:
        return _parser(document)(fields, location)
    # Raised by malformed documents, for example with codecs that are not a list of objects.
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        version = "v2" if document == ZARR2_DOCUMENT else "v3"
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


_MAX_NAMES = 1000

Way = tuple[Location, ...]
"""Targets of the links that were followed to reach a directory."""


@dataclass(frozen=True)
class FollowedLinks:
    """The links that were followed in a directory and below.

    Attributes:
        names: The number of names of each directory.
    """

    names: Counter[Location] = field(default_factory=Counter)

    def into(self, folder: Location, entry: DirEntry, followed: Way) -> Way:
        """Return the followed links of a subdirectory, given those of its parent.

        Raises:
            FormatError: A link leads to one of its parents, or links give a directory too many names.
        """
        if entry.is_own_dir:
            return followed
        link = folder / entry.name
        target, around = link.resolve(), link.parent.resolve()
        if target in (*followed, around, *around.parents):
            raise FormatError(
                "a link leads to a directory that it is in", location=link, hint="remove the link"
            )
        self.names[target] += 1
        if self.names[target] > _MAX_NAMES:
            raise FormatError(
                f"links give a directory more than {_MAX_NAMES:,} names",
                location=link,
                got=f"one more for {target}",
                expected="a separate directory for each array",
                hint="remove the links",
            )
        return (*followed, target)
