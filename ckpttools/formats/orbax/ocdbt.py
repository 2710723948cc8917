"""The OCDBT index codec: a database as a map from key to an inline value or a byte range.

An OCDBT database is a manifest, a B+tree of nodes, and data files: any files below its root, since
a leaf of the tree names file, offset and length of each value that it does not hold itself.
`encode` returns the bytes of an index, `read` asks its caller for the bytes it needs.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, NoReturn

import google_crc32c

from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.wording import option

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
_crc32c: Callable[[bytes], int] = google_crc32c.value
_HEADER = struct.Struct("<4sQ")
_LEAST_FRAME = _HEADER.size + 2 + 4

# What Orbax configures: largest inline value and decoded node, log2 of the version tree's arity,
# and, unlike Orbax, no compression.
_CONFIG = (1024, 100_000_000, 4, 0)
_MAX_KEY = _MAX_PATH = (1 << 16) - 1
MAX_INLINE_VALUE = _MAX_NODE_ENTRIES = 1 << 20
_MAX_END = (1 << 63) - 1  # of a byte range
_MISSING = (1 << 64) - 1  # as offset and length of a root: there is no tree
_SMALL = [bytes([number]) for number in range(128)]
# What an index may take in memory: so much, or so many times what is stored of it. Measured: 200,000 chunks
# of 200 arrays, which tensorstore stores in 3 bytes each, take 363 bytes each, of which 337 are counted.
MAX_INDEX_BYTES, _MOST_EXPANDED = 256 << 20, 256
_STRING_BYTES = 256  # beside its characters: objects, and its entry in a map
_DECOMPRESSED_AT_ONCE = 1 << 20
_DAMAGED = "the file is damaged or was not written completely; restore it from another copy"


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range in a file; `file` is relative to the root of the database."""

    file: str
    offset: int
    length: int


Entry = bytes | Extent


def length_of(entry: Entry) -> int:
    """Bytes of what an entry stands for."""
    return entry.length if isinstance(entry, Extent) else len(entry)


KeyedEntries = Iterable[tuple[bytes, Entry]]
Fetch = Callable[[str, int, int | None], bytes]


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """An index as bytes: `manifest` goes to `manifest.ocdbt`, `nodes` to the node file."""

    manifest: bytes
    nodes: bytes
    num_nodes: int
    height: int


def encode(
    entries: KeyedEntries,
    node_file: str,
    *,
    node_entries: int = 5000,
    uuid: bytes | None = None,
    commit_time_ns: int = 0,
) -> EncodedIndex:
    """The index of `entries`, with all tree nodes in one file: leaves first, root last.

    Args:
        entries: keys and what they stand for, in any order, each key once.
        node_file: path of the node file, relative to the root of the database.
        node_entries: most entries of one node.
        uuid: 16 bytes; made from the content unless given, so that equal input gives equal bytes.
        commit_time_ns: nanoseconds since 1970 that the one version carries.
    """
    _check_call(node_file, node_entries, uuid)
    out, height, table = bytearray(), 0, _table([node_file])
    items, most = _ordered(entries), node_entries
    only, starts = len(items) <= most, range(0, len(items), most)
    level = [_add_leaf(out, items[start : start + most], only) for start in starts]
    num_nodes = len(level)
    while len(level) > 1:
        height += 1
        head, only = bytes([height]) + table, len(level) <= most
        groups = [level[start : start + most] for start in range(0, len(level), most)]
        level = [_add_interior(out, group, only, head) for group in groups]
        num_nodes += len(level)
    nodes = bytes(out)
    uuid = uuid or hashlib.sha256(table + nodes).digest()[:16]
    root = level[0].numbers if level else (_MISSING, _MISSING, 0, 0, 0)
    version = _varints([1, 1, height, 0, *root]) + struct.pack("<Q", commit_time_ns)
    table = table if level else _table([""])
    body = uuid + b"\0" + _varints(_CONFIG) + table + version + b"\0"  # no older versions
    return EncodedIndex(_frame(_MANIFEST_MAGIC, body), nodes, num_nodes, height)


def read(fetch: Fetch, max_bytes: int = MAX_INDEX_BYTES) -> dict[bytes, Entry]:
    """The whole index of the newest version, keys in order.

    Args:
        fetch: `fetch(file, offset, length)` returns bytes of a file, to its end if length is None.
        max_bytes: memory that the index may take, where that is more than its size on disk accounts for.

    Raises:
        FormatError: it is damaged, or would take more.
    """
    reader = _Reader(fetch, max_bytes)
    body = reader.open(fetch(MANIFEST, 0, None), _MANIFEST_MAGIC, MANIFEST)
    root, height = _root(body)
    entries = list(reader.walk(root, height, b"")) if root else []
    index = dict(entries)
    if len(index) != len(entries):
        got = f"{len(entries)} entries, {len(index)} keys"
        body.fail("A key occurs twice.", got, "every key once")
    return index


class _Child(NamedTuple):
    """An encoded node: the keys it begins and ends with, and what its parent states of it."""

    first: bytes
    last: bytes
    numbers: tuple[int, ...]  # offset, length, keys, bytes of its tree, bytes out of line


def _add(out: bytearray, body: bytes, first: bytes, last: bytes, *sums: int) -> _Child:
    (keys, tree, values), node, offset = sums, _frame(_NODE_MAGIC, body), len(out)
    out += node
    numbers = offset, len(node), keys, tree + len(node), min(values, _MISSING)
    return _Child(first, last, numbers)


def _add_leaf(out: bytearray, items: Sequence[tuple[bytes, Entry]], root: bool) -> _Child:
    first, last = items[0][0], items[-1][0]
    implied = 0 if root else _common(first, last)
    keys, entries = [key[implied:] for key, _ in items], [entry for _, entry in items]
    extents = [entry for entry in entries if isinstance(entry, Extent)]
    files = sorted({extent.file for extent in extents}, key=_path_bytes)
    ids = {file: number for number, file in enumerate(files)}
    columns = [
        b"\0" + _table(files) + _varint(len(keys)) + _strings(keys),
        _varints(e.length if isinstance(e, Extent) else len(e) for e in entries),
        bytes(isinstance(entry, Extent) for entry in entries),
        _varints(ids[extent.file] for extent in extents),
        _varints(extent.offset for extent in extents),
        *(entry for entry in entries if isinstance(entry, bytes)),
    ]
    total = sum(extent.length for extent in extents)
    return _add(out, b"".join(columns), first, last, len(keys), 0, total)


def _add_interior(out: bytearray, children: Sequence[_Child], root: bool, head: bytes) -> _Child:
    first, last = children[0].first, children[-1].last
    implied = 0 if root else _common(first, last)
    keys = [child.first[implied:] for child in children]
    shared = [_common(c.first, c.last) - implied for c in children]
    numbers = list(zip(*(child.numbers for child in children), strict=True))
    columns = [head, _varint(len(keys)), _strings(keys, shared), bytes(len(keys))]  # all in file 0
    body = b"".join(columns + list(map(_varints, numbers)))
    return _add(out, body, first, last, *map(sum, numbers[2:]))


def _table(files: Sequence[str]) -> bytes:
    paths = list(map(_path_bytes, files))
    return _varint(len(paths)) + _strings(paths, [0] * len(paths))


def _strings(strings: Sequence[bytes], third: Sequence[int] = ()) -> bytes:
    """Prefix-compressed strings; `third` is the column that paths and interior keys add."""
    prefixes = [_common(a, b) for a, b in pairwise(strings)]
    suffixes = [*strings[:1], *(s[n:] for s, n in zip(strings[1:], prefixes, strict=True))]
    lengths = _varints(prefixes) + _varints(map(len, suffixes))
    return lengths + _varints(third) + b"".join(suffixes)


def _common(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (differing.bit_length() + 7) // 8


def _frame(magic: bytes, body: bytes) -> bytes:
    data = _HEADER.pack(magic, _LEAST_FRAME + len(body)) + b"\0\0" + body
    return data + _crc32c(data).to_bytes(4, "little")


def _varints(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _varint(number: int) -> bytes:
    if number < 128:
        return _SMALL[number]
    groups = [number >> shift & 127 | 128 for shift in range(0, number.bit_length(), 7)]
    return bytes([*groups[:-1], groups[-1] & 127])


def _ordered(entries: KeyedEntries) -> list[tuple[bytes, Entry]]:
    items = sorted(entries, key=itemgetter(0))
    for file in {entry.file for _, entry in items if isinstance(entry, Extent)}:
        _check_path(file)
    for key, entry in items:
        _check_entry(key, entry)
    for (key, _), (following, _) in pairwise(items):
        if key == following:
            raise FormatError(f"The key {key!r} occurs twice.", hint="give every key one entry")
    return items


def _check_entry(key: bytes, entry: Entry) -> None:
    start, size, most = 0, len(entry) if isinstance(entry, bytes) else 0, MAX_INLINE_VALUE
    if isinstance(entry, Extent):
        start, size, most = entry.offset, entry.length, _MAX_END
    if len(key) > _MAX_KEY or min(start, size) < 0 or start + size > most:
        got = f"key of {len(key)} bytes, value from {start}, {size} bytes"
        wanted = f"key of at most {_MAX_KEY} bytes, value from 0 to {most}"
        raise FormatError("No index can hold this entry.", place=key[:80], got=got, wanted=wanted)


def _check_call(node_file: str, node_entries: int, uuid: bytes | None) -> None:
    _check_path(node_file)
    if not 2 <= node_entries <= _MAX_NODE_ENTRIES or len(uuid or bytes(16)) != 16:
        got = f"{node_entries} entries, uuid {uuid!r}"
        wanted = f"2 to {_MAX_NODE_ENTRIES} entries in a node, a uuid of 16 bytes"
        raise UsageError("No index can be made so.", got=got, wanted=wanted)


def _check_path(path: str, place: str | None = None) -> None:
    """Refuses what no store below a root can hold: empty or dotted steps, overlong paths."""
    steps, size = path.split("/"), len(_path_bytes(path))
    if {"", ".", ".."}.intersection(steps) or "\0" in path or size > _MAX_PATH:
        wanted = f"a path below the root, at most {_MAX_PATH} bytes"
        raise FormatError("This is not a path of a data file.", place=place, got=path, wanted=wanted)


# A file or node, and what the paths in the data file tables of nodes in it start with.
_File = tuple[str, bytes]
_Node = tuple[Extent, bytes]


class _Body:
    """A cursor over the bytes of a manifest or node."""

    def __init__(self, data: bytes, place: str, charge: Callable[[_Body, int], None] | None = None) -> None:
        self.data, self.place, self.position = data, place, 0
        self._charge = charge

    def charge(self, nbytes: int) -> None:
        """Says that so much memory is about to be taken; refused if that is too much."""
        if self._charge is not None:
            self._charge(self, nbytes)

    def fail(self, message: str, got: object, wanted: object, hint: str = _DAMAGED) -> NoReturn:
        raise FormatError(message, place=self.place, got=got, wanted=wanted, hint=hint)

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) < count:
            self.fail("The data ends inside a field.", f"{len(taken)} bytes", f"{count} bytes")
        self.position += count
        return taken

    def varint(self) -> int:
        number, chunk = 0, self.data[self.position : self.position + 10]
        for index, byte in enumerate(chunk):
            number |= (byte & 127) << 7 * index
            if byte < 128:
                self.position += index + 1
                break
        else:
            self.fail("A varint runs past the end.", f"{len(chunk)} bytes", "a byte below 128")
        return number

    def varints(self, count: int) -> list[int]:
        chunk = self.data[self.position : self.position + count]
        if len(chunk) == count and chunk.isascii():  # every number is below 128
            self.position += count
            return list(chunk)
        return [self.varint() for _ in range(count)]

    def known(self, what: str, number: int, names: Sequence[str]) -> int:
        if number >= len(names):
            wanted = " or ".join(f"{index} ({name})" for index, name in enumerate(names))
            self.fail(f"This {what} is unknown.", number, wanted)
        return number


class _Reader:
    """Reads nodes, each of them once, as long as there is memory for what they hold."""

    def __init__(self, fetch: Fetch, max_bytes: int) -> None:
        self._fetch, self._max_bytes = fetch, max_bytes
        self._stored = self._taken = 0
        # For each file the byte ranges of nodes that were read, in order: start, end, start, end, …
        self._visited: dict[str, list[int]] = defaultdict(list)

    def open(self, data: bytes, magic: bytes, place: str) -> _Body:
        """Checks the frame and returns its body, decompressed."""
        self._stored += len(data)
        frame = _Body(data, place, self._charge)
        _check(frame, magic)
        frame.take(_HEADER.size)
        frame.known("format version", frame.varint(), ["the only one"])
        method = frame.known("compression", frame.varint(), ["none", "zstd"])
        body = data[frame.position : -4]
        frame.charge(len(body))
        return _Body(_decompressed(frame, body) if method else body, place, self._charge)

    def _charge(self, body: _Body, nbytes: int) -> None:
        self._taken += nbytes
        most = max(self._max_bytes, _MOST_EXPANDED * self._stored)
        if self._taken > most:
            got, wanted = f"more than {most} bytes out of {self._stored}", f"at most {most} bytes"
            larger = f"a larger {option('max_index_bytes')} than {self._max_bytes}"
            hint = f"if the checkpoint is trusted, pass {larger}"
            body.fail("The index takes too much memory.", got, wanted, hint)

    def walk(self, node: _Node, height: int, prefix: bytes) -> KeyedEntries:
        """Everything below `node`, whose keys all start with `prefix`."""
        extent, base = node
        file, start, length = extent.file, extent.offset, extent.length
        self._visit(extent)
        body = self.open(self._fetch(file, start, length), _NODE_MAGIC, f"{file}:{start}:{length}")
        if (got := body.take(1)[0]) != height:
            body.fail("The node has another height than its parent says.", got, height)
        files, count = _read_table(body, base), body.varint()
        body.charge(count * len(prefix))
        if height == 0:
            return _read_leaf(body, files, count, prefix)
        children = _read_interior(body, files, count)
        walks = (self.walk(child, height - 1, prefix + more) for child, more in children)
        return chain.from_iterable(walks)

    def _visit(self, node: Extent) -> None:
        """Refuses a node with bytes of one that was read: it is its own ancestor, or has two parents."""
        ranges, start, end = self._visited[node.file], node.offset, node.offset + node.length
        place = bisect(ranges, start)
        if place % 2 or any(following < end for following in ranges[place : place + 1]):
            raise FormatError(
                "Two parts of the tree are the same bytes.",
                place=f"{node.file}:{start}:{node.length}",
                got="a node that is reached twice",
                wanted="a tree",
                hint=_DAMAGED,
            )
        ranges[place:place] = [start, end]


def _decompressed(frame: _Body, data: bytes) -> bytes:
    """The content of a zstd frame, charged before it is kept."""
    import zstandard

    reader, parts = zstandard.ZstdDecompressor().stream_reader(data), []
    try:
        while part := reader.read(_DECOMPRESSED_AT_ONCE):
            frame.charge(len(part))
            parts.append(part)
    except zstandard.ZstdError as error:
        frame.fail("The zstd data cannot be decompressed.", error, "one zstd frame")
    return b"".join(parts)


def _check(frame: _Body, magic: bytes) -> None:
    got, start = len(frame.data), frame.data[:4]
    if not magic.startswith(start):
        kind = "manifest" if magic == _MANIFEST_MAGIC else "B+tree node"
        frame.fail(f"This is not an OCDBT {kind}.", f"magic {start.hex()}", f"magic {magic.hex()}")
    length = _HEADER.unpack_from(frame.data)[1] if got >= _LEAST_FRAME else _LEAST_FRAME
    if got != length:
        what = "is truncated" if got < length else "is longer than its header says"
        frame.fail(f"The data {what}.", f"{got} bytes", f"{length} bytes")
    stored, actual = int.from_bytes(frame.data[-4:], "little"), _crc32c(frame.data[:-4])
    if stored != actual:
        frame.fail("The CRC-32C does not match.", f"{actual:#010x}", f"{stored:#010x}")


def _root(body: _Body) -> tuple[_Node | None, int]:
    """The root of the newest version, None if that is empty, and its height."""
    body.take(16)
    if body.known("kind of manifest", body.varint(), ["single", "numbered"]):
        fault = "This kind of manifest is not one that checkpoints use."
        body.fail(fault, "numbered (kind 1)", "single (kind 0)", "copy it into a new database")
    body.varints(len(_CONFIG) - 1)
    body.take(4 * body.known("configured compression", body.varint(), ["none", "zstd"]))
    files, count = _read_table(body, b""), body.varint()
    if count == 0:
        body.fail("The manifest has no version.", 0, "at least one")
    body.charge(count * _STRING_BYTES)
    body.varints(count)
    height = body.take(count)[-1]
    root = [body.varints(count)[-1] for _ in range(3)]
    return (None if root[1:] == [_MISSING] * 2 else _node(body, files, *root)), height


def _read_leaf(body: _Body, files: list[_File], count: int, prefix: bytes) -> KeyedEntries:
    keys, _ = _read_strings(body, count)
    lengths, kinds = body.varints(count), body.take(count)
    body.known("kind of value", max(kinds, default=0), ["inline", "out of line"])
    numbers, offsets = (iter(body.varints(sum(kinds))) for _ in range(2))
    entries = [
        _node(body, files, next(numbers), next(offsets), length)[0] if kind else body.take(length)
        for length, kind in zip(lengths, kinds, strict=True)
    ]
    if left := len(body.data) - body.position:
        body.fail("Bytes follow the last column.", f"{left} bytes", "none")
    return zip([prefix + key for key in keys], entries, strict=True)


def _read_interior(body: _Body, files: list[_File], count: int) -> Iterable[tuple[_Node, bytes]]:
    """The children in order, each with the prefix that the keys below it omit."""
    keys, shared = _read_strings(body, count, third=True)
    places = list(zip(*(body.varints(count) for _ in range(3)), strict=True))
    body.varints(3 * count)
    starts = [key[:length] for key, length in zip(keys, shared, strict=True)]
    return zip([_node(body, files, *place) for place in places], starts, strict=True)


def _node(body: _Body, files: list[_File], number: int, offset: int, length: int) -> _Node:
    if number >= len(files):
        wanted = f"below {len(files)}, the size of the table"
        body.fail("A data file id is not in the table of data files.", number, wanted)
    if offset + length > _MAX_END:
        body.fail("A byte range has no end.", f"{offset} + {length}", f"at most {_MAX_END}")
    path, base = files[number]
    return Extent(path, offset, length), base


def _read_table(body: _Body, base: bytes) -> list[_File]:
    count = body.varint()
    body.charge(count * len(base))
    paths, lengths = _read_strings(body, count, third=True)
    rows = zip(paths, lengths, strict=True)
    files = [((base + path).decode(errors="surrogateescape"), base + path[:length]) for path, length in rows]
    for path, _ in filter(itemgetter(0), files):
        _check_path(path, body.place)
    return files


def _read_strings(body: _Body, count: int, third: bool = False) -> tuple[list[bytes], list[int]]:
    """What `_strings` writes."""
    body.charge(count * _STRING_BYTES)
    prefixes = [0, *body.varints(max(count - 1, 0))][:count]
    suffixes, thirds = body.varints(count), body.varints(count if third else 0)
    body.charge(sum(prefixes) + sum(suffixes))
    strings, last = [], b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(last):
            body.fail("A shared prefix is longer than the string before.", prefix, len(last))
        last = last[:prefix] + body.take(suffix)
        strings.append(last)
    for string, length in zip(strings, thirds, strict=False):
        if length > len(string):
            body.fail("A prefix is longer than its string.", length, f"at most {len(string)}")
    return strings, thirds


def _path_bytes(path: str) -> bytes:
    """A path as an index has it; names of files that are not UTF-8 come back as they were."""
    return path.encode(errors="surrogateescape")
