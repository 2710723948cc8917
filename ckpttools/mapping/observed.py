"""What the names and shapes of arrays tell of the lengths of axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.core.region import Shape
from ckpttools.mapping.axes import Side
from ckpttools.mapping.sizes import Observation, Size, lengths_of


def labelled_sizes(sides: Iterable[Side]) -> dict[str, Size]:
    """The axes that keys write as words."""
    return {
        field.axes[0]: Size(len(field.labels), f"the labels of {side.key}")
        for side in sides
        for field in side.key.fields
        if field.labels
    }


def observed(
    arrays: Mapping[str, LazyArray], sides: Iterable[Side], sizes: Mapping[str, Size]
) -> list[Observation]:
    """The first array of each side: coordinate 0 of every axis."""
    result: list[Observation] = []
    known = lengths_of(sizes)
    for side in sides:
        axes = side.key.axes
        lengths = {**dict.fromkeys(axes, 1), **known}
        if side.key.needs <= lengths.keys():
            key = side.key.format(dict.fromkeys(axes, 0), lengths)
            if key in arrays:
                result.append(_observation(key, side, arrays[key].shape))
    return result


def _observation(key: str, side: Side, shape: Shape) -> Observation:
    """What an array tells of its axes: of one on which several parts lie, nothing."""
    at = side.join.at if side.join is not None and len(shape) == len(side.groups) else len(shape)
    groups = tuple(group for k, group in enumerate(side.groups) if k != at)
    return Observation(key, groups, (*shape[:at], *shape[at + 1 :]))
