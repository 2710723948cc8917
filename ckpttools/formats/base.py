"""What a format is: a way to recognise and open a checkpoint, and a way to lay one out in files.

Adding a format is one module with a `FORMAT` object and one entry-point line; see docs/add-a-format.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Protocol

from ckpttools.ir.tree import Path as TreePath
from ckpttools.ir.tree import Tree
from ckpttools.region import Region, Shape, ceil_div, contiguous_runs, count_runs, grid_cell, grid_shape


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about reading.

    Attributes:
        step: the training step to open; None takes the latest finished one.
        max_header_bytes: longest safetensors header accepted; the reference implementation stops at 100 MB.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000


class Format(Protocol):
    """A format that can be read. The object named by the entry point has this shape."""

    @property
    def name(self) -> str:
        """The name users see and `--format` takes."""

    def why_not(self, path: Path) -> str | None:
        """None if `path` is of this format, else the reason in a few words. Reads a few bytes at most."""

    def open(self, path: Path, options: ReadOptions) -> Tree:
        """The tree at `path`, without reading any array.

        Raises:
            FormatError, StorageError: what is there cannot be read as this format.
        """


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous both in a task's buffer and in a data file."""

    offset: int
    position: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Where one array goes: a grid of equal chunks, one after the other in one data file.

    Attributes:
        shape: of the array.
        itemsize: bytes of one element.
        chunk: shape of one chunk. A chunk that reaches over the array's edge is stored whole, padded with
            zeros, as zarr does.
        file: data file, relative to the checkpoint's root.
        offset: byte in that file where the first chunk starts.
    """

    shape: Shape
    itemsize: int
    chunk: Shape
    file: str
    offset: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The axes from slowest to fastest in which chunks follow each other.

        Axes with one coordinate a chunk (layers, experts) come first: all chunks of a layer are then
        neighbours, in the file and in a task's buffer, whose axes have this order, too. Inside a chunk
        those axes have length one, so the order of its elements is the plain C order.
        """
        single = [axis for axis, length in enumerate(self.chunk) if length == 1]
        return (*single, *(axis for axis in range(len(self.chunk)) if axis not in single))

    @cached_property
    def grid(self) -> Shape:
        """Number of chunks along each axis."""
        return grid_shape(self.shape, self.chunk)

    @cached_property
    def chunk_nbytes(self) -> int:
        return prod(self.chunk) * self.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all chunks, padding included."""
        return prod(self.grid) * self.chunk_nbytes

    def chunk_offset(self, index: Shape) -> int:
        """Byte in the file where the chunk with this grid index starts."""
        position = 0
        for axis in self.order:
            position = position * self.grid[axis] + index[axis]
        return self.offset + position * self.chunk_nbytes

    def runs(self, region: Region) -> Iterator[Run]:
        """The region's bytes, as runs; neighbouring runs are joined.

        The buffer holds the region's elements with the axes in `order`.
        """
        joined: Run | None = None
        for run in self._raw_runs(region):
            if joined and _touch(joined, run):
                joined = Run(joined.offset, joined.position, joined.nbytes + run.nbytes)
                continue
            if joined:
                yield joined
            joined = run
        if joined:
            yield joined

    def _raw_runs(self, region: Region) -> Iterator[Run]:
        shape = [region.shape[axis] for axis in self.order]
        for index in self._cells(region):
            cell = grid_cell(self.shape, self.chunk, index)
            part = region.intersect(cell)
            if part is None:
                continue
            inside = part.shifted([-i * c for i, c in zip(index, self.chunk, strict=True)])
            in_file = contiguous_runs(self.chunk, inside)
            in_buffer = contiguous_runs(shape, self._reordered(part.relative_to(region)))
            yield from _common_runs(in_file, in_buffer, self.chunk_offset(index), self.itemsize)

    def estimated_runs(self, region: Region) -> int:
        """About how many runs `runs` yields: exact for one chunk, guessed from the first for many."""
        index = tuple(a // c for a, c in zip(region.start, self.chunk, strict=True))
        part = region.intersect(grid_cell(self.shape, self.chunk, index))
        if part is None:
            return 0
        inside = part.shifted([-i * c for i, c in zip(index, self.chunk, strict=True)])
        shape = [region.shape[axis] for axis in self.order]
        each = max(
            count_runs(self.chunk, inside),
            count_runs(shape, self._reordered(part.relative_to(region))),
        )
        return 1 if each == 1 else each * ceil_div(region.size, part.size)

    def _cells(self, region: Region) -> Iterator[Shape]:
        """Grid indices of the chunks that the region meets, in file order."""
        ranges = [
            range(a // c, ceil_div(b, c))
            for a, b, c in zip(region.start, region.stop, self.chunk, strict=True)
        ]
        for ordered in itertools.product(*(ranges[axis] for axis in self.order)):
            index = [0] * len(ordered)
            for axis, i in zip(self.order, ordered, strict=True):
                index[axis] = i
            yield tuple(index)

    def _reordered(self, region: Region) -> Region:
        return Region(
            tuple(region.start[axis] for axis in self.order), tuple(region.stop[axis] for axis in self.order)
        )


def _touch(first: Run, second: Run) -> bool:
    """Whether the second run continues the first in the file and in the buffer."""
    return first.offset + first.nbytes == second.offset and first.position + first.nbytes == second.position


def _common_runs(
    in_file: Iterator[tuple[int, int]], in_buffer: Iterator[tuple[int, int]], base: int, itemsize: int
) -> Iterator[Run]:
    """Two walks over the same elements, cut where either of them jumps."""
    there, left = 0, 0
    here, rest = 0, 0
    while True:
        if left == 0:
            there, left = next(in_file, (0, 0))
        if rest == 0:
            here, rest = next(in_buffer, (0, 0))
        count = min(left, rest)
        if count == 0:
            return
        yield Run(base + there * itemsize, here * itemsize, count * itemsize)
        there, left = there + count, left - count
        here, rest = here + count, rest - count


@dataclass(frozen=True)
class Layout:
    """All arrays of a checkpoint in their places, known before the first byte is read.

    Attributes:
        placements: for each array its place.
        files: final size in bytes of each data file.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]


class Writer(Protocol):
    """A format that can be written, with its options already chosen."""

    @property
    def name(self) -> str:
        """The format's name."""

    def layout(self, tree: Tree) -> Layout:
        """Places every array of the tree.

        Raises:
            FormatError: the format cannot hold an array or a leaf; names it and what would do.
        """

    def finish(self, directory: Path, tree: Tree, layout: Layout) -> None:
        """Writes everything but the arrays' bytes, which are in their places: index and metadata."""
