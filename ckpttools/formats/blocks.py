"""Arrays as grids of blocks: boxes of elements that lie together in a file, under the same codecs.

Stacking, taking apart, splitting, merging and reordering axes moves no element of a block. So whatever is
made of stored arrays by these alone is again a grid of the same blocks, and only the way of counting them
changes: each axis is a product of atoms, and each atom knows how far apart its coordinates are, in blocks and
inside one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Chunked, Relayout, Stack, Stored, Take, Window
from ckpttools.codecs.base import CodecSpec
from ckpttools.core.region import Shape, ceil_div
from ckpttools.formats.orbax.arrays import Grid
from ckpttools.formats.zarr.chain import Chain

# A block is cut into at most so many times more parts than necessary, to have even ones.
_MOST_UNEVEN = 8

Stretch = tuple[ByteSource, int, int]
"""File, first byte, number of bytes."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis.

    Attributes:
        length: coordinates.
        cell: coordinates that share a block; the last block, or the only one, may reach beyond the length.
        stride: elements between neighbours inside a block.
        step: blocks between neighbouring cells.
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
        axes: the atoms of each axis, outermost first; those of one coordinate are left out.
        places: where each block is.
        itemsize: bytes of an element.
        chain: what makes the bytes of a block.
        is_grid: whether the blocks were chunks all along; else they are ranges that any grid may cut.
        is_transposed: whether a chunk of the source had its axes in another order in memory.
        first: number of the block with the first element.
        start: elements before that one in its block.
    """

    axes: tuple[Axis, ...]
    places: Sequence[Stretch]
    itemsize: int
    chain: Chain
    is_grid: bool
    is_transposed: bool
    first: int = 0
    start: int = 0

    def taken(self, axis: int, index: int) -> Blocks | None:
        """One coordinate of an axis; None where blocks would have to be taken apart that are coded whole."""
        first, start = self.first, self.start
        for atom in reversed(self.axes[axis]):
            index, i = divmod(index, atom.length)
            if atom.cell > 1 and not self.chain.is_plain:
                return None
            first += i // atom.cell * atom.step
            start += i % atom.cell * atom.stride
        return replace(self, axes=self.axes[:axis] + self.axes[axis + 1 :], first=first, start=start)

    def windowed(self, begin: Shape, shape: Shape) -> Blocks | None:
        """A box of the array; None where its edge is inside of blocks that cannot be cut there."""
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
        """The one atom of an axis with other bounds."""
        if len(axis) != 1:
            return None
        (atom,) = axis
        if self.chain.is_plain and begin // atom.cell == (begin + length - 1) // atom.cell:
            return Atom(length, length, atom.stride, 0)
        aligned = begin % atom.cell == 0 and length >= atom.cell
        return Atom(length, atom.cell, atom.stride, atom.step) if aligned else None

    def relaid(self, split: Sequence[Shape], order: Sequence[int], merge: Sequence[int]) -> Blocks | None:
        """The axes split, reordered and merged; None where a split goes through cells of a grid."""
        groups: list[Axis] = []
        for axis, lengths in zip(self.axes, split, strict=True):
            parts = _parted(axis, lengths)
            if parts is None:
                return None
            groups += parts
        rest = iter(order)
        merged = (itertools.chain.from_iterable(groups[next(rest)] for _ in range(n)) for n in merge)
        return replace(self, axes=tuple(map(tuple, merged)))

    def listed(self) -> Blocks:
        """The same with `places` in C order of the atoms, and nothing else among them."""
        places = self.places
        if len(places) > 1 or self.start:
            shifts = _sums([_shifts(atom, atom.cell) for axis in self.axes for atom in axis])
            places = [self.place(block, start) for block, start in shifts]
        counts = [[ceil_div(atom.length, atom.cell) for atom in axis] for axis in self.axes]
        left = prod(map(prod, counts))
        axes: list[Axis] = []
        for axis, numbers in zip(self.axes, counts, strict=True):
            made: list[Atom] = []
            for atom, count in zip(axis, numbers, strict=True):
                left //= count
                stride, step = atom.stride if atom.cell > 1 else 0, left if count > 1 else 0
                made.append(Atom(atom.length, atom.cell, stride, step))
            axes.append(tuple(made))
        return replace(self, axes=tuple(axes), places=places, first=0, start=0)

    def place(self, block: int, start: int) -> Stretch:
        """Where a block is, and the element that lies so far from the first one in it."""
        source, offset, nbytes = self.places[self.first + block]
        # Blocks that are coded whole have no start inside of them.
        return source, offset + (self.start + start) * self.itemsize, nbytes


def blocks_of_stored(array: Stored) -> Blocks | None:
    """A range of a file; None where elements share bytes, or there are none."""
    if (array.dtype.packed and not array.whole_bytes) or not array.size:
        return None
    place = (array.source, array.offset, array.nbytes)
    chain = Chain(tuple(range(len(array.shape))))
    steps = [0] * len(array.shape)
    axes = _axes(array.shape, array.shape, chain.order, steps)
    return Blocks(axes, [place], array.dtype.itemsize, chain, False, False)


def blocks_of_grid(grid: Grid) -> Blocks | None:
    """The chunks of a zarr array; None where some are missing, or their codecs know their axes."""
    document = grid.document
    if document.chain is None or 0 in document.shape:
        return None
    places = grid.places()
    if places is None:
        return None
    counts = [ceil_div(n, c) for n, c in zip(document.shape, document.chunk, strict=True)]
    steps = [prod(counts[axis + 1 :]) for axis in range(len(counts))]
    order = document.chain.order
    axes = _axes(document.shape, document.chunk, order, steps)
    is_transposed = order != tuple(range(len(order)))
    return Blocks(axes, places, document.dtype.itemsize, document.chain, True, is_transposed)


def _axes(shape: Shape, cells: Shape, order: Shape, steps: Sequence[int]) -> tuple[Axis, ...]:
    """One atom for each axis that is longer than one, or whose cell is."""
    strides = [0] * len(shape)
    run = 1
    for axis in reversed(order):
        strides[axis], run = run, run * cells[axis]
    atoms = map(Atom, shape, cells, strides, steps)
    return tuple((atom,) if atom.length * atom.cell > 1 else () for atom in atoms)


def stacked(parts: Sequence[Blocks], axis: int) -> Blocks | None:
    """Arrays side by side along a new axis; None where their blocks are not alike."""
    listed = [part.listed() for part in parts]
    model = listed[0]
    if any((each.axes, each.chain.kind) != (model.axes, model.chain.kind) for each in listed):
        return None
    places = [place for each in listed for place in each.places]
    new = (Atom(len(parts), 1, 0, len(model.places)),) if len(parts) > 1 else ()
    return replace(
        model,
        axes=(*model.axes[:axis], new, *model.axes[axis:]),
        places=places,
        is_grid=all(each.is_grid for each in listed),
        is_transposed=any(each.is_transposed for each in listed),
    )


def _parted(axis: Axis, lengths: Shape) -> list[Axis] | None:
    """The atoms of an axis in groups of these lengths."""
    rest = list(axis)
    groups: list[Axis] = []
    for length in reversed(lengths):
        group: list[Atom] = []
        while length > 1:
            atom = rest.pop()
            if length % atom.length:
                # The atom reaches into the next group.
                halves = _halved(atom, length) if atom.length % length == 0 else None
                if halves is None:
                    return None
                outer, atom = halves
                rest.append(outer)
            group.insert(0, atom)
            length //= atom.length
        # One coordinate in a padded cell belongs to any group.
        while rest and rest[-1].length == 1:
            group.insert(0, rest.pop())
        groups.insert(0, tuple(group))
    return None if rest else groups


def _halved(atom: Atom, inner: int) -> tuple[Atom, Atom] | None:
    """An atom as two, the inner one of a given length; None where that goes through its cells."""
    outer, cell = atom.length // inner, atom.cell
    if cell % inner == 0:
        return (
            Atom(outer, cell // inner, atom.stride * inner, atom.step),
            Atom(inner, inner, atom.stride, 0),
        )
    if inner % cell == 0:
        return Atom(outer, 1, 0, atom.step * (inner // cell)), Atom(inner, cell, atom.stride, atom.step)
    return None


def _shifts(atom: Atom, piece: int) -> list[tuple[int, int]]:
    """For every `piece` coordinates of an atom: blocks, and elements in a block, from its first one."""
    starts = range(0, atom.length, piece)
    return [(i // atom.cell * atom.step, i % atom.cell * atom.stride) for i in starts]


def _sums(shifts: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """The sums of one shift from each list, in C order."""
    if not shifts:
        yield 0, 0
        return
    inner = list(_sums(shifts[1:]))
    for block, start in shifts[0]:
        for more_blocks, more in inner:
            yield block + more_blocks, start + more


@dataclass(frozen=True, slots=True)
class Chunks:
    """Blocks, or parts of them, as the chunks of a zarr array.

    Attributes:
        blocks: they.
        pieces: for each atom of each axis how many of its coordinates a chunk has.
        chunk: shape of the grid's cells.
        codecs: as zarr v3 lists them.
        is_in_order: whether the elements of a chunk are in C order.
    """

    blocks: Blocks
    pieces: Sequence[Sequence[int]]
    chunk: Shape
    codecs: tuple[CodecSpec, ...]
    is_in_order: bool

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return prod(ceil_div(atom.length, piece) for atom, piece in self._atoms)

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk's elements."""
        return prod(self.chunk) * self.blocks.itemsize

    def places(self) -> Iterator[Stretch]:
        """Where each chunk is, in C order of the grid."""
        plain, nbytes = self.blocks.chain.is_plain, self.nbytes
        for block, start in _sums([_shifts(atom, piece) for atom, piece in self._atoms]):
            source, offset, stored = self.blocks.place(block, start)
            yield source, offset, nbytes if plain else stored

    @property
    def _atoms(self) -> Iterator[tuple[Atom, int]]:
        for axis, pieces in zip(self.blocks.axes, self.pieces, strict=True):
            yield from zip(axis, pieces, strict=True)


def chunks_of(blocks: Blocks, largest: int) -> Chunks | None:
    """The grid that has these blocks, or even parts of them, as chunks; None where there is none.

    Args:
        blocks: of an array.
        largest: bytes from which on blocks are cut, where they are plain and can be cut evenly.
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
    codecs = blocks.chain.spelled(chunk, order)
    if codecs is None:
        return None
    return Chunks(blocks, pieces, chunk, codecs, order == tuple(range(len(order))))


def _pieces(blocks: Blocks, largest: int) -> list[list[int]]:
    """For each atom how many of its coordinates a chunk has: as many as lie together in memory."""
    pieces = [[atom.cell for atom in axis] for axis in blocks.axes]
    if not blocks.chain.is_plain:
        return pieces
    numbered = [(atom, axis, k) for axis, atoms in enumerate(blocks.axes) for k, atom in enumerate(atoms)]
    run, slowest = 1, None
    for atom, axis, k in sorted((each for each in numbered if each[0].cell > 1), key=_by_stride):
        if atom.stride == run:
            run, slowest = run * atom.cell, (axis, k)
        else:
            # There is something else in between: each coordinate is a chunk.
            pieces[axis][k] = 1
    if slowest is not None:
        axis, k = slowest
        pieces[axis][k] = _even_part(pieces[axis][k], ceil_div(run * blocks.itemsize, largest))
    return pieces


def _by_stride(each: tuple[Atom, int, int]) -> int:
    return each[0].stride


def _even_part(length: int, least: int) -> int:
    """The length divided by the first number from `least` on that divides it, or not at all."""
    counts = range(least, min(length, _MOST_UNEVEN * least) + 1)
    return length // next((count for count in counts if length % count == 0), 1)


def _span(axis: Axis, pieces: Sequence[int]) -> tuple[int, int] | None:
    """Length of a chunk along an axis and its stride in memory; None where chunks are not an even grid."""
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


class Finder:
    """Sees arrays as blocks; those that many are taken from are looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, Blocks | None] = {}

    def blocks(self, array: LazyArray) -> Blocks | None:
        """The array as blocks; None where its elements are not to be found in files as they are."""
        match array:
            case Stored():
                return blocks_of_stored(array)
            case Chunked(part=Grid() as grid):
                return blocks_of_grid(grid)
            case Stack(parts=parts):
                found = [self.blocks(part) for part in parts]
                alike = [each for each in found if each is not None]
                return stacked(alike, array.axis) if len(alike) == len(found) else None
            case Take() | Relayout() | Window():
                return self._moved(array, self._shared(array.source))
            case _:
                return None

    def _moved(self, array: Take | Relayout | Window, inner: Blocks | None) -> Blocks | None:
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
        """The blocks of an array that others may be made of, too."""
        if isinstance(array, Stored):
            return blocks_of_stored(array)
        if id(array) not in self._known:
            self._known[id(array)] = self.blocks(array)
        return self._known[id(array)]
