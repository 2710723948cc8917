"""Arrays of low-precision codes multiplied by scales that blocks of them share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ckpttools.array import read_blocks
from ckpttools.array.lazy import ByteSource, LazyArray, ReadCost
from ckpttools.array.permutation import Permutation
from ckpttools.array.read_blocks import subview
from ckpttools.array.relayout import Relayout, split_axes
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region, Shape, ceil_div, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Bytes of scales for one decoded piece. Blocks of 32 values with 16-bit scales need half of it.
_SCALES_BYTES = 256 * 1024
_PAGE = 4096


class Decoding(Protocol):
    """A function from codes and scales to values. Its `repr` is a complete description."""

    @property
    def kind(self) -> Hashable:
        """Equal for decodings that do the same to arrays of other names."""

    def working_bytes(self, size: int, packed: int, scales: int) -> int:
        """Return the maximum bytes that `decode` takes from the scratch and allocates.

        Args:
            size: elements of a piece.
            packed: elements in each code.
            scales: elements of each array of scales that a piece touches.
        """

    def decode(
        self,
        codes: np.ndarray,
        scales: Sequence[np.ndarray],
        piece: DequantizedPiece,
        out: np.ndarray,
        scratch: Scratch,
    ) -> None:
        """Write the values of a piece.

        Args:
            codes: carriers of all codes that the piece touches.
            scales: of each array of scales the carriers of those that the piece touches.
            piece: which elements of the whole array they are.
            out: of the piece's shape and the result's carrier, any strides.
            scratch: with as much left as `working_bytes` says.

        Raises:
            FormatError: a scale is not a usable number.
        """


@dataclass(frozen=True, slots=True)
class DequantizedPiece:
    """A part of a dequantized array.

    Attributes:
        region: the elements of the piece.
        packed: elements in each code, along the last axis.
        blocks: for each array of scales, the shape of the region that shares one scale.
    """

    region: Region
    packed: int
    blocks: tuple[Shape, ...]

    @property
    def codes(self) -> Region:
        """The region of the codes."""
        last = self.region.rank - 1
        start, stop = self.region.start[last], self.region.stop[last]
        return self.region.replaced(last, start // self.packed, ceil_div(stop, self.packed))

    @property
    def scales(self) -> list[Region]:
        """The region of each array of scales."""
        return [touched_cells(self.region, block) for block in self.blocks]

    def part(self, region: Region) -> DequantizedPiece:
        """Return the piece of a smaller region."""
        return DequantizedPiece(region, self.packed, self.blocks)

    def transposed(self, order: Sequence[int]) -> DequantizedPiece:
        """Return the piece with its axes in another order."""
        blocks = tuple(tuple(block[axis] for axis in order) for block in self.blocks)
        start, stop = (tuple(ends[axis] for axis in order) for ends in (self.region.start, self.region.stop))
        return DequantizedPiece(Region(start, stop), self.packed, blocks)


def touched_cells(region: Region, block: Shape) -> Region:
    """Return the cells of a grid of blocks that overlap a region."""
    start = tuple([a // n for a, n in zip(region.start, block, strict=True)])
    stop = tuple([ceil_div(b, n) for b, n in zip(region.stop, block, strict=True)])
    return Region(start, stop)


@dataclass(frozen=True, eq=False, repr=False)
class Dequantized(LazyArray):
    """An array of codes multiplied by scales.

    Attributes:
        codes: of this array's shape, but that each element of the last axis holds `packed` numbers.
        scales: of this array's rank, with one element for each of its blocks.
        blocks: the shape of the blocks of each of `scales`; those at the edges are cut short.
        packed: numbers in a code; the last code of a row may hold more than the row has.
        decoding: computes the values.
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
        """Read as `read_into` does, but rearrange codes instead of values into the order of `out`.

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
        """Yield the piece, or parts of it whose codes and scales fit into the scratch."""
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
        few = max(min(scale.size, _SCALES_BYTES // scale.dtype.itemsize) for scale in self.scales)
        size = min(self.size, read_blocks.elements(1))
        working = self.decoding.working_bytes(size, self.packed, few)
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
        """Bits of a code; the few scales are not counted."""
        return self.codes.stored_bits // self.packed

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.codes.first_byte(self._piece(region).codes)

    def sources(self) -> Iterator[ByteSource]:
        for scale in (self.codes, *self.scales):
            yield from scale.sources()


def _split_codes_and_scales(
    array: Dequantized, split: Sequence[Shape]
) -> tuple[Dequantized, tuple[Shape, ...]]:
    """Split the axes of quantized values and scales like those of the numbers.

    Then interleaved rows are decoded only if they are expected. Also return the splits that remain.

    An axis along which a scale is for several numbers, but not for all, stays whole; so does the last.
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
    built = replace(
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
    return built, tuple(finer)


def _can_split_axis(array: Dequantized, axis: int) -> bool:
    """Return whether each value along an axis has its own scale, or all share one."""
    both = zip(array.scales, array.blocks, strict=True)
    return all(block[axis] == 1 or scale.shape[axis] == 1 for scale, block in both)


def _block_lengths(group: Shape, cell: int) -> Shape:
    """Return the lengths of a block along the parts of an axis."""
    if len(group) == 1:
        return (cell,)
    return (1,) * len(group) if cell == 1 else group


def _scale_lengths(group: Shape, length: int) -> Shape:
    """Return the lengths into which an axis of scales is split."""
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
