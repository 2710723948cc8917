"""Arrays with axes split in two, told in what they are made of, so that reading them takes nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Elementwise, Relayout, Stack, Stored, Take, relayout
from ckpttools.core.region import Shape


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
            made = relayout(array, groups, range(len(shape)), (1,) * len(shape))
            return made if not isinstance(made, Relayout) or made.source is array.source else None
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
            found = tuple(part for part in split if part is not None)
            before = sum(map(len, groups[:axis]))
            return replace(array, shape=shape, parts=found, axis=before) if len(found) == len(parts) else None
        case _:
            return None
