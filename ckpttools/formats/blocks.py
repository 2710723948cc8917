"""Arrays as grids of blocks that are stored together, and the zarr chunks that such blocks can be.

Stacking, unstacking, splitting, merging and reordering axes moves no element within a block. The result
is therefore another grid of the same blocks: each axis is a product of atoms, and each atom records the
distance between its coordinates, in blocks and within a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Chunked, Relayout, Stack, Stored, Take, Window
from ckpttools.codecs.base import CodecSpec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, ceil_div
from ckpttools.formats.orbax.arrays import Grid
from ckpttools.formats.zarr.array import Chain

Stretch = tuple[ByteSource, int, int]
"""File, offset and number of bytes."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis, with its own strides.

    Attributes:
        length: Number of coordinates.
        cell: Number of coordinates in a block; the last block may extend beyond the length.
        stride: Distance between adjacent coordinates within a block, in elements.
        step: Distance between adjacent cells, in blocks.
    """

    length: int
    cell: int
    stride: int
    step: int


Axis = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """An array as a grid of blocks.

    Attributes:
        axes: The atoms of each axis, outermost first, without atoms of length one.
        locations: The location of each block.
        itemsize: Size of an element in bytes.
        chain: The codecs of a block.
        is_grid: Whether the blocks are chunks in the source; otherwise they are ranges that can be cut
            anywhere.
        is_transposed: Whether the source stores the axes of a chunk in another order.
        first: Index of the block that contains the first element.
        start: Offset of the first element in its block.
    """

    axes: tuple[Axis, ...]
    locations: Sequence[Stretch]
    itemsize: int
    chain: Chain
    is_grid: bool
    is_transposed: bool
    first: int = 0
    start: int = 0

    def taken(self, axis: int, index: int) -> Blocks | None:
        """Return one coordinate of an axis; None if that splits blocks that are encoded as a whole."""
        first, start = self.first, self.start
        for atom in reversed(self.axes[axis]):
            index, i = divmod(index, atom.length)
            if atom.cell > 1 and not self.chain.is_plain:
                return None
            first += i // atom.cell * atom.step
            start += i % atom.cell * atom.stride
        return replace(self, axes=self.axes[:axis] + self.axes[axis + 1 :], first=first, start=start)

    def windowed(self, begin: Shape, shape: Shape) -> Blocks | None:
        """Return a region of the array; None if its edge is inside a block that cannot be split there."""
        axes: list[Axis] = []
        first, start = self.first, self.start
        for axis, a, length in zip(self.axes, begin, shape, strict=True):
            if a == 0 and length == prod(atom.length for atom in axis):
                axes.append(axis)
                continue
            atom = self._cut(axis, a, length)
            if atom is None:
                return None
            first += a // axis[0].cell * axis[0].step
            start += a % axis[0].cell * axis[0].stride
            axes.append((atom,) if atom.length > 1 else ())
        return replace(self, axes=tuple(axes), first=first, start=start)

    def _cut(self, axis: Axis, begin: int, length: int) -> Atom | None:
        """Return the only atom of an axis, restricted to a range."""
        if len(axis) != 1:
            return None
        (atom,) = axis
        if self.chain.is_plain and begin // atom.cell == (begin + length - 1) // atom.cell:
            return Atom(length, length, atom.stride, 0)
        aligned = begin % atom.cell == 0 and length >= atom.cell
        return Atom(length, atom.cell, atom.stride, atom.step) if aligned else None

    def relaid(self, split: Sequence[Shape], order: Sequence[int], merge: Sequence[int]) -> Blocks | None:
        """Split, reorder and merge the axes; None if a split cuts through grid cells."""
        groups: list[Axis] = []
        for axis, lengths in zip(self.axes, split, strict=True):
            parts = _split_axes(axis, lengths)
            if parts is None:
                return None
            groups += parts
        rest = iter(order)
        merged = (itertools.chain.from_iterable(groups[next(rest)] for _ in range(n)) for n in merge)
        return replace(self, axes=tuple(map(tuple, merged)))

    def listed(self) -> Blocks:
        """Return the same blocks with `locations` in C order of the atoms, without unused blocks."""
        locations = self.locations
        if len(locations) > 1 or self.start:
            shifts = sums([shifts_of(atom, atom.cell) for axis in self.axes for atom in axis])
            locations = [self.location(block, start) for block, start in shifts]
        counts = [[ceil_div(atom.length, atom.cell) for atom in axis] for axis in self.axes]
        left = prod(map(prod, counts))
        axes: list[Axis] = []
        for axis, numbers in zip(self.axes, counts, strict=True):
            result: list[Atom] = []
            for atom, count in zip(axis, numbers, strict=True):
                left //= count
                stride, step = atom.stride if atom.cell > 1 else 0, left if count > 1 else 0
                result.append(Atom(atom.length, atom.cell, stride, step))
            axes.append(tuple(result))
        return replace(self, axes=tuple(axes), locations=locations, first=0, start=0)

    def location(self, block: int, start: int) -> Stretch:
        """Return the location of a block, starting at an element offset within the block."""
        source, offset, nbytes = self.locations[self.first + block]
        # Blocks that are encoded as a whole have no offsets.
        return source, offset + (self.start + start) * self.itemsize, nbytes


def blocks_of_stored(array: Stored) -> Blocks | None:
    """Return a contiguous byte range as blocks; None if elements share bytes or there are none."""
    if (array.dtype.packed and not array.whole_bytes) or not array.size:
        return None
    location = (array.source, array.offset, array.nbytes)
    chain = Chain(tuple(range(len(array.shape))))
    steps = [0] * len(array.shape)
    axes = _axes(array.shape, array.shape, chain.order, steps)
    return Blocks(axes, [location], array.dtype.itemsize, chain, False, False)


def blocks_of_grid(grid: Grid) -> Blocks | None:
    """Return the chunks of a zarr array; None if chunks are missing or the codecs depend on the axes."""
    document = grid.document
    if document.chain is None or 0 in document.shape:
        return None
    locations = grid.locations()
    if locations is None:
        return None
    counts = [ceil_div(n, c) for n, c in zip(document.shape, document.chunk, strict=True)]
    steps = [prod(counts[axis + 1 :]) for axis in range(len(counts))]
    order = document.chain.order
    axes = _axes(document.shape, document.chunk, order, steps)
    is_transposed = order != tuple(range(len(order)))
    return Blocks(axes, locations, document.dtype.itemsize, document.chain, True, is_transposed)


def _axes(shape: Shape, cells: Shape, order: Shape, steps: Sequence[int]) -> tuple[Axis, ...]:
    """Return one atom for each axis that is longer than one or has cells longer than one."""
    strides = [0] * len(shape)
    run = 1
    for axis in reversed(order):
        strides[axis], run = run, run * cells[axis]
    atoms = map(Atom, shape, cells, strides, steps)
    return tuple((atom,) if atom.length * atom.cell > 1 else () for atom in atoms)


def stack_blocks(parts: Sequence[Blocks], axis: int) -> Blocks | None:
    """Stack arrays along a new axis; None if their blocks differ."""
    parts_blocks = [part.listed() for part in parts]
    model = parts_blocks[0]
    if any((item.axes, item.chain.kind) != (model.axes, model.chain.kind) for item in parts_blocks):
        return None
    locations = [location for item in parts_blocks for location in item.locations]
    new = (Atom(len(parts), 1, 0, len(model.locations)),) if len(parts) > 1 else ()
    return replace(
        model,
        axes=(*model.axes[:axis], new, *model.axes[axis:]),
        locations=locations,
        is_grid=all(item.is_grid for item in parts_blocks),
        is_transposed=any(item.is_transposed for item in parts_blocks),
    )


def _split_axes(axis: Axis, lengths: Shape) -> list[Axis] | None:
    """Split the atoms of an axis into groups of these lengths."""
    rest = list(axis)
    groups: list[Axis] = []
    for length in reversed(lengths):
        group: list[Atom] = []
        while length > 1:
            atom = rest.pop()
            if length % atom.length:
                # The atom extends into the next group.
                halves = _halve(atom, length) if atom.length % length == 0 else None
                if halves is None:
                    return None
                outer, atom = halves
                rest.append(outer)
            group.insert(0, atom)
            length //= atom.length
        # A single coordinate in a padded cell fits in any group.
        while rest and rest[-1].length == 1:
            group.insert(0, rest.pop())
        groups.insert(0, tuple(group))
    return None if rest else groups


def _halve(atom: Atom, inner: int) -> tuple[Atom, Atom] | None:
    """Split an atom into an outer and an inner one of a given length; None if that cuts through cells."""
    outer, cell = atom.length // inner, atom.cell
    if cell % inner == 0:
        return (
            Atom(outer, cell // inner, atom.stride * inner, atom.step),
            Atom(inner, inner, atom.stride, 0),
        )
    if inner % cell == 0:
        return Atom(outer, 1, 0, atom.step * (inner // cell)), Atom(inner, cell, atom.stride, atom.step)
    return None


def shifts_of(atom: Atom, piece: int) -> list[tuple[int, int]]:
    """Return the offset of every `piece`-th coordinate, in blocks and in elements within a block."""
    starts = range(0, atom.length, piece)
    return [(i // atom.cell * atom.step, i % atom.cell * atom.stride) for i in starts]


def sums(shifts: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield the sums of one shift from each list, in C order."""
    if not shifts:
        yield 0, 0
        return
    inner = list(sums(shifts[1:]))
    for block, start in shifts[0]:
        for more_blocks, more in inner:
            yield block + more_blocks, start + more


class Finder:
    """Finds the blocks of arrays; caches results for arrays that many others are derived from."""

    def __init__(self) -> None:
        self._known: dict[int, Blocks | None] = {}

    def blocks(self, array: LazyArray) -> Blocks | None:
        """Return the array as blocks; None if its elements are not stored unchanged."""
        match array:
            case Stored():
                return blocks_of_stored(array)
            case Chunked(part=Grid() as grid):
                return blocks_of_grid(grid)
            case Stack(parts=parts):
                result = [self.blocks(part) for part in parts]
                found = [item for item in result if item is not None]
                return stack_blocks(found, array.axis) if len(found) == len(result) else None
            case Take() | Relayout() | Window():
                return self._permute_blocks(array, self._shared(array.source))
            case _:
                return None

    def _permute_blocks(self, array: Take | Relayout | Window, inner: Blocks | None) -> Blocks | None:
        if inner is None:
            return None
        match array:
            case Take(axis=axis, index=index):
                return inner.taken(axis, index)
            case Window(start=start):
                return inner.windowed(start, array.shape)
            case Relayout():
                return inner.relaid(array.split, array.order, array.merge)

    def _shared(self, array: LazyArray) -> Blocks | None:
        """Return the cached blocks of an array that other arrays may also be derived from."""
        if isinstance(array, Stored):
            return blocks_of_stored(array)
        if id(array) not in self._known:
            self._known[id(array)] = self.blocks(array)
        return self._known[id(array)]


# To get equal parts, cut a block into at most this many times more parts than necessary.
_MAX_UNEVEN = 8


@dataclass(frozen=True, slots=True)
class Chunks:
    """Stored blocks, or equal parts of them, as the chunks of a zarr array.

    Attributes:
        blocks: The blocks that contain the chunks.
        pieces: The number of coordinates in a chunk, for each atom of each axis.
        chunk: Shape of a chunk.
        codecs: The codecs as listed in zarr v3 metadata.
        is_in_order: Whether the elements of a chunk are in C order.
    """

    blocks: Blocks
    pieces: Sequence[Sequence[int]]
    chunk: Shape
    codecs: tuple[CodecSpec, ...]
    is_in_order: bool

    @property
    def count(self) -> int:
        """Number of chunks."""
        return prod(ceil_div(atom.length, piece) for atom, piece in self._atoms)

    @property
    def nbytes(self) -> int:
        """Size of the elements of a chunk, in bytes."""
        return prod(self.chunk) * self.blocks.itemsize

    def locations(self) -> Iterator[Stretch]:
        """Yield the location of each chunk, in C order of the grid."""
        plain, nbytes = self.blocks.chain.is_plain, self.nbytes
        for block, start in sums([shifts_of(atom, piece) for atom, piece in self._atoms]):
            source, offset, stored = self.blocks.location(block, start)
            yield source, offset, nbytes if plain else stored

    @property
    def _atoms(self) -> Iterator[tuple[Atom, int]]:
        for axis, pieces in zip(self.blocks.axes, self.pieces, strict=True):
            yield from zip(axis, pieces, strict=True)


def chunks_of(blocks: Blocks, largest: int) -> Chunks | None:
    """Return a grid whose chunks are these blocks, or equal parts of them; None if no grid fits.

    Args:
        blocks: The blocks of an array.
        largest: Maximum chunk size in bytes; larger blocks are cut if they are uncompressed and can be cut
            evenly.
    """
    pieces = _pieces(blocks, largest)
    spans = [_span(axis, lengths) for axis, lengths in zip(blocks.axes, pieces, strict=True)]
    chunk = tuple(span[0] for span in spans if span is not None)
    if len(chunk) < len(spans):
        return None
    strides = {axis: span[1] for axis, span in enumerate(spans) if span is not None and span[0] > 1}
    solid = sorted(strides, key=strides.__getitem__, reverse=True)
    rest = [axis for axis in range(len(chunk)) if axis not in strides]
    order = tuple(range(len(chunk))) if solid == sorted(solid) else (*rest, *solid)
    codecs = blocks.chain.specs_for(chunk, order)
    if codecs is None:
        return None
    return Chunks(blocks, pieces, chunk, codecs, order == tuple(range(len(order))))


def _pieces(blocks: Blocks, largest: int) -> list[list[int]]:
    """Return how many coordinates of each atom are in a chunk: as many as are contiguous in memory."""
    pieces = [[atom.cell for atom in axis] for axis in blocks.axes]
    if not blocks.chain.is_plain:
        return pieces
    numbered = [(atom, axis, k) for axis, atoms in enumerate(blocks.axes) for k, atom in enumerate(atoms)]
    run, slowest = 1, None
    for atom, axis, k in sorted((item for item in numbered if item[0].cell > 1), key=_stride_of):
        if atom.stride == run:
            run, slowest = run * atom.cell, (axis, k)
        else:
            # Another atom is in between, so each coordinate gets its own chunk.
            pieces[axis][k] = 1
    if slowest is not None:
        axis, k = slowest
        pieces[axis][k] = _even_part(pieces[axis][k], ceil_div(run * blocks.itemsize, largest))
    return pieces


def _stride_of(entry: tuple[Atom, int, int]) -> int:
    return entry[0].stride


def _even_part(length: int, least: int) -> int:
    """Divide the length by its smallest divisor of at least `least`; return the length if it has none."""
    counts = range(least, min(length, _MAX_UNEVEN * least) + 1)
    return length // next((count for count in counts if length % count == 0), 1)


def _span(axis: Axis, pieces: Sequence[int]) -> tuple[int, int] | None:
    """Return a chunk's length along an axis and its stride in memory; None if chunks would be uneven."""
    length, stride, is_whole = 1, 1, True
    for number, (atom, piece) in reversed(list(enumerate(zip(axis, pieces, strict=True)))):
        if piece > 1:
            if not is_whole or (length > 1 and atom.stride != stride * length):
                return None
            stride = stride if length > 1 else atom.stride
        if atom.length % piece and number > 0:
            return None
        length, is_whole = length * piece, is_whole and piece == atom.length
    return length, stride
