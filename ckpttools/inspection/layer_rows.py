"""The layers of an array: stacked in it, or a single one in its path."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import Region, Shape
from ckpttools.maxtext.layers import LayerStack, layer_key_slice, split_layer_number
from ckpttools.maxtext.view import view_of

# A key after the first that consists only of a number.
_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")


@dataclass(frozen=True, slots=True)
class LayerRow:
    """An array's layers.

    Attributes:
        name: Name that is equal for arrays that differ only in their layers.
        axes: Axes on which layers are stacked; empty if the array belongs to one layer.
        numbers: Layer numbers, in C order over these axes.
    """

    name: str
    axes: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def without_expert_numbers(self) -> str:
        """The name in which numeric keys are replaced, so that a layer's experts have the same name."""
        return _NUMBER.sub("*", self.name)

    def parts(self, region: Region, shape: Shape) -> dict[int, Region]:
        """Return the region of each layer in a region, by layer number.

        Args:
            region: Region of the array.
            shape: Shape of the array.
        """
        result = {0: region}
        for axis in self.axes:
            result = {
                location * shape[axis] + k: box.replaced(axis, k, k + 1)
                for location, box in result.items()
                for k in range(region.start[axis], region.stop[axis])
            }
        return {self.numbers[location]: box for location, box in result.items()}


def layer_rows(tree: Tree) -> dict[Path, LayerRow]:
    """Return the layers of all arrays that have layers, including optimizer state. Reads no arrays."""
    view = view_of(tree)
    axis = view.scan_axis or 0
    try:
        stacks = {stack.key: stack for stack in view.stacks}
    except CheckpointError:
        # The layout contradicts itself, which `ckpt inspect tree` reports.
        stacks = {}
    result = {path: _row(path, array.shape, stacks, axis) for path, array in tree.arrays.items()}
    return {path: row for path, row in result.items() if row is not None}


def _row(path: Path, shape: Shape, stacks: Mapping[Path, LayerStack], axis: int) -> LayerRow | None:
    if stacks and (location := layer_key_slice(path, stacks)):
        stack = stacks[path[location]]
        axes = tuple(range(axis, axis + len(stack.shape)))
        if shape[axis : axis + len(axes)] != stack.shape:
            return None
        return LayerRow(
            keystr((*path[: location.start], stack.name, *path[location.stop :])), axes, stack.numbers
        )
    result = split_layer_number(keystr(path))
    if result is None:
        return None
    before, number = result
    after = keystr(path)[len(before) :].lstrip("0123456789")
    return LayerRow(f"{before}*{after}", (), (number,))
