"""Zarr grids whose chunks are stored blocks or equal parts of stored blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ckpttools.codecs.base import CodecSpec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, ceil_div
from ckpttools.formats.blocks import Atom, Axis, Blocks, Stretch, shifts_of, sums

# To get equal parts, cut a block into at most this many times more parts than necessary.
_MOST_UNEVEN = 8


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
    for atom, axis, k in sorted((item for item in numbered if item[0].cell > 1), key=_by_stride):
        if atom.stride == run:
            run, slowest = run * atom.cell, (axis, k)
        else:
            # Another atom is in between, so each coordinate gets its own chunk.
            pieces[axis][k] = 1
    if slowest is not None:
        axis, k = slowest
        pieces[axis][k] = _even_part(pieces[axis][k], ceil_div(run * blocks.itemsize, largest))
    return pieces


def _by_stride(each: tuple[Atom, int, int]) -> int:
    return each[0].stride


def _even_part(length: int, least: int) -> int:
    """Divide the length by its smallest divisor of at least `least`; return the length if it has none."""
    counts = range(least, min(length, _MOST_UNEVEN * least) + 1)
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
