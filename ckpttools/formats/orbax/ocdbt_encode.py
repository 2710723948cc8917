"""Encode OCDBT indexes. The inverse is `ckpttools.formats.orbax.ocdbt_read`."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.formats.orbax.ocdbt import (
    CONFIG,
    HEADER,
    LEAST_FRAME,
    MANIFEST_MAGIC,
    MAX_END,
    MAX_INLINE_VALUE,
    MAX_KEY,
    MAX_NODE_ENTRIES,
    MISSING,
    NODE_MAGIC,
    Entry,
    Extent,
    KeyedEntries,
    check_path,
    crc32c,
    path_bytes,
)

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
    body = uuid + b"\0" + _varints(CONFIG) + table + version + b"\0"  # no older versions
    return EncodedIndex(_frame(MANIFEST_MAGIC, body), nodes, num_nodes, height)


class _Child(NamedTuple):
    """An encoded node: its first and last key, and the numbers that its parent records."""

    first: bytes
    last: bytes
    numbers: tuple[int, ...]  # offset, length, keys, size of the subtree, size of values that are not inline


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
    columns = [head, _varint(len(keys)), _strings(keys, shared), bytes(len(keys))]  # all in file 0
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
    data = HEADER.pack(magic, LEAST_FRAME + len(body)) + b"\0\0" + body
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
