"""What reading arrays takes where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ckpttools.array.lazy import LazyArray
from ckpttools.stores.base import Costs, File


def reading_costs(arrays: Iterable[LazyArray]) -> Costs:
    """What the stores take together in which the arrays lie, each array in one."""
    files = (file for array in arrays for file in islice(array.sources(), 1) if isinstance(file, File))
    found = {(type(file), file.costs) for file in files}
    requests = max((costs.requests or 0 for _, costs in found), default=0)
    return Costs(requests or None, sum(costs.memory for _, costs in found))
