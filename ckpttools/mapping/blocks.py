"""Blocks of elements that share a scale, from the axes of one side of a row to those of the other.

A matrix (heads head_dim) x embed in blocks of 128 x 128 has a grid of scales. Told how many blocks each axis
has, (16 heads, 2 blocks of a head) x 16 blocks of embed, the row itself rearranges that grid: with these
numbers in place of the axes' lengths, and without its function of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from ckpttools.core.errors import MappingError
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup

Block = tuple[int, int]


def block_counts(side: Side, sizes: Mapping[str, int], block: Block) -> dict[str, int]:
    """How many blocks each axis of a side has that is cut into blocks on its last two groups.

    Args:
        side: of a row; an array of at least two axes.
        sizes: length of every axis.
        block: elements of a block on the last two axes of the array.

    Returns:
        Axis -> number of blocks; 1 where all of it lies in one block, its length where it is not cut.

    Raises:
        MappingError: blocks reach over the edges of axes or parts, or the last one is smaller.
    """
    if len(side.groups) < 2:
        raise MappingError("only matrices have blocks", got=f"{len(side.groups)} axes")
    counts: dict[str, int] = {}
    for at, size in zip((len(side.groups) - 2, len(side.groups) - 1), block, strict=True):
        if side.join is not None and side.join.at == at:
            part = prod(sizes[axis] for axis in side.groups[at][side.join.depth :])
            if part % size:
                raise MappingError(
                    "blocks reach over the edges of parts", got=f"parts of {part} rows, blocks of {size}"
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
            "blocks reach over the edges of axes", got=f"{axes_text(group, sizes)} in blocks of {size}"
        )
    return counts


def cell_counts(group: AxisGroup, sizes: Mapping[str, int], cell: int) -> dict[str, int] | None:
    """How many cells each axis of a group has, of so many neighbours; None where they reach over edges."""
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
    """The shape of the grid of scales of a side's array, all parts together.

    Args:
        side: of a row.
        sizes: length of every axis.
        counts: number of blocks of each axis that is cut into blocks; of all parts, where there are some.

    Raises:
        MappingError: elements of a block lie apart on this side.
    """
    cut = {**sizes, **counts}
    for axis in side.key.axes:
        if cut[axis] != sizes[axis]:
            raise MappingError(
                "arrays would share blocks", got=f"{axis} is in names, {sizes[axis]} in a block"
            )
    for at, group in enumerate(side.groups):
        if side.join is not None and side.join.at == at and len(side.parts) > 1:
            outside = group[: side.join.depth]
            if any(cut[axis] != sizes[axis] for axis in outside):
                raise MappingError("blocks reach over the edges of parts", got=axes_text(outside, sizes))
            group = group[side.join.depth :]
        _check_together(group, sizes, cut)
    return side.shape(cut)


def _check_together(group: Iterable[str], sizes: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """Refuses a merged axis on which the elements of a block do not follow each other."""
    inside = False
    for axis in group:
        if inside and cut[axis] != 1:
            raise MappingError("the elements of a block lie apart", got=axes_text(group, sizes))
        inside = inside or cut[axis] != sizes[axis]


def merged_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The blocks of several parts of one array.

    Raises:
        MappingError: an axis has another number of blocks in one than in another.
    """
    merged: dict[str, int] = {}
    for item in counts:
        for axis, count in item.items():
            if merged.setdefault(axis, count) != count:
                raise MappingError(
                    "parts of one array lie in different blocks",
                    got=f"{axis}: {merged[axis]} and {count} blocks",
                )
    return merged


def axes_text(group: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Axes with their lengths: `heads 16 x head_dim 64`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in group)
