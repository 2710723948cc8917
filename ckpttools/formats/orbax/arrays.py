"""The arrays of an Orbax item: their metadata and the locations of their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Chunked, Constant, Stored
from ckpttools.array.stored import Gaps
from ckpttools.array.tree import Path, dotted, keystr
from ckpttools.codecs.sharding import ShardIndex
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape, grid_cell, grid_indices
from ckpttools.formats.orbax.entries import Entries, FileFault, Files
from ckpttools.formats.orbax.hosts import missing_chunks_hint
from ckpttools.formats.orbax.ocdbt import Entry, Extent, length_of
from ckpttools.formats.zarr.array import ZARR2_DOCUMENT, ZARR3_DOCUMENT, ZarrArray
from ckpttools.formats.zarr.chunks import parse_array
from ckpttools.formats.zarr.inner_chunks import EncodedChunk, chunk_array, scratch_of
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes


@dataclass(frozen=True)
class Arrays:
    """The arrays of an item, by path.

    Attributes:
        directory: The item's directory, for messages.
        entries: The keys of the item.
        use_zarr3: Whether the item's metadata declares zarr v3; None if it does not declare a version.
        may_be_left_out: Whether chunks that hold only the fill value were not stored.
        may_be_old: Whether the item may be from an Orbax version that omitted such chunks without recording
            it.
    """

    directory: Location
    entries: Entries
    use_zarr3: bool | None
    may_be_left_out: bool
    may_be_old: bool = False

    @cached_property
    def hint(self) -> str:
        """A hint for missing chunks."""
        return missing_chunks_hint(self.directory, self.may_be_old)

    def array(self, path: Path) -> LazyArray:
        """Return the array at a path of the tree.

        Raises:
            FormatError: The array's metadata is missing or damaged, or contradicts the existing chunks.
        """
        # A leaf that is the full tree has no name, and its keys have no prefix.
        prefix = f"{dotted(path)}/" if path else ""
        return Grid(self, path, prefix, self._document(prefix)).lazy()

    def _document(self, prefix: str) -> ZarrArray:
        files = (ZARR3_DOCUMENT, ZARR2_DOCUMENT)
        for file in reversed(files) if self.use_zarr3 is False else files:
            entry = self.entries.get(prefix + file)
            if entry is not None:
                document = self.entries.read(entry)
                if document not in self._document_cache:
                    location = f"{self.directory}: {prefix}{file}"
                    self._document_cache[document] = parse_array(file, document, location)
                return self._document_cache[document]
        raise self._no_document(prefix)

    @cached_property
    def _document_cache(self) -> dict[bytes, ZarrArray]:
        """A cache of parsed documents that arrays of the same shape share: parsing 100,000 takes 1.6 s."""
        return {}

    def _no_document(self, prefix: str) -> FormatError:
        file = ZARR2_DOCUMENT if self.use_zarr3 is False else ZARR3_DOCUMENT
        hint = "the tree metadata names this array: the index belongs to another checkpoint"
        if isinstance(self.entries, Files):
            hint = "the directory was deleted or not copied: fetch it again"
            if next(self.entries.below(prefix), None) is not None:
                hint = "its chunks exist: copy it again, with the files whose names start with a dot"
        where = "directory" if isinstance(self.entries, Files) else "index"
        return FormatError(f"the {where} has no {prefix}{file}", location=self.directory, hint=hint)


@dataclass(frozen=True)
class Grid:
    """The chunk grid of one array; provides the parts of its `Chunked`.

    Attributes:
        arrays: The arrays of the item.
        path: Path of the array in the tree.
        prefix: Prefix of the array's keys.
        document: The array's metadata.
    """

    arrays: Arrays
    path: Path
    prefix: str
    document: ZarrArray

    def lazy(self) -> Chunked:
        document, coding = self.document, self.document.coding
        scratch = None if document.is_plain else scratch_of(coding, self._shard, document.decoded_nbytes)
        return Chunked(document.shape, document.dtype, coding.shape, self, scratch, self._gaps())

    def locations(self) -> list[tuple[ByteSource, int, int]] | None:
        """Return file, offset and length of every chunk, in C order of the grid; None if any was omitted.

        Raises:
            FormatError: A chunk is missing or exceeds its file.
        """
        result: list[tuple[ByteSource, int, int]] = []
        for index in grid_indices(self.document.shape, self.document.chunk):
            located = self._locate(index)
            if located is None:
                return None
            result.append(located)
        return result

    @property
    def _fill(self) -> bytes | None:
        return self.document.fill if self.arrays.may_be_left_out else None

    @cached_property
    def _shard(self) -> ShardIndex | None:
        return self.document.shard_filled(self._fill)

    def _gaps(self) -> Gaps | None:
        """Return the missing chunks; None if there are none or if they are implicitly the fill value."""
        document = self.document
        present, chunks = self._count_chunks(), document.num_chunks
        taken = list(self._faulty_chunks())
        if taken:
            return self._find_gaps(taken, chunks, 0 if self._fill is not None else chunks - present)
        if present == chunks or self._fill is not None:
            return None
        first = document.first_missing(present, lambda index: self._entry(index) is not None)
        key = self.prefix + document.keys.key(first)
        return Gaps(keystr(self.path), chunks - present, chunks, key, self.arrays.hint)

    def _entry(self, index: Shape) -> Entry | None:
        return self.arrays.entries.get(self.prefix + self.document.keys.key(index))

    def _faulty_chunks(self) -> Iterator[tuple[str, FileFault]]:
        """Yield the keys of chunks whose file is missing or truncated, with the fault of the file."""
        entries = self.arrays.entries
        for key in entries.below(self.prefix) if entries.faults else ():
            entry = entries.get(self.prefix + key)
            fault = entries.faults.get(entry.file) if isinstance(entry, Extent) else None
            is_chunk = self.document.keys.index(key, len(self.document.grid)) is not None
            if is_chunk and isinstance(entry, Extent) and fault and fault.takes(entry):
                yield self.prefix + key, fault

    def _find_gaps(self, taken: Sequence[tuple[str, FileFault]], chunks: int, missing: int) -> Gaps:
        key, first = taken[0]
        return Gaps(
            keystr(self.path),
            missing + len(taken),
            chunks,
            key,
            f"{first.hint}; {action('doctor', str(self.arrays.directory))} shows details",
            tuple(dict.fromkeys(str(fault) for _, fault in taken)),
            FormatError if first.is_absent or first.nbytes is not None else StorageError,
        )

    def _count_chunks(self) -> int:
        """Count the existing chunks.

        Raises:
            FormatError: A chunk is outside the grid, so the metadata is that of another array.
        """
        document, count = self.document, 0
        for key in self.arrays.entries.below(self.prefix):
            if key in document.few_keys:
                count += 1
                continue
            index = document.keys.index(key, len(document.grid))
            if index is not None and not document.has_room(index):
                raise FormatError(
                    "the metadata of an array contradicts its chunks",
                    location=f"{self.arrays.directory}: {self.prefix}{key}",
                    got=f"a chunk at {list(index)}",
                    expected=f"a grid of {list(document.grid)}: shape {list(document.shape)} "
                    f"in chunks of {list(document.chunk)}",
                )
            count += index is not None
        return count

    def __call__(self, index: Shape) -> LazyArray:
        """Return the piece at an index of the grid of pieces."""
        shape, dtype = self.document.coding.shape, self.document.dtype
        if self.document.is_plain:
            return self._plain(index)
        locations = [divmod(i, n) for i, n in zip(index, self.document.pieces, strict=True)]
        chunk = tuple(location[0] for location in locations)
        located = self._locate(chunk)
        if located is None:
            return Constant(shape, dtype, self.document.fill)
        source, offset, nbytes = located
        coding, shard = self.document.coding, self._shard
        number = shard.number([location[1] for location in locations]) if shard else 0
        if shard and self._is_one_plain_piece(shard, nbytes):
            offset += shard.index_bytes if shard.at_start else 0
            nbytes, shard = coding.nbytes, None
        extent = grid_cell(self.document.shape, shape, index).shape
        of_shard = (shard, number) if shard else None
        name, total = self._name(chunk), self.document.decoded_nbytes
        return chunk_array(EncodedChunk(source, offset, nbytes, coding, name, extent, of_shard, total), shape)

    def _plain(self, index: Shape) -> LazyArray:
        """Return an uncompressed chunk. Every read calls this, so it creates as few objects as possible."""
        document = self.document
        located = self._locate(index)
        if located is None:
            return Constant(document.chunk, document.dtype, document.fill)
        source, offset, _ = located
        return Stored(document.chunk, document.dtype, source, offset, whole_bytes=True)

    def _is_one_plain_piece(self, shard: ShardIndex, nbytes: int) -> bool:
        """Return whether a shard is exactly an index and one plain piece, whose offset is then known."""
        coding = self.document.coding
        return coding.is_plain and shard.pieces == 1 and nbytes == coding.nbytes + shard.index_bytes

    def _locate(self, index: Shape) -> tuple[ByteSource, int, int] | None:
        """Return file, offset and length of a chunk; None if it was omitted."""
        entry, expected = self._entry(index), self.document.chunk_bytes
        if entry is None and self._fill is not None:
            return None
        length = None if entry is None else length_of(entry)
        if entry is None or length is None or expected not in (None, length):
            raise FormatError(
                "a chunk is missing" if entry is None else "a chunk has the wrong length",
                location=self._name(index),
                got=self.arrays.entries.missing if entry is None else f"{length} bytes",
                expected=f"{expected} bytes" if expected is not None else None,
                hint=self.arrays.hint if entry is None else None,
            )
        if isinstance(entry, bytes):
            return Bytes(keystr(self.path), entry), 0, length
        file = self.arrays.entries.file(entry)
        if entry.offset + length > file.size:
            raise FormatError(
                f"a chunk extends beyond the end of {file.path}",
                location=self._name(index),
                got=f"a file of {file.size} bytes",
                expected=f"bytes {entry.offset} to {entry.offset + length}",
                hint="the file was truncated: fetch it again",
            )
        return file, entry.offset, length

    def _name(self, index: Shape) -> str:
        """Format a chunk's location for messages."""
        return f"{self.arrays.directory}: {keystr(self.path)}, chunk {self.document.keys.key(index)}"
