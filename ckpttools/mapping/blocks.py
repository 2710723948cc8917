"""Convert quantization blocks (elements that share a scale) from one side's axes to the other's.

A matrix (heads head_dim) x embed in blocks of 128 x 128 has a grid of scales. Given the number of blocks on
each axis, such as (16 heads, 2 blocks per head) x 16 blocks of embed, the row itself rearranges the grid,
using these counts in place of the axis lengths and without its value op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import gcd, prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import pad_array, relayout, take
from ckpttools.core.errors import MappingError
from ckpttools.core.region import Shape, ceil_div
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup
from ckpttools.mapping.row import Row

Block = tuple[int, int]


def block_counts(side: Side, sizes: Mapping[str, int], block: Block) -> dict[str, int]:
    """Count the blocks on each axis of a side whose last two groups are cut into blocks.

    Args:
        side: A side of a row, with an array of at least two axes.
        sizes: The length of every axis.
        block: Shape of a block on the last two axes of the array.

    Returns:
        Axis -> number of blocks: 1 if one block covers the axis, or the length of an axis that is not cut.

    Raises:
        MappingError: Blocks cross the edges of axes or parts, or the last block is smaller.
    """
    if len(side.groups) < 2:
        raise MappingError("only matrices have blocks", got=f"{len(side.groups)} axes")
    counts: dict[str, int] = {}
    for at, size in zip((len(side.groups) - 2, len(side.groups) - 1), block, strict=True):
        if side.join is not None and side.join.at == at:
            part = prod(sizes[axis] for axis in side.groups[at][side.join.depth :])
            if part % size:
                raise MappingError(
                    "blocks cross the edges of parts", got=f"parts of {part} rows, blocks of {size}"
                )
        counts |= _counts(side.groups[at], sizes, size)
    return counts


def _counts(group: AxisGroup, sizes: Mapping[str, int], size: int) -> dict[str, int]:
    length = prod(sizes[axis] for axis in group)
    if length <= size:
        return dict.fromkeys(group, 1)
    if length % size:
        raise MappingError(
            "the last block is smaller than the others", got=f"{axes_text(group, sizes)} in blocks of {size}"
        )
    counts = cell_counts(group, sizes, size)
    if counts is None:
        raise MappingError(
            "blocks cross the edges of axes", got=f"{axes_text(group, sizes)} in blocks of {size}"
        )
    return counts


def cell_counts(group: AxisGroup, sizes: Mapping[str, int], cell: int) -> dict[str, int] | None:
    """Count the cells of `size` neighbors on each axis of a group; None if cells cross edges."""
    counts: dict[str, int] = {}
    for axis in group[::-1]:
        own = sizes[axis]
        if cell % own == 0:
            counts[axis], cell = 1, cell // own
        elif own % cell == 0:
            counts[axis], cell = own // cell, 1
        else:
            return None
    return counts if cell == 1 else None


def grid_of(side: Side, sizes: Mapping[str, int], counts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the grid of scales for a side's full array, including all parts.

    Args:
        side: A side of a row.
        sizes: The length of every axis.
        counts: Number of blocks on each axis that is cut into blocks, including the axes of all parts.

    Raises:
        MappingError: The elements of a block are not contiguous on this side.
    """
    cut = {**sizes, **counts}
    for axis in side.key.axes:
        if cut[axis] != sizes[axis]:
            raise MappingError(
                "several arrays would share a block", got=f"{axis} is in names, {sizes[axis]} in a block"
            )
    for at, group in enumerate(side.groups):
        if side.join is not None and side.join.at == at and len(side.parts) > 1:
            outside = group[: side.join.depth]
            if any(cut[axis] != sizes[axis] for axis in outside):
                raise MappingError("blocks cross the edges of parts", got=axes_text(outside, sizes))
            group = group[side.join.depth :]
        _check_contiguous(group, sizes, cut)
    return side.shape(cut)


def _check_contiguous(group: Iterable[str], sizes: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """Refuse a merged axis on which the elements of a block are not contiguous."""
    inside = False
    for axis in group:
        if inside and cut[axis] != 1:
            raise MappingError("the elements of a block are not contiguous", got=axes_text(group, sizes))
        inside = inside or cut[axis] != sizes[axis]


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Merge the block counts of the parts of one array.

    Raises:
        MappingError: Two parts have different counts for the same axis.
    """
    merged: dict[str, int] = {}
    for item in counts:
        for axis, count in item.items():
            if merged.setdefault(axis, count) != count:
                raise MappingError(
                    "the parts of one array have different blocks",
                    got=f"{axis}: {merged[axis]} and {count} blocks",
                )
    return merged


def axes_text(group: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Format axes with their lengths: `heads 16 x head_dim 64`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in group)


# A block of 128 rows may cover two heads of 64. If heads are an axis, the grid of scales therefore has
# smaller cells, each with the scale of its block. The reverse conversion takes one cell of each block and
# requires the other cells to be equal.

# Maximum number of cells in a block: for 128 x 128 elements with float32 scales, they take 1/4 of the block's
# bytes.
_MAX_CELLS = 1024

Fits = Callable[[Row, Mapping[str, int], Shape], str]
"""Function that returns why a row's left arrays should not have a grid of this shape.

The result is empty if the grid is acceptable. The sizes are those of the weight.
"""


def fitting_cells(row: Row, sizes: Mapping[str, int], block: Block, fits: Fits) -> tuple[dict[str, int], str]:
    """Choose the cells whose grid fits, or else the coarsest cells with the reason for the misfit.

    Raises:
        MappingError: There are no valid cells, or they are so small that scales would be as large as the
            weight.
    """
    coarsest: tuple[dict[str, int], str] | None = None
    failed: MappingError | None = None
    for counts in cells_within(row.right, sizes, block):
        try:
            grid = grid_of(row.left, sizes, {**sizes, **counts})
        except MappingError as error:
            failed = failed or error
            continue
        misfit = fits(row, sizes, grid)
        if not misfit:
            return counts, ""
        coarsest = coarsest or (counts, misfit)
    if coarsest is None:
        block_counts(row.right, sizes, block)
        raise failed or MappingError("blocks cross the edges of axes", got=f"blocks of {block[0]}")
    return coarsest


def times_of(side: Side, sizes: Mapping[str, int], counts: Mapping[str, int], block: Block) -> Block:
    """Count the cells of a block on the last two axes of a right array.

    Raises the errors of `times_in_block`.
    """
    uncut = [
        axis for group in side.groups[:-2] for axis in group if counts.get(axis, sizes[axis]) != sizes[axis]
    ]
    if uncut or len(side.groups) < 2:
        raise MappingError("several matrices would share a block", got=" ".join(uncut) or None)
    rows, columns = (
        times_in_block(group, sizes, counts, size)
        for group, size in zip(side.groups[-2:], block, strict=True)
    )
    return rows, columns


def cells_within(side: Side, sizes: Mapping[str, int], block: Block) -> Iterator[dict[str, int]]:
    """Yield the ways to cut a side into cells that are inside one block each, coarsest first.

    The last two groups of the side are cut.

    Args:
        side: A side of a row without parts, with an array of at least two axes.
        sizes: The length of every axis.
        block: Shape of a block on the last two axes of the array.

    Yields:
        Axis -> number of cells.

    Raises:
        MappingError: The array is not a matrix.
    """
    if len(side.groups) < 2:
        raise MappingError("only matrices have blocks", got=f"{len(side.groups)} axes")
    first, second = (_cells(group, sizes, size) for group, size in zip(side.groups[-2:], block, strict=True))
    limit = prod(min(length, size) for length, size in zip(side.shape(sizes)[-2:], block, strict=True))
    pairs = sorted(((a, b) for a in first for b in second), key=lambda pair: -pair[0] * pair[1])
    for a, b in pairs:
        if a * b * _MAX_CELLS >= limit:
            yield {**first[a], **second[b]}


def _cells(group: AxisGroup, sizes: Mapping[str, int], size: int) -> dict[int, dict[str, int]]:
    """Map neighbors per cell to the number of cells on each axis, for cells inside a block and an axis."""
    length = prod(sizes[axis] for axis in group)
    largest = length if length <= size else gcd(length, size)
    counts_by_cell = {
        cell: cell_counts(group, sizes, cell) for cell in range(1, largest + 1) if largest % cell == 0
    }
    return {cell: counts for cell, counts in counts_by_cell.items() if counts is not None}


def cells_of_grid(side: Side, sizes: Mapping[str, int], grid: tuple[int, ...]) -> dict[str, int]:
    """Count the cells on each axis of a side whose array has a grid of this shape.

    Raises:
        MappingError: The grid does not fit the array.
    """
    counts: dict[str, int] = {}
    lengths = side.shape(sizes)
    if len(grid) != len(lengths):
        raise MappingError(
            "the grid of scales does not have the axes of the array",
            got=list(grid),
            expected=f"the axes of {list(lengths)}",
        )
    for group, length, count in zip(side.groups, lengths, grid, strict=True):
        group_counts = cell_counts(group, sizes, length // count) if count and length % count == 0 else None
        if group_counts is None:
            raise MappingError(
                "the number of scales does not fit the axes", got=f"{count} for {axes_text(group, sizes)}"
            )
        counts |= group_counts
    return counts


def times_in_block(group: AxisGroup, sizes: Mapping[str, int], counts: Mapping[str, int], size: int) -> int:
    """Count the cells of a merged axis in one block.

    Args:
        group: The merged axes.
        sizes: The lengths of the axes.
        counts: Number of cells on each axis.
        size: Number of elements in a block.

    Raises:
        MappingError: Cells are not adjacent on this axis, or cross blocks.
    """
    counts = {axis: counts.get(axis, sizes[axis]) for axis in group}
    length, cells = prod(sizes[axis] for axis in group), prod(counts.values())
    cell = length // cells
    if cell_counts(group, sizes, cell) != counts:
        raise MappingError("the elements of a block are not contiguous", got=axes_text(group, sizes))
    if length <= size:
        return cells
    if size % cell:
        raise MappingError(
            "blocks do not consist of complete cells", got=f"cells of {cell}, blocks of {size}"
        )
    return size // cell


def block_scales(cells: LazyArray, times: Block) -> LazyArray:
    """Return the scales of blocks, which are those of their first cells.

    `times` is the number of cells in a block on the last two axes.
    """
    *outer, rows, columns = cells.shape
    down, across = ceil_div(rows, times[0]), ceil_div(columns, times[1])
    padded = pad_array(cells, (*outer, down * times[0], across * times[1]))
    split = [*((length,) for length in outer), (down, times[0]), (across, times[1])]
    count = len(outer)
    order = (*range(count), count, count + 2, count + 1, count + 3)
    cells_by_position = relayout(padded, split, order, [1] * (count + 4))
    return take(take(cells_by_position, count + 2, 0), count + 2, 0)
