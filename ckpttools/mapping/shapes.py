"""The arrays that a model has, from its configuration alone: names and shapes on the right of a table."""

from __future__ import annotations

from math import prod

from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Shape
from ckpttools.mapping.fill import Fill
from ckpttools.mapping.observed import labelled_sizes
from ckpttools.mapping.sizes import require
from ckpttools.mapping.table import Table

# The largest models have 100,000.
_MOST_NAMES = 10_000_000


def right_shapes(table: Table) -> dict[str, Shape]:
    """Right keys and shapes of a model whose sizes the table knows.

    Raises:
        ShapeError: a size is not known, or of layers or experts there are too many to be meant.
    """
    rows = [*filter(table.has, table.rows)]
    known = {**table.sizes, **labelled_sizes(side for row in rows for side in (row.left, row.right))}
    rows = [row for row in rows if not isinstance(row.op, Fill)]
    there = [row.right for row in rows if all(known[a].length for a in row.right.axes if a in known)]
    sizes = require(
        known, {axis for side in there for axis in (*side.axes, *side.key.needs)}, (), table.location
    )
    names = sum(prod(sizes[axis] for axis in side.key.axes) for side in there)
    if names > _MOST_NAMES:
        raise ShapeError(
            "these sizes make more arrays than any model has",
            location=table.location,
            got=f"{names:,} arrays",
            expected=f"{_MOST_NAMES:,} or fewer: as many layers and experts as the model has",
        )
    return {key: side.shape(sizes) for side in there for key in side.keys(sizes)}
