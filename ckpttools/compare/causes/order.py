"""The entries of an axis, or complete heads, are in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout, stack, take
from ckpttools.compare.causes.base import REMAP, Case, Cause, Claim, Hypothesis, detector, head_dims
from ckpttools.core.region import Region, Shape

# Axes with more entries are not searched for another order.
_MAX_ENTRIES = 512
# Number of elements that distinguish entries.
_SAMPLE = 4096
_MAX_SHOWN = 8


@detector("order", Claim.FITTED_ORDER)
def entry_order(case: Case) -> Iterator[Hypothesis]:
    """Detect entries of an axis, or complete heads, in another order."""
    a, b = case.alike
    for axis, length in enumerate(a.shape):
        for width in (1, *head_dims(case, axis)):
            order = _order(a, b, axis, width) if 1 < length // width <= _MAX_ENTRIES else None
            if order is not None:
                subject = f"entries of axis {axis}" if width == 1 else f"heads of {width} on axis {axis}"
                order_text = ", ".join(map(str, order[:_MAX_SHOWN])) + (
                    ", …" if len(order) > _MAX_SHOWN else ""
                )
                text = f"the {subject} are in another order in B: A's {order_text}"
                yield Hypothesis(Cause("order", text, REMAP), ((_reorder(a, axis, width, order), b),))


def _order(a: LazyArray, b: LazyArray, axis: int, width: int) -> tuple[int, ...] | None:
    """Return A's index of each entry of B; None if the entries are ambiguous or all in place."""
    room = max(1, _SAMPLE // a.shape[axis])
    stop = list(a.shape)
    for k in reversed(range(len(stop))):
        if k != axis:
            stop[k] = min(stop[k], room)
            room = max(1, room // stop[k])
    region = Region((0,) * len(stop), tuple(stop))
    sides = [np.moveaxis(item.read(region).view(item.dtype.carrier), axis, 0) for item in (a, b)]
    count = a.shape[axis] // width
    entries = [[part.tobytes() for part in np.split(np.ascontiguousarray(side), count)] for side in sides]
    locations = {entry: number for number, entry in enumerate(entries[0])}
    if len(locations) < count or set(locations) != set(entries[1]):
        return None
    order = tuple(locations[entry] for entry in entries[1])
    return None if order == tuple(range(count)) else order


def _reorder(array: LazyArray, axis: int, width: int, order: Sequence[int]) -> LazyArray:
    """Reorder groups of entries of an axis."""
    split: list[Shape] = [(n,) for n in array.shape]
    split[axis] = (len(order), width)
    loose = relayout(array, split, range(len(array.shape) + 1), [1] * (len(array.shape) + 1))
    moved = stack([take(loose, axis, number) for number in order], axis)
    merge = [2 if k == axis else 1 for k in range(len(array.shape))]
    return relayout(moved, [(n,) for n in moved.shape], range(len(moved.shape)), merge)
