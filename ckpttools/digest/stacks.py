"""Arrays that are parts of one stored array, such as layers of a stack.

They are read together and then split.

If layers were read one by one, a chunk that contains all layers would be decoded once per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Take, stack
from ckpttools.array.read_blocks import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region

if TYPE_CHECKING:
    import numpy as np

# Cost of starting a read, in bytes of a long read.
_READ = 4 << 10
# Parts are scattered in the stacked array, so they must be copied before use.
_MAX_SPLIT_OVERHEAD = 1.25


@dataclass(frozen=True, slots=True)
class StackedPart:
    """An array inside another array.

    Attributes:
        name: Name of the array.
        fixed: Coordinate of this array on each fixed axis of the other array.
    """

    name: str
    fixed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class WholeArray:
    """An array and its parts.

    Attributes:
        array: The stored array.
        parts: The parts; a single one without `fixed` axes if the array is not divided.
    """

    array: LazyArray
    parts: tuple[StackedPart, ...]

    @property
    def name(self) -> str:
        """The name of the array, or of the first of its parts."""
        return self.parts[0].name

    @property
    def is_complete(self) -> bool:
        """Whether the parts cover the complete array."""
        return len(self.parts) == prod(self.array.shape[axis] for axis in self.parts[0].fixed)

    def split(self, region: Region, values: np.ndarray) -> Iterator[tuple[str, Region, np.ndarray]]:
        """Yield the parts of a region: name, region within the part, and a view of the elements.

        Args:
            region: Region of `array`.
            values: Elements of the region.
        """
        for part in self.parts:
            if all(region.start[axis] <= i < region.stop[axis] for axis, i in part.fixed.items()):
                part_region, inner = region, region
                for axis in sorted(part.fixed, reverse=True):
                    part_region = part_region.replaced(axis, part.fixed[axis], part.fixed[axis] + 1)
                    inner = inner.without(axis)
                view = subview(values, part_region.relative_to(region))
                yield part.name, inner, view.reshape(inner.shape)


def complete_arrays(arrays: Mapping[str, LazyArray]) -> list[WholeArray]:
    """Return the arrays that contain `arrays` as parts, in the order of their first parts."""
    result: dict[tuple[int, frozenset[int]], tuple[LazyArray, list[StackedPart]]] = {}
    for name, array in arrays.items():
        root, fixed = _find_root(array)
        result.setdefault((id(root), frozenset(fixed)), (root, []))[1].append(StackedPart(name, fixed))
    built: list[WholeArray] = []
    for root, parts in result.values():
        distinct = len({_location(part.fixed) for part in parts}) == len(parts)
        built += (
            [WholeArray(root, tuple(parts))] if distinct else [single_array(p.name, arrays) for p in parts]
        )
    return built


def cheapest_reads(arrays: Mapping[str, LazyArray]) -> list[WholeArray]:
    """Return the cheapest reads that cover `arrays`: stacked arrays, or single parts."""
    result: list[WholeArray] = []
    for array in complete_arrays(arrays):
        separate_cost = sum(_cost(arrays[part.name]) for part in array.parts)
        if _cost(array.array) * _MAX_SPLIT_OVERHEAD < separate_cost:
            result.append(array)
        else:
            result += [single_array(part.name, arrays) for part in array.parts]
    return result


def single_array(name: str, arrays: Mapping[str, LazyArray]) -> WholeArray:
    """Return an array that is read on its own."""
    return WholeArray(arrays[name], (StackedPart(name, {}),))


def _cost(array: LazyArray) -> int:
    """Return the cost of reading the complete array, in bytes."""
    cost = array.read_cost(Region.whole(array.shape))
    return cost.nbytes + cost.reads * _READ


def _location(fixed: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(fixed.items()))


def _find_root(array: LazyArray) -> tuple[LazyArray, dict[int, int]]:
    """Return the array that contains this one, and the coordinates of the slice."""
    fixed: dict[int, int] = {}
    while isinstance(array, Take):
        fixed = {axis + (axis >= array.axis): index for axis, index in fixed.items()}
        fixed[array.axis] = array.index
        array = array.source
    return array, fixed


def assemble(complete: WholeArray, arrays: Mapping[str, LazyArray]) -> LazyArray:
    """Assemble other arrays, with the names of the parts of a complete stack, into the same stack.

    Raises:
        ShapeError: The arrays differ in shape or dtype.
    """
    by_location = {_location(part.fixed): arrays[part.name] for part in complete.parts}
    axes = sorted(complete.parts[0].fixed)

    def along(axes: list[int], indices: dict[int, int]) -> LazyArray:
        if not axes:
            return by_location[_location(indices)]
        *outer, last = axes
        length = complete.array.shape[last]
        # The last axis is inserted last, when all other axes are in their final positions.
        return stack([along(outer, {**indices, last: i}) for i in range(length)], last)

    return along(axes, {})
