"""Arrays assembled from boxes that were saved separately and may be cut unevenly along any axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd, prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked, Constant, Stored, concat, relayout, window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, Shape, grid_shape, intersecting_cells

# If all boundaries of the parts are multiples of a large number, there are as many cells as parts.
_MAX_CELLS = 1_000_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array, with its content."""

    box: Region
    array: LazyArray


def assemble_boxes(shape: Shape, dtype: DType, pieces: Sequence[Piece]) -> LazyArray:
    """Assemble an array from boxes.

    Args:
        shape, dtype: Shape and dtype of the complete array.
        pieces: The boxes in any order; empty ones are ignored, and equal ones count once.

    Raises:
        ValueError: Boxes overlap, extend beyond an edge or leave a gap. The message names them.
    """
    if not prod(shape):
        return Constant(shape, dtype, bytes(dtype.itemsize))
    boxes = {piece.box: piece.array for piece in pieces if piece.box.size}
    if len(boxes) == 1 and Region.whole(shape) in boxes:
        return boxes[Region.whole(shape)]
    if any(box.stop[axis] > length for box in boxes for axis, length in enumerate(shape)):
        raise ValueError("a part extends beyond the edge")
    missing_elements = prod(shape) - sum(box.size for box in boxes)
    if missing_elements > 0:
        raise ValueError(f"its {len(boxes)} parts leave {missing_elements:,} elements out")
    cell = tuple(_cell(length, axis, boxes) for axis, length in enumerate(shape))
    cells = prod(grid_shape(shape, cell))
    cut = [axis for axis, length in enumerate(shape) if any(box.shape[axis] < length for box in boxes)]
    if cells > len(boxes) and len(cut) == 1:
        return _join_along_axis(boxes, cut[0])
    if cells > _MAX_CELLS:
        raise ValueError(f"its parts meet at {cells:,} places")
    grid = _CellGrid.of(shape, cell, boxes)
    scratch = max(array.scratch_bytes for array in boxes.values())
    return Chunked(shape, dtype, cell, grid, scratch)


def _join_along_axis(boxes: Mapping[Region, LazyArray], axis: int) -> LazyArray:
    """Assemble boxes that are cut unevenly along one axis, which would need far more cells than boxes.

    Raises:
        ValueError: Two boxes overlap. If none overlap, the number of elements rules out gaps.
    """
    ordered = sorted(boxes, key=lambda box: box.start[axis])
    for one, other in pairwise(ordered):
        if other.start[axis] < one.stop[axis]:
            raise ValueError(f"two of its parts contain element {list(other.start)}")
    return concat([boxes[box] for box in ordered], axis)


def reshape_pieces(pieces: Sequence[Stored], shape: Shape) -> LazyArray:
    """Reshape consecutive flat pieces into one array of a given shape."""
    first = pieces[0]
    if len(pieces) == 1:
        return replace(first, shape=shape)
    return relayout(concat(pieces, 0), [shape], range(len(shape)), [1] * len(shape))


def _cell(length: int, axis: int, boxes: Iterable[Region]) -> int:
    """Return the largest cell length along an axis for which boxes end only at cell edges."""
    ends = {at for box in boxes for at in (box.start[axis], box.stop[axis])} - {0, length}
    return gcd(*ends) if ends else length


class _CellGrid:
    """A grid that is fine enough for each cell to be inside one box."""

    def __init__(self, cells: dict[Shape, LazyArray]) -> None:
        self._cells = cells

    @classmethod
    def of(cls, shape: Shape, cell: Shape, boxes: dict[Region, LazyArray]) -> _CellGrid:
        """Create the grid; raise ValueError if two boxes share a cell or a cell is not in any box."""
        cells: dict[Shape, LazyArray] = {}
        for box, array in boxes.items():
            for index in intersecting_cells(cell, box):
                start = tuple(at * c for at, c in zip(index, cell, strict=True))
                stop = tuple(min(a + c, n) for a, c, n in zip(start, cell, shape, strict=True))
                inside = tuple(a - b for a, b in zip(start, box.start, strict=True))
                if index in cells:
                    raise ValueError(f"two of its parts contain element {list(start)}")
                cells[index] = window(array, inside, tuple(b - a for a, b in zip(start, stop, strict=True)))
        if len(cells) < prod(grid_shape(shape, cell)):
            raise ValueError("its parts leave elements out")
        return cls(cells)

    def __call__(self, index: Shape) -> LazyArray:
        return self._cells[index]
