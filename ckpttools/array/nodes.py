"""The closed set of lazy arrays: stored bytes, constants, and what can be said about other lazy arrays.

Every node reads any region of itself from the regions of its sources that matter, through read blocks of
limited size (`ckpttools.array.read_blocks`), so no node ever needs memory in proportion to its size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpttools.array import read_blocks
from ckpttools.array.blockwise import BlockCodes as BlockCodes
from ckpttools.array.blockwise import BlockScales as BlockScales
from ckpttools.array.blockwise import block_codes as block_codes
from ckpttools.array.concat import Concat as Concat
from ckpttools.array.concat import concat as concat
from ckpttools.array.dequantized import Dequantized as Dequantized
from ckpttools.array.held import Held as Held
from ckpttools.array.held import Holder as Holder
from ckpttools.array.lazy import Derived, LazyArray, OfParts, ReadCost, Regionwise
from ckpttools.array.lowrank import LowRank as LowRank
from ckpttools.array.lowrank import Plus as Plus
from ckpttools.array.lowrank import Renormed as Renormed
from ckpttools.array.lowrank import low_rank as low_rank
from ckpttools.array.lowrank import plus as plus
from ckpttools.array.lowrank import renormed as renormed
from ckpttools.array.mean import Mean as Mean
from ckpttools.array.mean import mean as mean
from ckpttools.array.relayout import Relayout as Relayout
from ckpttools.array.relayout import relayout as relayout
from ckpttools.array.relayout import swapped as swapped
from ckpttools.array.relayout import transposed as transposed
from ckpttools.array.repeated import Repeated as Repeated
from ckpttools.array.repeated import repeated as repeated
from ckpttools.array.seeded import Seeded as Seeded
from ckpttools.array.seeded import seeded as seeded
from ckpttools.array.stored import Chunked as Chunked
from ckpttools.array.stored import Constant as Constant
from ckpttools.array.stored import Decoded as Decoded
from ckpttools.array.stored import Encoded as Encoded
from ckpttools.array.stored import Stored as Stored
from ckpttools.array.stored import number_array as number_array
from ckpttools.array.views import subview
from ckpttools.array.window import Padded as Padded
from ckpttools.array.window import Window as Window
from ckpttools.array.window import padded as padded
from ckpttools.array.window import window as window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, split_to
from ckpttools.core.wording import option

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False, repr=False)
class Stack(OfParts):
    """Arrays of one shape and dtype side by side along a new axis.

    Attributes:
        axis: position of the new axis in `shape`.
    """

    axis: int

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        inner = region.without(self.axis)
        views = np.moveaxis(out, self.axis, 0)
        for k, part in enumerate(self._parts(region)):
            part.read_into(inner, views[k, ...], scratch)

    def _parts(self, region: Region) -> tuple[LazyArray, ...]:
        return self.parts[region.start[self.axis] : region.stop[self.axis]]

    def read_cost(self, region: Region) -> ReadCost:
        inner, parts = region.without(self.axis), self._parts(region)
        if self._is_uniform and parts:
            return parts[0].read_cost(inner) * len(parts)
        return sum((part.read_cost(inner) for part in parts), ReadCost())

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether reading a region costs the same of each part, as of the experts of a layer."""
        return len({part.read_kind for part in self.parts}) == 1

    @cached_property
    def read_kind(self) -> Hashable:
        if not self._is_uniform:
            return id(self)
        return ("stack", self.axis, len(self.parts), self.parts[0].read_kind)

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self._parts(region)[0].first_byte(region.without(self.axis))


def stack(parts: Sequence[LazyArray], axis: int) -> Stack:
    """`parts` side by side along a new axis before position `axis`.

    Raises:
        ShapeError: the parts differ in shape or dtype, or there are none.
    """
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(kinds) != 1:
        listed = ", ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds))
        raise ShapeError(
            "only arrays of one shape and dtype can be stacked",
            got=listed or "none",
            hint=f"if only dtypes differ, cast them with {option('dtype')}",
        )
    ((inner, dtype),) = kinds
    return Stack((*inner[:axis], len(parts), *inner[axis:]), dtype, tuple(parts), axis)


@dataclass(frozen=True, eq=False, repr=False)
class Take(Regionwise):
    """One coordinate of an axis of another array; the axis is gone. The inverse of `Stack`."""

    axis: int
    index: int

    def _source_region(self, region: Region) -> Region:
        return region.inserted(self.axis, self.index, self.index + 1)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        self.source.read_into(self._source_region(region), np.expand_dims(out, self.axis), scratch)

    @property
    def read_kind(self) -> Hashable:
        return ("take", self.axis, self.index, self.source.read_kind)


def stacked_axes(array: LazyArray) -> tuple[int, ...]:
    """The axes of which each coordinate is stored apart, such as those of stacked layers and experts."""
    if isinstance(array, Elementwise):
        return stacked_axes(array.source)
    if isinstance(array, Chunked):
        return tuple(axis for axis, length in enumerate(array.chunk) if length == 1 < array.shape[axis])
    if not isinstance(array, Stack):
        return ()
    inner = (axis + (axis >= array.axis) for axis in stacked_axes(array.parts[0]))
    return tuple(sorted((array.axis, *inner)))


def take(source: LazyArray, axis: int, index: int) -> Take:
    """`source` at one coordinate of `axis`.

    Raises:
        ShapeError: there is no such coordinate.
    """
    if not 0 <= index < source.shape[axis]:
        raise ShapeError("no such coordinate", got=index, wanted=f"below {source.shape[axis]}")
    shape = source.shape[:axis] + source.shape[axis + 1 :]
    return Take(shape, source.dtype, source, axis, index)


class ElementOp(Protocol):
    """A function of single elements, from one dtype to another. Its `repr` says all that it does."""

    def result(self, dtype: DType) -> DType:
        """The dtype that elements of `dtype` become."""

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> Mapping[str, int] | None:
        """target[...] = f(source): equal shapes, carriers of `dtype` and of `result(dtype)`.

        Returns:
            For how many elements something happened that the receipt should tell, by what it is.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Elementwise(Regionwise):
    """Another array with a function applied to every element."""

    op: ElementOp

    def _source_region(self, region: Region) -> Region:
        return region

    @property
    def computed(self) -> bool:
        return True

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        dtype = self.source.dtype
        for block in split_to(region, read_blocks.elements(dtype.itemsize)):
            with scratch.take(block.shape, dtype.carrier) as buffer:
                self.source.read_into(block, buffer, scratch)
                told = self.op.apply(buffer, subview(out, block.relative_to(region)), dtype)
                if told:
                    scratch.tally(told)

    @property
    def scratch_bytes(self) -> int:
        return read_blocks.scratch(self.source.nbytes) + self.source.scratch_bytes

    @property
    def read_kind(self) -> Hashable:
        return self.source.read_kind


def elementwise(source: LazyArray, op: ElementOp) -> LazyArray:
    """`source` with `op` applied to every element.

    The op goes below whatever only moves elements, so that it sees the blocks that were read, in the order
    in which they are stored.
    """
    if isinstance(source, Stack):
        return stack([elementwise(part, op) for part in source.parts], source.axis)
    if isinstance(source, Take):
        return take(elementwise(source.source, op), source.axis, source.index)
    if isinstance(source, Relayout):
        return relayout(elementwise(source.source, op), source.split, source.order, source.merge)
    if isinstance(source, Concat):
        return concat([elementwise(part, op) for part in source.parts], source.axis)
    if isinstance(source, Window):
        return window(elementwise(source.source, op), source.start, source.shape)
    return Elementwise(source.shape, op.result(source.dtype), source, op)


INNER = ("source", "parts", "codes", "scales")
"""Fields of nodes that are made of others; the rest of their fields say how."""


def inner(array: LazyArray) -> tuple[LazyArray, ...]:
    """The arrays that an array is made of; none for one that is stored."""
    return _inner_of(type(array))(array)


@cache
def _inner_of(kind: type[LazyArray]) -> Callable[[Any], tuple[LazyArray, ...]]:
    """The same for arrays of a class; asked once for each, as whole plans are looked through."""
    if issubclass(kind, Derived):
        return lambda array: (array.source,)
    if issubclass(kind, Dequantized):
        return lambda array: (array.codes, *array.scales)
    if issubclass(kind, OfParts):
        return lambda array: array.parts
    return lambda array: ()


def renewed(arrays: Mapping[Key, LazyArray], renew: Callable[[LazyArray], LazyArray]) -> dict[Key, LazyArray]:
    """These arrays made of others: `renew` is asked once for each that is made of none."""
    made: dict[int, LazyArray] = {}

    def of(array: LazyArray) -> LazyArray:
        if id(array) not in made:
            made[id(array)] = again(array)
        return made[id(array)]

    def again(array: LazyArray) -> LazyArray:
        if isinstance(array, Derived):
            return replace(array, source=of(array.source))
        if isinstance(array, OfParts):
            return replace(array, parts=tuple(map(of, array.parts)))
        if isinstance(array, Dequantized):
            return replace(array, codes=of(array.codes), scales=tuple(map(of, array.scales)))
        return renew(array)

    return {key: of(array) for key, array in arrays.items()}


def distinct(arrays: Iterable[LazyArray]) -> Iterator[LazyArray]:
    """These arrays and all that they are made of, each once: many may be parts of the same one."""
    seen: set[int] = set()
    rest = [*arrays][::-1]
    while rest:
        array = rest.pop()
        if id(array) not in seen:
            seen.add(id(array))
            if parts := inner(array):
                rest.extend(reversed(parts))
            yield array
