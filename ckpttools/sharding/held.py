"""What one process holds of an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Elementwise, Relayout, Stack, Stored, Take, relayout
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, ceil_div
from ckpttools.sharding.shards import Shards


@dataclass(frozen=True)
class HeldParts:
    """An array and the parts of it that are expected here.

    Attributes:
        array: what they are parts of.
        shards: which.
        name: of the array, for messages.
    """

    array: LazyArray
    shards: Shards
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in memory of what is held."""
        return self.shards.size * self.array.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes that what is held takes where it is stored, before it is encoded."""
        return ceil_div(self.shards.size * self.array.stored_bits, 8)


def as_one_part(held: HeldParts) -> HeldParts | None:
    """The same with axes split where parts end; None where that is not one part, or costs more to read."""
    shards = held.shards
    if len(shards.held) < 2 or len(shards.boxes) != 1:
        return None
    groups: list[Shape] = []
    part: list[int] = []
    index: list[int] = []
    (box,) = shards.boxes
    for length, cell, start, stop in zip(shards.shape, shards.part, box.start, box.stop, strict=True):
        count = (stop - start) // cell
        if start % (stop - start):
            return None
        groups.append((length // cell, cell) if count > 1 else (length,))
        part += [count, cell] if count > 1 else [cell]
        index += [start // (stop - start), 0] if count > 1 else [start // cell]
    array = with_axes_split(held.array, groups)
    if array is None:
        return None
    return HeldParts(array, Shards(array.shape, tuple(part), (tuple(index),)), held.name)


def with_axes_split(array: LazyArray, groups: Sequence[Shape]) -> LazyArray | None:
    """The same elements in the same order with more axes.

    Args:
        array: any.
        groups: for each axis the lengths it becomes, outermost first; their product is the axis.

    Returns:
        None where elements would be moved once more than without it, or chunks of a grid would be cut.
    """
    shape = tuple(length for group in groups for length in group)
    match array:
        case Stored() | Constant():
            return replace(array, shape=shape)
        case Relayout():
            built = relayout(array, groups, range(len(shape)), (1,) * len(shape))
            return built if not isinstance(built, Relayout) or built.source is array.source else None
        case Elementwise(source=source):
            inner = with_axes_split(source, groups)
            return None if inner is None else replace(array, shape=shape, source=inner)
        case Take(axis=axis, source=source):
            kept = [*groups[:axis], (source.shape[axis],), *groups[axis:]]
            inner = with_axes_split(source, kept)
            before = sum(map(len, groups[:axis]))
            return None if inner is None else replace(array, shape=shape, source=inner, axis=before)
        case Stack(axis=axis, parts=parts) if len(groups[axis]) == 1:
            inner_groups = [*groups[:axis], *groups[axis + 1 :]]
            split = [with_axes_split(part, inner_groups) for part in parts]
            result = tuple(part for part in split if part is not None)
            before = sum(map(len, groups[:axis]))
            return (
                replace(array, shape=shape, parts=result, axis=before) if len(result) == len(parts) else None
            )
        case _:
            return None
