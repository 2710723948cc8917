"""Find faults of single chunks by their lengths and, if each chunk is a file, by their headers.

In an OCDBT database, the index has the length of each chunk, and files are only ever truncated at the end, so
lengths suffice. Chunks with their own files may be truncated individually. With cached files, checking an
item took 0.06 s for 16 chunks of zstd (1.07 GB of bfloat16 weights) and 1.2 s for 20,000 chunks of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.codecs.streams import ByteRange
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import Shape
from ckpttools.formats.orbax.entries import Entries
from ckpttools.formats.orbax.ocdbt import Entry, Extent, length_of
from ckpttools.formats.zarr.chunks import ChunkTable

_WRONG_LENGTH = "have the wrong length"
_CUT = "are truncated or have other content: their headers and lengths do not agree"
_DENIED = "may not be read"
POINTER = "are Git LFS pointers, not the data"
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024
_SHARD = (
    "are truncated or have other content: the index is missing or names more than exists, or pieces are "
    "truncated"
)


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that cannot be read.

    Attributes:
        index: Index in the grid.
        fault: The fault, as the end of a sentence about several chunks.
    """

    index: Shape
    fault: str


def bad_chunks(table: ChunkTable, database: Entries) -> Iterator[BadChunk]:
    """Yield the chunks of an array whose faults are visible without decoding."""
    for index, entry in table.chunks.items():
        fault = None if _fits(table, entry) else _WRONG_LENGTH
        if not database.manifests and isinstance(entry, Extent):
            fault = _in_file(table, database, entry, fault)
        if fault:
            yield BadChunk(index, fault)


def _fits(table: ChunkTable, entry: Entry) -> bool:
    """Return whether the length of a chunk is possible."""
    length = length_of(entry)
    if table.array.chunk_bytes is not None:
        return length == table.array.chunk_bytes
    shard = table.array.shard
    return length >= shard.index_bytes if shard else length > 0


def _in_file(table: ChunkTable, database: Entries, entry: Extent, fault: str | None) -> str | None:
    """Return the fault of a chunk that is a file. For a chunk without encoding, only `fault` is checked."""
    path = database.directory / entry.file
    if not path.may_read():
        return _DENIED
    if fault is None and table.array.chunk_bytes is not None:
        return None
    try:
        source = path.open()
        try:
            return _looked_into(table, ByteRange(source, entry.offset, entry.length), fault)
        finally:
            source.close()
    except CheckpointError as error:
        return f"cannot be read: {error.raw.got or error.raw.message}"


def _looked_into(table: ChunkTable, chunk: ByteRange, fault: str | None) -> str | None:
    if chunk.nbytes <= _LONGEST_POINTER and chunk.part(0, len(_POINTER)) == _POINTER:
        return POINTER
    if fault:
        return fault
    shard, coding = table.array.shard, table.array.coding
    if shard:
        return None if shard.is_whole(chunk, coding) else _SHARD
    return None if coding.is_whole(chunk) else _CUT
