"""The bytes of OCDBT indexes: read, however damaged, and encoded."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, NoReturn

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.orbax.ocdbt import (
    CONFIG,
    HEADER,
    MANIFEST,
    MANIFEST_MAGIC,
    MAX_END,
    MAX_EXPANDED,
    MAX_INDEX_BYTES,
    MAX_INLINE_VALUE,
    MAX_KEY,
    MAX_NODE_ENTRIES,
    MIN_FRAME_BYTES,
    MISSING,
    NODE_MAGIC,
    Entry,
    Extent,
    KeyedEntries,
    check_path,
    crc32c,
    path_bytes,
)

_STRING_BYTES = 256  # In addition to its characters: objects and a map entry.
_DECOMPRESS_BYTES = 1 << 20
_DAMAGED = "the file is damaged or is incomplete; restore it from another copy"

Fetch = Callable[[str, int, int | None], bytes]


def read(fetch: Fetch, max_bytes: int = MAX_INDEX_BYTES) -> dict[bytes, Entry]:
    """Return the complete index of the newest version, with sorted keys.

    Args:
        fetch: `fetch(file, offset, length)` returns bytes of a file, up to the end if the length is None.
        max_bytes: Memory limit for an index that expands to more than its size on disk suggests.

    Raises:
        FormatError: The index is damaged, or exceeds the limit.
    """
    reader = _NodeReader(fetch, max_bytes)
    body = reader.open(fetch(MANIFEST, 0, None), MANIFEST_MAGIC, MANIFEST)
    root, height = _root(body)
    entries = list(reader.walk(root, height, b"")) if root else []
    index = dict(entries)
    if len(index) != len(entries):
        got = f"{len(entries)} entries, {len(index)} keys"
        body.fail("a key occurs twice", got, "each key once")
    return index


# A file or node, and the path prefix shared by the data file tables of the nodes in it.
_File = tuple[str, bytes]
_Node = tuple[Extent, bytes]


class _Body:
    """A cursor over the bytes of a manifest or node."""

    def __init__(
        self, data: bytes, location: str, charge: Callable[[_Body, int], None] | None = None
    ) -> None:
        self.data, self.location, self.position = data, location, 0
        self._charge = charge

    def charge(self, nbytes: int) -> None:
        """Account for memory that is about to be allocated; raise an error if it exceeds the limit."""
        if self._charge is not None:
            self._charge(self, nbytes)

    def fail(self, message: str, got: object, expected: object, hint: str = _DAMAGED) -> NoReturn:
        raise FormatError(message, location=self.location, got=got, expected=expected, hint=hint)

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) < count:
            self.fail("the data ends inside a field", f"{len(taken)} bytes", f"{count} bytes")
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
            self.fail("a varint extends beyond the end", f"{len(chunk)} bytes", "a byte below 128")
        return number

    def varints(self, count: int) -> list[int]:
        chunk = self.data[self.position : self.position + count]
        if len(chunk) == count and chunk.isascii():  # All values are below 128.
            self.position += count
            return list(chunk)
        return [self.varint() for _ in range(count)]

    def known(self, subject: str, number: int, names: Sequence[str]) -> int:
        if number >= len(names):
            expected = " or ".join(f"{index} ({name})" for index, name in enumerate(names))
            self.fail(f"unknown {subject}", number, expected)
        return number


class _NodeReader:
    """Reads each node once, limiting the memory of the contents."""

    def __init__(self, fetch: Fetch, max_bytes: int) -> None:
        self._fetch, self._max_bytes = fetch, max_bytes
        self._stored = self._taken = 0
        # Byte ranges of the nodes that have been read from each file, sorted: start, end, start, end, …
        self._visited: dict[str, list[int]] = defaultdict(list)

    def open(self, data: bytes, magic: bytes, location: str) -> _Body:
        """Check the frame of a node or manifest and return its decompressed body."""
        self._stored += len(data)
        frame = _Body(data, location, self._charge)
        _check(frame, magic)
        frame.take(HEADER.size)
        frame.known("format version", frame.varint(), ["the only one"])
        method = frame.known("compression", frame.varint(), ["none", "zstd"])
        body = data[frame.position : -4]
        frame.charge(len(body))
        return _Body(_decompress(frame, body) if method else body, location, self._charge)

    def _charge(self, body: _Body, nbytes: int) -> None:
        self._taken += nbytes
        limit = max(self._max_bytes, MAX_EXPANDED * self._stored)
        if self._taken > limit:
            got, expected = f"more than {limit} bytes out of {self._stored}", f"at most {limit} bytes"
            larger = f"a larger {option('max_index_bytes')} than {self._max_bytes}"
            hint = f"if the checkpoint is trusted, pass {larger}"
            body.fail("the index needs too much memory", got, expected, hint)

    def walk(self, node: _Node, height: int, prefix: bytes) -> KeyedEntries:
        """Yield all entries below `node`, whose keys start with `prefix`."""
        extent, base = node
        file, start, length = extent.file, extent.offset, extent.length
        self._visit(extent)
        body = self.open(self._fetch(file, start, length), NODE_MAGIC, f"{file}:{start}:{length}")
        if (got := body.take(1)[0]) != height:
            body.fail("the node's height differs from the one its parent declares", got, height)
        files, count = _read_table(body, base), body.varint()
        body.charge(count * len(prefix))
        if height == 0:
            return _read_leaf(body, files, count, prefix)
        children = _read_interior(body, files, count)
        walks = (self.walk(child, height - 1, prefix + more) for child, more in children)
        return chain.from_iterable(walks)

    def _visit(self, node: Extent) -> None:
        """Reject a node that overlaps one already read: it would be its own ancestor or have two parents."""
        ranges, start, end = self._visited[node.file], node.offset, node.offset + node.length
        location = bisect(ranges, start)
        if location % 2 or any(following < end for following in ranges[location : location + 1]):
            raise FormatError(
                "two parts of the tree are the same bytes",
                location=f"{node.file}:{start}:{node.length}",
                got="a node that is referenced twice",
                expected="a tree",
                hint=_DAMAGED,
            )
        ranges[location:location] = [start, end]


def _decompress(frame: _Body, data: bytes) -> bytes:
    """Return the content of a zstd frame, after accounting for its memory."""
    import zstandard

    reader, parts = zstandard.ZstdDecompressor().stream_reader(data), []
    try:
        while part := reader.read(_DECOMPRESS_BYTES):
            frame.charge(len(part))
            parts.append(part)
    except zstandard.ZstdError as error:
        frame.fail("the zstd data cannot be decompressed", error, "one zstd frame")
    return b"".join(parts)


def _check(frame: _Body, magic: bytes) -> None:
    got, start = len(frame.data), frame.data[:4]
    if not magic.startswith(start):
        kind = "manifest" if magic == MANIFEST_MAGIC else "B+tree node"
        frame.fail(f"this is not an OCDBT {kind}", f"magic {start.hex()}", f"magic {magic.hex()}")
    length = HEADER.unpack_from(frame.data)[1] if got >= MIN_FRAME_BYTES else MIN_FRAME_BYTES
    if got != length:
        problem = "is truncated" if got < length else "is longer than its header declares"
        frame.fail(f"the data {problem}", f"{got} bytes", f"{length} bytes")
    stored, actual = int.from_bytes(frame.data[-4:], "little"), crc32c(frame.data[:-4])
    if stored != actual:
        frame.fail("the CRC-32C does not match", f"{actual:#010x}", f"{stored:#010x}")


def _root(body: _Body) -> tuple[_Node | None, int]:
    """Return the root of the newest version (None if the database is empty) and its height."""
    body.take(16)
    if body.known("kind of manifest", body.varint(), ["single", "numbered"]):
        fault = "checkpoints do not use this kind of manifest"
        body.fail(fault, "numbered (kind 1)", "single (kind 0)", "copy it into a new database")
    body.varints(len(CONFIG) - 1)
    body.take(4 * body.known("configured compression", body.varint(), ["none", "zstd"]))
    files, count = _read_table(body, b""), body.varint()
    if count == 0:
        body.fail("the manifest has no version", 0, "at least one")
    body.charge(count * _STRING_BYTES)
    body.varints(count)
    height = body.take(count)[-1]
    root = [body.varints(count)[-1] for _ in range(3)]
    return (None if root[1:] == [MISSING] * 2 else _node(body, files, *root)), height


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
        body.fail("extra bytes after the last column", f"{left} bytes", "none")
    return zip([prefix + key for key in keys], entries, strict=True)


def _read_interior(body: _Body, files: list[_File], count: int) -> Iterable[tuple[_Node, bytes]]:
    """Yield each child with the prefix that is omitted from the keys below it, in order."""
    keys, shared = _read_strings(body, count, third=True)
    locations = list(zip(*(body.varints(count) for _ in range(3)), strict=True))
    body.varints(3 * count)
    starts = [key[:length] for key, length in zip(keys, shared, strict=True)]
    return zip([_node(body, files, *location) for location in locations], starts, strict=True)


def _node(body: _Body, files: list[_File], number: int, offset: int, length: int) -> _Node:
    if number >= len(files):
        expected = f"below {len(files)}, the size of the table"
        body.fail("a data file id is not in the table of data files", number, expected)
    if offset + length > MAX_END:
        body.fail("a byte range overflows", f"{offset} + {length}", f"at most {MAX_END}")
    path, base = files[number]
    return Extent(path, offset, length), base


def _read_table(body: _Body, base: bytes) -> list[_File]:
    count = body.varint()
    body.charge(count * len(base))
    paths, lengths = _read_strings(body, count, third=True)
    rows = zip(paths, lengths, strict=True)
    files = [((base + path).decode(errors="surrogateescape"), base + path[:length]) for path, length in rows]
    for path, _ in filter(itemgetter(0), files):
        check_path(path, body.location)
    return files


def _read_strings(body: _Body, count: int, third: bool = False) -> tuple[list[bytes], list[int]]:
    """Decode strings that `_strings` encoded."""
    body.charge(count * _STRING_BYTES)
    prefixes = [0, *body.varints(max(count - 1, 0))][:count]
    suffixes, thirds = body.varints(count), body.varints(count if third else 0)
    body.charge(sum(prefixes) + sum(suffixes))
    strings, last = [], b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(last):
            body.fail("a shared prefix is longer than the previous string", prefix, len(last))
        last = last[:prefix] + body.take(suffix)
        strings.append(last)
    for string, length in zip(strings, thirds, strict=False):
        if length > len(string):
            body.fail("a prefix is longer than its string", length, f"at most {len(string)}")
    return strings, thirds


_SMALL = [bytes([number]) for number in range(128)]


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """An encoded index: `manifest` goes into `manifest.ocdbt`, and `nodes` into the node file."""

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
    """Encode the index of `entries` with all tree nodes in one file, leaves first and root last.

    Args:
        entries: Keys and values in any order, without duplicate keys.
        node_file: Path of the node file, relative to the root of the database.
        node_entries: Maximum entries of a node.
        uuid: 16 bytes; derived from the content by default, so that the same input gives the same bytes.
        commit_time_ns: Commit time of the only version, in nanoseconds since 1970.
    """
    _check_call(node_file, node_entries, uuid)
    out, height, table = bytearray(), 0, _table([node_file])
    items, limit = _ordered(entries), node_entries
    only, starts = len(items) <= limit, range(0, len(items), limit)
    level = [_add_leaf(out, items[start : start + limit], only) for start in starts]
    num_nodes = len(level)
    while len(level) > 1:
        height += 1
        head, only = bytes([height]) + table, len(level) <= limit
        groups = [level[start : start + limit] for start in range(0, len(level), limit)]
        level = [_add_interior(out, group, only, head) for group in groups]
        num_nodes += len(level)
    nodes = bytes(out)
    uuid = uuid or hashlib.sha256(table + nodes).digest()[:16]
    root = level[0].numbers if level else (MISSING, MISSING, 0, 0, 0)
    version = _varints([1, 1, height, 0, *root]) + struct.pack("<Q", commit_time_ns)
    table = table if level else _table([""])
    body = uuid + b"\0" + _varints(CONFIG) + table + version + b"\0"  # Older versions are not supported.
    return EncodedIndex(_frame(MANIFEST_MAGIC, body), nodes, num_nodes, height)


class _Child(NamedTuple):
    """An encoded node: its first and last key, and the numbers that its parent records."""

    first: bytes
    last: bytes
    numbers: tuple[int, ...]  # Offset, length, keys, size of the subtree, size of values that are not inline.


def _add(out: bytearray, body: bytes, first: bytes, last: bytes, *sums: int) -> _Child:
    (keys, tree, values), node, offset = sums, _frame(NODE_MAGIC, body), len(out)
    out += node
    numbers = offset, len(node), keys, tree + len(node), min(values, MISSING)
    return _Child(first, last, numbers)


def _add_leaf(out: bytearray, items: Sequence[tuple[bytes, Entry]], root: bool) -> _Child:
    first, last = items[0][0], items[-1][0]
    implied = 0 if root else _common(first, last)
    keys, entries = [key[implied:] for key, _ in items], [entry for _, entry in items]
    extents = [entry for entry in entries if isinstance(entry, Extent)]
    files = sorted({extent.file for extent in extents}, key=path_bytes)
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
    columns = [head, _varint(len(keys)), _strings(keys, shared), bytes(len(keys))]  # All in file 0.
    body = b"".join(columns + list(map(_varints, numbers)))
    return _add(out, body, first, last, *map(sum, numbers[2:]))


def _table(files: Sequence[str]) -> bytes:
    paths = list(map(path_bytes, files))
    return _varint(len(paths)) + _strings(paths, [0] * len(paths))


def _strings(strings: Sequence[bytes], third: Sequence[int] = ()) -> bytes:
    """Encode strings with shared prefixes; `third` is the additional column of paths and interior keys."""
    prefixes = [_common(a, b) for a, b in pairwise(strings)]
    suffixes = [*strings[:1], *(s[n:] for s, n in zip(strings[1:], prefixes, strict=True))]
    lengths = _varints(prefixes) + _varints(map(len, suffixes))
    return lengths + _varints(third) + b"".join(suffixes)


def _common(a: bytes, b: bytes) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (differing.bit_length() + 7) // 8


def _frame(magic: bytes, body: bytes) -> bytes:
    data = HEADER.pack(magic, MIN_FRAME_BYTES + len(body)) + b"\0\0" + body
    return data + crc32c(data).to_bytes(4, "little")


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
        check_path(file)
    for key, entry in items:
        _check_entry(key, entry)
    for (key, _), (following, _) in pairwise(items):
        if key == following:
            raise FormatError(f"the key {key!r} occurs twice", hint="give every key one entry")
    return items


def _check_entry(key: bytes, entry: Entry) -> None:
    start, size, limit = 0, len(entry) if isinstance(entry, bytes) else 0, MAX_INLINE_VALUE
    if isinstance(entry, Extent):
        start, size, limit = entry.offset, entry.length, MAX_END
    if len(key) > MAX_KEY or min(start, size) < 0 or start + size > limit:
        got = f"key of {len(key)} bytes, value from {start}, {size} bytes"
        expected = f"key of at most {MAX_KEY} bytes, value from 0 to {limit}"
        raise FormatError("an index cannot contain this entry", location=key[:80], got=got, expected=expected)


def _check_call(node_file: str, node_entries: int, uuid: bytes | None) -> None:
    check_path(node_file)
    if not 2 <= node_entries <= MAX_NODE_ENTRIES or len(uuid or bytes(16)) != 16:
        got = f"{node_entries} entries, uuid {uuid!r}"
        expected = f"2 to {MAX_NODE_ENTRIES} entries in a node, a uuid of 16 bytes"
        raise UsageError("these arguments do not give a valid index", got=got, expected=expected)
