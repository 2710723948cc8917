"""Dequantized arrays: low-precision codes multiplied by scales that are shared by blocks of elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ckpttools.array import read_blocks
from ckpttools.array.lazy import ByteSource, LazyArray, ReadCost
from ckpttools.array.read_blocks import subview
from ckpttools.array.relayout import Permutation, Relayout, split_axes
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, ceil_div, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Maximum bytes of scales for one decoded piece. Blocks of 32 values with 16-bit scales need half of that.
_SCALES_BYTES = 256 * 1024
_PAGE = 4096


class Decoding(Protocol):
    """Computes values from codes and scales. Its `repr` is a complete description."""

    @property
    def kind(self) -> Hashable:
        """Return a key that is equal for decodings that differ only in the name of the array."""

    def working_bytes(self, size: int, packed: int, scales: int) -> int:
        """Return the maximum number of bytes that `decode` takes from the scratch memory and allocates.

        Args:
            size: Number of elements in a piece.
            packed: Number of elements per code.
            scales: Number of scales that a piece needs from each array of scales.
        """

    def decode(
        self,
        codes: np.ndarray,
        scales: Sequence[np.ndarray],
        piece: DequantizedPiece,
        out: np.ndarray,
        scratch: Scratch,
    ) -> None:
        """Decode a piece into `out`.

        Args:
            codes: The codes of the piece, as carriers.
            scales: The scales of the piece from each array of scales, as carriers.
            piece: The piece's position in the full array.
            out: Destination of the piece's shape and the result's carrier dtype, with any strides.
            scratch: Has `working_bytes` bytes free.

        Raises:
            FormatError: A scale is not a usable number.
        """


@dataclass(frozen=True, slots=True)
class DequantizedPiece:
    """A region of a dequantized array, and the codes and scales that it needs.

    Attributes:
        region: The region of the elements.
        packed: Number of elements per code, along the last axis.
        blocks: For each array of scales, the shape of the region that shares one scale.
    """

    region: Region
    packed: int
    blocks: tuple[Shape, ...]

    @property
    def codes(self) -> Region:
        """The region of the codes of this piece."""
        last = self.region.rank - 1
        start, stop = self.region.start[last], self.region.stop[last]
        return self.region.replaced(last, start // self.packed, ceil_div(stop, self.packed))

    @property
    def scales(self) -> list[Region]:
        """The region of the scales of this piece, for each array of scales."""
        return [overlapping_cells(self.region, block) for block in self.blocks]

    def part(self, region: Region) -> DequantizedPiece:
        """Return the piece for a smaller region."""
        return DequantizedPiece(region, self.packed, self.blocks)

    def transposed(self, order: Sequence[int]) -> DequantizedPiece:
        """Return the piece with its axes reordered."""
        blocks = tuple(tuple(block[axis] for axis in order) for block in self.blocks)
        start, stop = (tuple(ends[axis] for axis in order) for ends in (self.region.start, self.region.stop))
        return DequantizedPiece(Region(start, stop), self.packed, blocks)


def overlapping_cells(region: Region, block: Shape) -> Region:
    """Return the region of the blocks that overlap a region of elements."""
    start = tuple([a // n for a, n in zip(region.start, block, strict=True)])
    stop = tuple([ceil_div(b, n) for b, n in zip(region.stop, block, strict=True)])
    return Region(start, stop)


@dataclass(frozen=True, eq=False, repr=False)
class Dequantized(LazyArray):
    """An array of codes multiplied by scales.

    Attributes:
        codes: The codes, with this array's shape except that each code holds `packed` numbers along the last
            axis.
        scales: Arrays of scales with this array's rank and one element per block.
        blocks: The block shape of each array of scales; blocks at the edges are truncated.
        packed: Number of elements per code; the last code of a row may be partly unused.
        decoding: Computes the values from codes and scales.
    """

    codes: LazyArray
    scales: tuple[LazyArray, ...]
    blocks: tuple[Shape, ...]
    packed: int
    decoding: Decoding

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self._read_boxes(region, out, scratch, range(out.ndim))

    def permuted(self, permutation: Permutation) -> LazyArray:
        source, split = _split_codes_and_scales(self, permutation.split)
        return Relayout(permutation.shape, self.dtype, source, split, permutation.order, permutation.merge)

    @property
    def can_read_in_any_order(self) -> bool:
        return self.packed == 1

    def read_in_any_order(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read like `read_into`, but rearrange codes instead of values into the memory order of `out`.

        Converting FP8 to bfloat16 takes 2.3 ns per element instead of 2.5. In addition to
        `scratch_bytes`, it needs the scratch of `ckpttools.array.copy.copy` and room for the codes of a
        read block.
        """
        self._read_boxes(region, out, scratch, sorted(range(out.ndim), key=lambda axis: -out.strides[axis]))

    def _read_boxes(self, region: Region, out: np.ndarray, scratch: Scratch, order: Sequence[int]) -> None:
        for box in split_evenly(region, read_blocks.elements(1)):
            for piece in self._pieces(self._piece(box)):
                self._read_region(piece, subview(out, piece.region.relative_to(region)), scratch, order)

    def _pieces(self, piece: DequantizedPiece) -> Iterator[DequantizedPiece]:
        """Yield the piece, or smaller pieces whose codes and scales fit in the scratch memory."""
        if self._fits(piece) or piece.region.size == 1:
            yield piece
            return
        for half in split_evenly(piece.region, ceil_div(piece.region.size, 2)):
            yield from self._pieces(piece.part(half))

    def _fits(self, piece: DequantizedPiece) -> bool:
        sizes = zip(piece.scales, self.scales, strict=True)
        return piece.codes.size * self.codes.dtype.itemsize <= read_blocks.READ_BLOCK_BYTES and all(
            region.size * array.dtype.itemsize <= _SCALES_BYTES for region, array in sizes
        )

    def _read_region(
        self, piece: DequantizedPiece, out: np.ndarray, scratch: Scratch, order: Sequence[int]
    ) -> None:
        with ExitStack() as taken:
            sources = zip((piece.codes, *piece.scales), (self.codes, *self.scales), strict=True)
            codes, *scales = (_read_region(item, region, taken, scratch) for region, item in sources)
            if order[-1] != out.ndim - 1:
                out, piece = out.transpose(order), piece.transposed(order)
                scales = [scale.transpose(order) for scale in scales]
                codes = _copy_codes(codes.transpose(order), taken, scratch)
            self.decoding.decode(codes, scales, piece, out, scratch)

    def _piece(self, region: Region) -> DequantizedPiece:
        return DequantizedPiece(region, self.packed, self.blocks)

    @property
    def is_computed(self) -> bool:
        return True

    @property
    def scratch_bytes(self) -> int:
        own = sum(min(scale.nbytes, _SCALES_BYTES) + _PAGE for scale in self.scales)
        sources = max(scale.scratch_bytes for scale in (self.codes, *self.scales))
        min_scales = max(min(scale.size, _SCALES_BYTES // scale.dtype.itemsize) for scale in self.scales)
        size = min(self.size, read_blocks.elements(1))
        working = self.decoding.working_bytes(size, self.packed, min_scales)
        return read_blocks.scratch(self.codes.nbytes) + own + max(sources, working)

    def read_cost(self, region: Region) -> ReadCost:
        piece = self._piece(region)
        scales = zip(self.scales, piece.scales, strict=True)
        return sum((item.read_cost(part) for item, part in scales), self.codes.read_cost(piece.codes))

    @property
    def read_kind(self) -> Hashable:
        kinds = tuple(scale.read_kind for scale in (self.codes, *self.scales))
        return ("dequantized", self.shape, self.dtype, self.blocks, self.packed, self.decoding.kind, kinds)

    @property
    def stored_bits(self) -> int:
        """The size of a code in bits; the few scales are not counted."""
        return self.codes.stored_bits // self.packed

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.codes.first_byte(self._piece(region).codes)

    def sources(self) -> Iterator[ByteSource]:
        for scale in (self.codes, *self.scales):
            yield from scale.sources()


def _split_codes_and_scales(
    array: Dequantized, split: Sequence[Shape]
) -> tuple[Dequantized, tuple[Shape, ...]]:
    """Split the axes of codes and scales like the axes of the dequantized array.

    Reads then decode only the interleaved rows that they need. Also return the splits that remain to be
    applied.

    An axis stays unsplit if some, but not all, of its values share a scale. The last axis is never split.
    """
    groups = [
        group if len(group) > 1 and axis < array.ndim - 1 and _can_split_axis(array, axis) else (length,)
        for axis, (group, length) in enumerate(zip(split, array.shape, strict=True))
    ]
    if all(len(group) == 1 for group in groups):
        return array, tuple(split)
    blocks = [
        tuple(
            length
            for group, cell in zip(groups, block, strict=True)
            for length in _block_lengths(group, cell)
        )
        for block in array.blocks
    ]
    result = replace(
        array,
        shape=tuple(length for group in groups for length in group),
        codes=split_axes(array.codes, [*groups[:-1], array.codes.shape[-1:]]),
        scales=tuple(
            split_axes(scale, [_scale_lengths(*three) for three in zip(groups, scale.shape, strict=True)])
            for scale in array.scales
        ),
        blocks=tuple(blocks),
    )
    finer: list[Shape] = []
    for group, parts in zip(groups, split, strict=True):
        finer += [(length,) for length in group] if len(group) > 1 else [parts]
    return result, tuple(finer)


def _can_split_axis(array: Dequantized, axis: int) -> bool:
    """Return whether each index along an axis has its own scale, or all share one."""
    both = zip(array.scales, array.blocks, strict=True)
    return all(block[axis] == 1 or scale.shape[axis] == 1 for scale, block in both)


def _block_lengths(group: Shape, cell: int) -> Shape:
    """Return the lengths of a block along the axes that an axis is split into."""
    if len(group) == 1:
        return (cell,)
    return (1,) * len(group) if cell == 1 else group


def _scale_lengths(group: Shape, length: int) -> Shape:
    """Return the lengths of the axes that an axis of scales is split into."""
    if len(group) == 1:
        return (length,)
    return (1,) * len(group) if length == 1 else group


def _copy_codes(codes: np.ndarray, taken: ExitStack, scratch: Scratch) -> np.ndarray:
    """Copy codes into C order."""
    from ckpttools.array.copy import copy

    buffer: np.ndarray = taken.enter_context(scratch.take(codes.shape, codes.dtype))
    copy(buffer, codes, scratch)
    return buffer


def _read_region(array: LazyArray, region: Region, taken: ExitStack, scratch: Scratch) -> np.ndarray:
    buffer: np.ndarray = taken.enter_context(scratch.take(region.shape, array.dtype.carrier))
    array.read_into(region, buffer, scratch)
    return buffer
