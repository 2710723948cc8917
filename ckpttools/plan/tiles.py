"""How an array is cut into tiles of a bounded size that are cheap to read and to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ckpttools.core.region import Shape, ceil_div


def tile_shape(
    shape: Shape, limit: int, cells: Sequence[Shape], cost: Callable[[Shape], float], *, whole: bool = False
) -> Shape | None:
    """A shape of at most `limit` elements: the axis is halved, again and again, whose halving costs least.

    Args:
        shape: of what is cut.
        limit: elements of a tile.
        cells: shapes of the cells of grids along which it is cut as long as it spans several of them.
        cost: of a tile of that shape, for each of its elements.
        whole: whether no cell may be cut.

    Returns:
        The shape; None where even a single cell has more elements.
    """
    while prod(shape) > limit:
        halves = (_halved(shape, axis, cells, whole) for axis in range(len(shape)))
        shorter = [half for half in halves if half != shape]
        if not shorter:
            return None
        shape = min(shorter, key=cost)
    return shape


def _halved(shape: Shape, axis: int, cells: Sequence[Shape], whole: bool) -> Shape:
    """The shape with one axis halved, rounded up to whole cells; the same shape if it cannot be."""
    length = shape[axis]
    cell = max((item[axis] for item in cells if item[axis] < length), default=length if whole else 1)
    half = ceil_div(ceil_div(length, 2), cell) * cell
    return (*shape[:axis], half, *shape[axis + 1 :])
