"""What is wrong with single chunks, told from their lengths, and where each is a file from their headers.

In an OCDBT database the index tells the length of a chunk, and files are cut at their end only: lengths tell
all. Chunks in files of their own are cut one by one. With files cached, looking at an item took 0.06 s for 16
chunks of zstd, 1.07 GB of bfloat16 weights, and 1.2 s for 20,000 chunks of 128 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import Shape
from ckpttools.formats.orbax.databases import Database
from ckpttools.formats.orbax.ocdbt import Entry, Extent, length_of
from ckpttools.formats.zarr.chunk_ends import Encoded, is_pointer, is_shard, is_whole
from ckpttools.formats.zarr.chunks import ChunkTable
from ckpttools.formats.zarr.inner_chunks import shard_of
from ckpttools.stores.local.file import LocalFile

_WRONG_LENGTH = "have the wrong length"
_CUT = "are cut, or are something else: their headers and lengths do not agree"
_DENIED = "may not be read"
POINTER = "are Git LFS pointers, not the data"
# Codecs that make no bytes of bytes, as `ChunkTable.codecs` words them.
_OF_SHARDS = ("sharded", "in shards of")
_OF_ELEMENTS = ("order ", "transpose", "big-endian")
_SHARD = "are cut, or are something else: the index of the shard is none, or names more than there is"


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that cannot be read.

    Attributes:
        index: in the grid.
        fault: what is wrong, as the end of a sentence about several.
    """

    index: Shape
    fault: str


def bad_chunks(table: ChunkTable, database: Database) -> Iterator[BadChunk]:
    """The chunks of an array with which something is wrong that can be told without decoding them."""
    for index, entry in table.chunks.items():
        fault = None if _fits(table, entry) else _WRONG_LENGTH
        if not database.manifests and isinstance(entry, Extent):
            fault = _in_file(table, database, entry, fault)
        if fault:
            yield BadChunk(index, fault)


def _fits(table: ChunkTable, entry: Entry) -> bool:
    """Whether the length of a chunk can be right."""
    length = length_of(entry)
    if table.array.chunk_bytes is not None:
        return length == table.array.chunk_bytes
    shard = shard_of(table.array, None)
    return length >= shard.index_bytes if shard else length > 0


def _in_file(table: ChunkTable, database: Database, entry: Extent, fault: str | None) -> str | None:
    """What is wrong with a chunk that is a file; nothing more than `fault` is looked for if it is plain."""
    path = database.directory / entry.file
    if not os.access(path, os.R_OK):
        return _DENIED
    if fault is None and table.array.chunk_bytes is not None:
        return None
    try:
        source = LocalFile.at(path)
        try:
            return _looked_into(table, Encoded(source, entry.offset, entry.length), fault)
        finally:
            source.close()
    except CheckpointError as error:
        return f"cannot be read: {error.got or error.message}"


def _looked_into(table: ChunkTable, chunk: Encoded, fault: str | None) -> str | None:
    if is_pointer(chunk):
        return POINTER
    if fault:
        return fault
    shard, codecs = shard_of(table.array, None), _codecs(table)
    if shard is None and any(word.startswith(_OF_SHARDS) for word in table.codecs):
        return None  # shards of a kind that only tensorstore reads
    decoded = table.array.piece_bytes
    if shard:
        return None if is_shard(chunk, shard, codecs, decoded) else _SHARD
    return None if is_whole(chunk, codecs, decoded) else _CUT


def _codecs(table: ChunkTable) -> Sequence[str]:
    """Names of the codecs from bytes to bytes, first one first."""
    names = [word.partition(":")[0] for word in table.codecs]
    return [name for name in names if not name.startswith((*_OF_ELEMENTS, *_OF_SHARDS))]
