"""The placement of an array's chunks: file, byte range and encoding."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from ckpttools.codecs.base import WritableCodec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import (
    Region,
    Shape,
    ceil_div,
    contiguous_runs,
    count_runs,
    grid_cell,
    grid_ranges,
    grid_shape,
)


@dataclass(frozen=True, slots=True)
class Range:
    """A byte range of a file below the checkpoint's root."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """Chunks stored one after another in a data file, or in several files of limited size.

    Attributes:
        file: Name of the file; further files get a number appended.
        offset: Byte offset of the first chunk.
        per_file: Number of chunks per file; None for all.
    """

    file: str
    offset: int = 0
    per_file: int | None = None

    def location(self, position: int, chunk_nbytes: int) -> tuple[str, int]:
        """Return the file and offset of the chunk at a position in the sequence."""
        if self.per_file is None:
            return self.file, self.offset + position * chunk_nbytes
        number, position = divmod(position, self.per_file)
        return f"{self.file}-{number:05d}", self.offset + position * chunk_nbytes


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """Chunks that are stored in one file each.

    Attributes:
        directory: Directory of the files, ending with "/"; "" for the root.
        prefix: Text before the grid index, or "".
        separator: Separator between the indices.
    """

    directory: str
    prefix: str
    separator: str

    def name(self, index: Shape) -> str:
        """Return the file name of a chunk."""
        return self.directory + chunk_key(self.prefix, self.separator, index)


def chunk_key(prefix: str, separator: str, index: Shape) -> str:
    """Return zarr's key for the chunk at a grid index; a 0-d array without a prefix has the key `0`."""
    parts = [prefix] if prefix else []
    return separator.join([*parts, *map(str, index)]) or "0"


@dataclass(frozen=True, slots=True)
class Appended:
    """Encoded chunks that are appended to data files in the order in which they are encoded.

    Attributes:
        file: Base name of the files; each gets a number appended.
        limit: Size in bytes at which a new file is started.
    """

    file: str
    limit: int


@dataclass(frozen=True)
class Referenced:
    """Chunks whose bytes are in existing files, so nothing is written for them.

    Each chunk is stored as a few integers rather than an object, because a checkpoint may have 100,000
    chunks.

    Attributes:
        files: Names that the files get below the checkpoint's root.
        codecs: Codecs of a chunk, as the format lists them.
        numbers: The file index of each chunk in C order of the grid; -1 if the chunk is in `inline`.
        starts: Offset of each chunk, in bytes.
        lengths: Size of each chunk, in bytes.
        inline: Chunks that are small enough to be stored in the index, by position in C order.
    """

    files: Sequence[str]
    codecs: tuple[Mapping[str, Any], ...]
    numbers: array[int]
    starts: array[int]
    lengths: array[int]
    inline: Mapping[int, bytes]

    def location(self, position: int) -> Range | bytes:
        """Return the location of the chunk at a position in C order of the grid."""
        number = self.numbers[position]
        if number < 0:
            return self.inline[position]
        return Range(self.files[number], self.starts[position], self.lengths[position])

    @property
    def ranges(self) -> Iterator[Range]:
        """The file ranges of all chunks."""
        for position, number in enumerate(self.numbers):
            if number >= 0:
                yield Range(self.files[number], self.starts[position], self.lengths[position])

    @cached_property
    def nbytes(self) -> int:
        """Total size of the chunks as stored, in bytes."""
        return sum(self.lengths)

    def __str__(self) -> str:
        """Return a string that is equal if the chunks are the same bytes of the same files."""
        digest = hashlib.sha256()
        for part in (self.numbers, self.starts, self.lengths):
            digest.update(part.tobytes())
        inline = [(position, value.hex()) for position, value in self.inline.items()]
        return f"referenced {list(self.files)} {self.codecs} {inline} {digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes that are contiguous both in a task's buffer and in a file.

    Attributes:
        file: Name of the file, relative to the checkpoint's root.
        offset: Byte offset in the file.
        position: Byte offset in the buffer.
        nbytes: Length in bytes.
    """

    file: str
    offset: int
    position: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """The placement of an array as a grid of equal chunks.

    Attributes:
        shape: Shape of the array.
        itemsize: Size of an element, in bytes.
        chunk: Shape of a chunk. A chunk that extends beyond the array's edge is stored in full, padded with
            zeros, as in zarr.
        home: The files that contain the chunks.
        codec: Codec of the chunks; None for plain chunks (C order, little-endian) and for referenced chunks.
    """

    shape: Shape
    itemsize: int
    chunk: Shape
    home: DataFile | ChunkFiles | Appended | Referenced
    codec: WritableCodec | None = None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The order of the axes in which chunks follow each other, from slowest to fastest.

        Axes with one coordinate per chunk (layers, experts) come first. All chunks of a layer are then
        adjacent in the file and in a task's buffer, which has the same order of axes. Within a chunk these
        axes have length one, so its elements are in plain C order.
        """
        single = [axis for axis, length in enumerate(self.chunk) if length == 1]
        return (*single, *(axis for axis in range(len(self.chunk)) if axis not in single))

    @cached_property
    def grid(self) -> Shape:
        """The number of chunks along each axis."""
        return grid_shape(self.shape, self.chunk)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Size of a chunk before encoding, in bytes."""
        return prod(self.chunk) * self.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Total size of the chunks before encoding, including padding, in bytes."""
        return prod(self.grid) * self.chunk_nbytes

    @property
    def described(self) -> str:
        """One-line description of chunks, files and codec; equal for placements that write the same bytes."""
        if isinstance(self.home, ChunkFiles):
            where = self.home.name((0,) * len(self.shape))
        else:
            where = str(self.home)
        return f"{self.chunk} {where} {self.codec.name if self.codec else 'raw'}"

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a worker needs to encode a chunk: the chunk, the encoded chunk and the encoder."""
        return 0 if self.codec is None else 2 * self.chunk_nbytes + self.codec.working_bytes

    def position(self, index: Shape) -> int:
        """Return the position of a chunk in the sequence of all chunks."""
        position = 0
        for axis in self.order:
            position = position * self.grid[axis] + index[axis]
        return position

    def chunk_range(self, index: Shape) -> Range:
        """Return the byte range of an uncompressed chunk."""
        if isinstance(self.home, ChunkFiles):
            return Range(self.home.name(index), 0, self.chunk_nbytes)
        if isinstance(self.home, Referenced):
            raise TypeError("a referenced chunk is not written")
        if isinstance(self.home, Appended):
            raise TypeError("an appended chunk has no location before it is encoded")
        file, offset = self.home.location(self.position(index), self.chunk_nbytes)
        return Range(file, offset, self.chunk_nbytes)

    def cells(self, region: Region) -> Iterator[Shape]:
        """Yield the grid indices of the chunks that intersect the region, in sequence."""
        ranges = grid_ranges(self.chunk, region)
        for ordered in itertools.product(*(ranges[axis] for axis in self.order)):
            index = [0] * len(ordered)
            for axis, i in zip(self.order, ordered, strict=True):
                index[axis] = i
            yield tuple(index)

    def runs(self, region: Region) -> Iterator[ByteRun]:
        """Yield the byte ranges of the region as runs, joining adjacent ones.

        The buffer holds the elements of the region with axes in `order`.
        """
        joined: ByteRun | None = None
        for run in self._raw_runs(region):
            if joined and _touch(joined, run):
                joined = ByteRun(joined.file, joined.offset, joined.position, joined.nbytes + run.nbytes)
                continue
            if joined:
                yield joined
            joined = run
        if joined:
            yield joined

    def first_byte(self, region: Region) -> tuple[str, int]:
        """Return the file and offset of the region's first byte, for uncompressed chunks."""
        first = next(self._raw_runs(region))
        return first.file, first.offset

    def _raw_runs(self, region: Region) -> Iterator[ByteRun]:
        shape = [region.shape[axis] for axis in self.order]
        for index in self.cells(region):
            part, inside = self.part(region, index)
            in_file = contiguous_runs(self.chunk, inside)
            in_buffer = contiguous_runs(shape, self._reordered(part.relative_to(region)))
            yield from _common_runs(in_file, in_buffer, self.chunk_range(index), self.itemsize)

    def part(self, region: Region, index: Shape) -> tuple[Region, Region]:
        """Return the part of the region in a chunk, in coordinates of the array and of the chunk."""
        part = region.intersect(grid_cell(self.shape, self.chunk, index))
        if part is None:
            raise IndexError(f"{region} does not meet chunk {index}")
        return part, part.shifted([-i * c for i, c in zip(index, self.chunk, strict=True)])

    def estimated_runs(self, region: Region) -> int:
        """Estimate how many runs `runs` yields: exact for one chunk, extrapolated from the first for
        several."""
        if region.size == 0:
            return 0
        index = tuple(a // c for a, c in zip(region.start, self.chunk, strict=True))
        part, inside = self.part(region, index)
        shape = [region.shape[axis] for axis in self.order]
        runs_per_chunk = max(
            count_runs(self.chunk, inside),
            count_runs(shape, self._reordered(part.relative_to(region))),
        )
        if runs_per_chunk == 1 and isinstance(self.home, DataFile):
            return 1
        return runs_per_chunk * ceil_div(region.size, part.size)

    def _reordered(self, region: Region) -> Region:
        return Region(
            tuple(region.start[axis] for axis in self.order), tuple(region.stop[axis] for axis in self.order)
        )


def _touch(first: ByteRun, second: ByteRun) -> bool:
    """Return whether the second run continues the first, both in the file and in the buffer."""
    return (
        first.file == second.file
        and first.offset + first.nbytes == second.offset
        and first.position + first.nbytes == second.position
    )


def _common_runs(
    in_file: Iterator[tuple[int, int]], in_buffer: Iterator[tuple[int, int]], location: Range, itemsize: int
) -> Iterator[ByteRun]:
    """Traverse the same elements in two layouts and cut runs where either layout jumps."""
    position_b, left = 0, 0
    position_a, rest = 0, 0
    while True:
        if left == 0:
            position_b, left = next(in_file, (0, 0))
        if rest == 0:
            position_a, rest = next(in_buffer, (0, 0))
        count = min(left, rest)
        if count == 0:
            return
        yield ByteRun(
            location.file, location.offset + position_b * itemsize, position_a * itemsize, count * itemsize
        )
        position_b, left = position_b + count, left - count
        position_a, rest = position_a + count, rest - count
