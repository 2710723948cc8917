"""The arrays that a model has, from its configuration alone: names and shapes on the right of a table."""

from __future__ import annotations

from ckpttools.core.region import Shape
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.sizes import require
from ckpttools.mapping.table import Table, labelled_sizes


def right_shapes(table: Table) -> dict[str, Shape]:
    """Right keys and shapes of a model whose sizes the table knows.

    Raises:
        ShapeError: a size is not known.
    """
    flags = [name for name, flag in table.flags.items() if flag.value]
    rows = [row for row in table.rows if row.applies(flags)]
    known = {**table.sizes, **labelled_sizes(side for row in rows for side in (row.left, row.right))}
    rows = [row for row in rows if not isinstance(row.op, Fill)]
    there = [row.right for row in rows if all(known[a].length for a in row.right.axes if a in known)]
    sizes = require(
        known, {axis for side in there for axis in (*side.axes, *side.key.needs)}, (), table.place
    )
    return {key: side.shape(sizes) for side in there for key in side.keys(sizes)}
