"""The arrays that a model has, from its configuration alone: names and shapes on either side of a table."""

from __future__ import annotations

from collections.abc import Callable

from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import require
from ckpttools.mapping.table import Table, labelled_sizes


def right_shapes(table: Table) -> dict[str, Shape]:
    """Right keys and shapes of a model whose sizes the table knows.

    Raises:
        ShapeError: a size is not known.
    """
    return _shapes(table, lambda row: row.right)


def _shapes(table: Table, side_of: Callable[[Row], Side]) -> dict[str, Shape]:
    flags = [name for name, flag in table.flags.items() if flag.value]
    rows = [row for row in table.rows if row.applies(flags)]
    sides = [side_of(row) for row in rows]
    known = {**table.sizes, **labelled_sizes(side for row in rows for side in (row.left, row.right))}
    there = [side for side in sides if all(known[a].length for a in side.axes if a in known)]
    sizes = require(
        known, {axis for side in there for axis in (*side.axes, *side.key.needs)}, (), table.place
    )
    return {key: side.shape(sizes) for side in there for key in side.keys(sizes)}
