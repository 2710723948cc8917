"""OCDBT indexes: maps from a key to an inline value or a byte range.

An OCDBT database consists of a manifest, a B+tree of nodes, and data files. Data files can be any files below
its root, because each leaf node stores file, offset and length of the values that are not inline.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import google_crc32c

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC, NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
crc32c: Callable[[bytes], int] = google_crc32c.value
HEADER = struct.Struct("<4sQ")
MIN_FRAME_BYTES = HEADER.size + 2 + 4

# Orbax's settings (maximum sizes of inline values and decoded nodes, log2 of the version tree's arity), but
# without compression, which Orbax uses.
CONFIG = (1024, 100_000_000, 4, 0)
MAX_KEY = MAX_PATH = (1 << 16) - 1
MAX_INLINE_VALUE = MAX_NODE_ENTRIES = 1 << 20
MAX_END = (1 << 63) - 1  # The end of a byte range.
MISSING = (1 << 64) - 1  # The offset and length of a root if there is no tree.
# Memory limit of an index: the larger of the first number of bytes and the second number times its stored
# size. In a measurement with 200 arrays of 200,000 chunks, each chunk takes 3 bytes on disk and 363 bytes in
# memory; 337 of these are counted.
MAX_INDEX_BYTES, MAX_EXPANDED = 256 << 20, 256


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range in a file; `file` is relative to the root of the database."""

    file: str
    offset: int
    length: int


Entry = bytes | Extent


def length_of(entry: Entry) -> int:
    """Return the length of an entry's value in bytes."""
    return entry.length if isinstance(entry, Extent) else len(entry)


KeyedEntries = Iterable[tuple[bytes, Entry]]


def check_path(path: str, location: str | None = None) -> None:
    """Reject paths that a store cannot have: empty or overlong, or with empty, `.` or `..` components."""
    steps, size = path.split("/"), len(path_bytes(path))
    if {"", ".", ".."}.intersection(steps) or "\0" in path or size > MAX_PATH:
        expected = f"a path below the root, at most {MAX_PATH} bytes"
        raise FormatError(
            "this is not the path of a data file", location=location, got=path, expected=expected
        )


def path_bytes(path: str) -> bytes:
    """Encode a path as in an index; file names that are not UTF-8 round-trip."""
    return path.encode(errors="surrogateescape")
