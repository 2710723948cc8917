"""The closed set of lazy array nodes: stored bytes, constants, and functions of other lazy arrays.

Every node reads a region from the relevant regions of its sources, through read blocks of limited size
(`ckpttools.array.read_blocks`), so a node's memory use does not grow with its size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpttools.array import read_blocks
from ckpttools.array.dequantized import Dequantized as Dequantized
from ckpttools.array.lazy import ByteSource, Composite, Derived, LazyArray, ReadCost, Regionwise, Unstored
from ckpttools.array.read_blocks import subview
from ckpttools.array.relayout import Relayout as Relayout
from ckpttools.array.relayout import relayout as relayout
from ckpttools.array.relayout import swap_last_axes as swap_last_axes
from ckpttools.array.relayout import transpose_axes as transpose_axes
from ckpttools.array.stored import Chunked as Chunked
from ckpttools.array.stored import Constant as Constant
from ckpttools.array.stored import Decoded as Decoded
from ckpttools.array.stored import Encoded as Encoded
from ckpttools.array.stored import Stored as Stored
from ckpttools.array.stored import number_array as number_array
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region, Shape, ceil_div, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.relayout import Permutation
    from ckpttools.array.scratch import Scratch


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False, repr=False)
class Stack(Composite):
    """Arrays of one shape and dtype stacked along a new axis.

    Attributes:
        axis: Position of the new axis in `shape`.
    """

    axis: int

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        inner = region.without(self.axis)
        views = np.moveaxis(out, self.axis, 0)
        for k, part in enumerate(self._parts(region)):
            part.read_into(inner, views[k, ...], scratch)

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        inner = (axis + (axis >= self.axis) for axis in self.parts[0].stacked_axes)
        return tuple(sorted((self.axis, *inner)))

    def _parts(self, region: Region) -> tuple[LazyArray, ...]:
        return self.parts[region.start[self.axis] : region.stop[self.axis]]

    def read_cost(self, region: Region) -> ReadCost:
        inner, parts = region.without(self.axis), self._parts(region)
        if self._is_uniform and parts:
            return parts[0].read_cost(inner) * len(parts)
        return sum((part.read_cost(inner) for part in parts), ReadCost())

    @cached_property
    def _is_uniform(self) -> bool:
        """Return whether a region costs the same to read in every part, such as in the experts of a layer."""
        return len({part.read_kind for part in self.parts}) == 1

    @cached_property
    def read_kind(self) -> Hashable:
        if not self._is_uniform:
            return id(self)
        return ("stack", self.axis, len(self.parts), self.parts[0].read_kind)

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self._parts(region)[0].first_byte(region.without(self.axis))


def stack(parts: Sequence[LazyArray], axis: int) -> Stack:
    """Stack `parts` along a new axis before position `axis`.

    Raises:
        ShapeError: The parts differ in shape or dtype, or the list is empty.
    """
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(kinds) != 1:
        types_text = ", ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds))
        raise ShapeError(
            "only arrays of the same shape and dtype can be stacked",
            got=types_text or "none",
            hint=f"if only dtypes differ, cast them with {option('dtype')}",
        )
    ((inner, dtype),) = kinds
    return Stack((*inner[:axis], len(parts), *inner[axis:]), dtype, tuple(parts), axis)


@dataclass(frozen=True, eq=False, repr=False)
class Take(Regionwise):
    """One index along an axis of another array, with that axis removed; the inverse of `Stack`."""

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


def take(source: LazyArray, axis: int, index: int) -> Take:
    """Take one index along `axis` and remove the axis.

    Raises:
        ShapeError: The index is out of bounds.
    """
    if not 0 <= index < source.shape[axis]:
        raise ShapeError("no such coordinate", got=index, expected=f"below {source.shape[axis]}")
    shape = source.shape[:axis] + source.shape[axis + 1 :]
    return Take(shape, source.dtype, source, axis, index)


class ElementOp(Protocol):
    """A function that maps single elements from one dtype to another. Its `repr` identifies it completely."""

    def result(self, dtype: DType) -> DType:
        """Return the dtype of the results for elements of dtype `dtype`."""

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> Mapping[str, int] | None:
        """Compute target[...] = f(source).

        Both arrays have the same shape and hold carriers: of `dtype`, and of `result(dtype)`.

        Returns:
            The number of occurrences of each event, for the receipt.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Elementwise(Regionwise):
    """Applies a function to every element of another array."""

    op: ElementOp

    def permuted(self, permutation: Permutation) -> LazyArray | None:
        # If the source is a low-rank product, permute its factors and keep the function on top.
        source = self.source.permuted(permutation) if self.source.has_factors else None
        return None if source is None else replace(self, shape=source.shape, source=source)

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        return self.source.stacked_axes

    def _source_region(self, region: Region) -> Region:
        return region

    @property
    def is_computed(self) -> bool:
        return True

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        dtype = self.source.dtype
        for block in split_evenly(region, read_blocks.elements(dtype.itemsize)):
            with scratch.take(block.shape, dtype.carrier) as buffer:
                self.source.read_into(block, buffer, scratch)
                counts = self.op.apply(buffer, subview(out, block.relative_to(region)), dtype)
                if counts:
                    scratch.tally(counts)

    @property
    def scratch_bytes(self) -> int:
        return read_blocks.scratch(self.source.nbytes) + self.source.scratch_bytes

    @property
    def read_kind(self) -> Hashable:
        return self.source.read_kind


def elementwise(source: LazyArray, op: ElementOp) -> LazyArray:
    """Apply `op` to every element of `source`.

    The op is placed below nodes that only move elements, so that it processes elements in stored order.
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
"""Fields of derived nodes that hold source arrays; all other fields are parameters."""


def source_arrays(array: LazyArray) -> tuple[LazyArray, ...]:
    """Return the direct sources of an array; empty for a stored array."""
    return _source_getter(type(array))(array)


@cache
def _source_getter(kind: type[LazyArray]) -> Callable[[Any], tuple[LazyArray, ...]]:
    """Return the function that gets a node's sources; cached per class, because whole plans are traversed."""
    if issubclass(kind, Derived):
        return lambda array: (array.source,)
    if issubclass(kind, Dequantized):
        return lambda array: (array.codes, *array.scales)
    if issubclass(kind, Composite):
        return lambda array: array.parts
    return lambda array: ()


def rebuild_arrays(
    arrays: Mapping[Key, LazyArray], renew: Callable[[LazyArray], LazyArray]
) -> dict[Key, LazyArray]:
    """Rebuild arrays, replacing each array without sources by the result of `renew`."""
    result: dict[int, LazyArray] = {}

    def of(array: LazyArray) -> LazyArray:
        if id(array) not in result:
            result[id(array)] = again(array)
        return result[id(array)]

    def again(array: LazyArray) -> LazyArray:
        if isinstance(array, Derived):
            return replace(array, source=of(array.source))
        if isinstance(array, Composite):
            return replace(array, parts=tuple(map(of, array.parts)))
        if isinstance(array, Dequantized):
            return replace(array, codes=of(array.codes), scales=tuple(map(of, array.scales)))
        return renew(array)

    return {key: of(array) for key, array in arrays.items()}


def distinct_arrays(arrays: Iterable[LazyArray]) -> Iterator[LazyArray]:
    """Yield the arrays and all their sources, each once even if shared."""
    seen: set[int] = set()
    rest = [*arrays][::-1]
    while rest:
        array = rest.pop()
        if id(array) not in seen:
            seen.add(id(array))
            if parts := source_arrays(array):
                rest.extend(reversed(parts))
            yield array


class ArrayHolder(Protocol):
    """Holds the elements of one array in memory, in one or several pieces."""

    @property
    def version(self) -> str:
        """Return a version that two holders share only if they hold the same elements."""

    @property
    def scratch_bytes(self) -> int:
        """Return the scratch memory for reading any region, in bytes, without the destination."""

    def pieces(self, region: Region) -> int:
        """Return the number of pieces that a region overlaps."""

    def read_into(self, region: Region, out: np.ndarray) -> None:
        """Read a region; see `LazyArray.read_into`."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class InMemoryArray(LazyArray):
    """An array held in memory.

    Attributes:
        holder: Holds the elements.
    """

    holder: ArrayHolder

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.holder.read_into(region, out)

    @property
    def scratch_bytes(self) -> int:
        return self.holder.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost(region.size * self.dtype.itemsize, self.holder.pieces(region))

    def first_byte(self, region: Region) -> tuple[str, int]:
        return "", 0

    def sources(self) -> Iterator[ByteSource]:
        return iter(())


@dataclass(frozen=True, eq=False, repr=False)
class Repeated(Regionwise):
    """Another array with each element along an axis repeated, the last one possibly fewer times.

    Attributes:
        axis: The repeated axis.
        times: Number of repetitions.
    """

    axis: int
    times: int

    def _source_region(self, region: Region) -> Region:
        start, stop = region.start[self.axis], region.stop[self.axis]
        return region.replaced(self.axis, start // self.times, ceil_div(stop, self.times))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        for block in split_evenly(region, read_blocks.elements(self.dtype.itemsize)):
            inner = self._source_region(block)
            with scratch.take(inner.shape, self.dtype.carrier) as buffer:
                self.source.read_into(inner, buffer, scratch)
                index = np.arange(block.start[self.axis], block.stop[self.axis]) // self.times
                first = inner.start[self.axis]
                buffer.take(
                    index - first, self.axis, out=subview(out, block.relative_to(region)), mode="clip"
                )

    @property
    def scratch_bytes(self) -> int:
        return read_blocks.scratch(self.source.nbytes) + self.source.scratch_bytes

    @property
    def read_kind(self) -> Hashable:
        return ("repeated", self.shape, self.axis, self.times, self.source.read_kind)


def repeat_elements(source: LazyArray, axis: int, times: int, length: int) -> LazyArray:
    """Repeat each element along an axis `times` times, cut to `length`; return `source` if nothing changes.

    Raises:
        ShapeError: The length of the axis does not match `times` and `length`.
    """
    if ceil_div(length, times) != source.shape[axis]:
        raise ShapeError(
            "an axis cannot be repeated to this length",
            got=f"{source.shape[axis]}, each {times} times",
            expected=length,
        )
    if times == 1:
        return source
    shape = (*source.shape[:axis], length, *source.shape[axis + 1 :])
    return Repeated(shape, source.dtype, source, axis, times)


@dataclass(frozen=True, eq=False, repr=False)
class Window(Regionwise):
    """A region of another array that begins at `start`.

    Attributes:
        start: The first index that is kept along each axis.
    """

    start: Shape

    def _source_region(self, region: Region) -> Region:
        return region.shifted(self.start)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.source.read_into(self._source_region(region), out, scratch)


def window(source: LazyArray, start: Shape, shape: Shape) -> LazyArray:
    """Return the region of `source` of shape `shape` at `start`, or `source` if that is the full array.

    Raises:
        ShapeError: The region exceeds the array.
    """
    if start == (0,) * len(start) and shape == source.shape:
        return source
    inside = all(a >= 0 and a + n <= m for a, n, m in zip(start, shape, source.shape, strict=True))
    if not inside:
        raise ShapeError("the region exceeds the array", got=(start, shape), expected=source.shape)
    return Window(shape, source.dtype, source, start)


@dataclass(frozen=True, eq=False, repr=False)
class Padded(Regionwise):
    """Another array padded with zeros at the end of any of its axes."""

    def _source_region(self, region: Region) -> Region | None:
        return region.intersect(Region.whole(self.source.shape))

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        inner = self._source_region(region)
        if inner != region:
            out[...] = 0
        if inner is not None:
            self.source.read_into(inner, subview(out, inner.relative_to(region)), scratch)


def pad_array(source: LazyArray, shape: Shape) -> LazyArray:
    """Pad `source` with zeros at the end to `shape`; return `source` if it already has that shape.

    Raises:
        ShapeError: `shape` is smaller than the source or has another rank.
    """
    if shape == source.shape:
        return source
    if len(shape) != len(source.shape) or any(n < m for n, m in zip(shape, source.shape, strict=True)):
        raise ShapeError("padding cannot make an array smaller", got=shape, expected=source.shape)
    return Padded(shape, source.dtype, source)


@dataclass(frozen=True, eq=False, repr=False)
class Concat(Composite):
    """Arrays joined along an axis, like numpy's `concatenate`; their dtypes and all other axes are equal.

    Attributes:
        axis: The joined axis.
    """

    axis: int

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Return the end of each part along the joined axis."""
        return tuple(accumulate(part.shape[self.axis] for part in self.parts))

    def _overlapping_parts(self, region: Region) -> Iterator[tuple[LazyArray, Region, Region]]:
        """Yield the parts that overlap a region, each with the region in the part and in the result."""
        start, stop = region.start[self.axis], region.stop[self.axis]
        for number in range(bisect_right(self._ends, start), len(self.parts)):
            first = self._ends[number] - self.parts[number].shape[self.axis]
            if first >= stop:
                return
            a, b = max(first, start), min(self._ends[number], stop)
            if b > a:
                inside = region.replaced(self.axis, a, b)
                origin = [-first if axis == self.axis else 0 for axis in range(region.rank)]
                yield self.parts[number], inside.shifted(origin), inside.relative_to(region)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, inside, where in self._overlapping_parts(region):
            part.read_into(inside, subview(out, where), scratch)

    def read_cost(self, region: Region) -> ReadCost:
        return sum(
            (part.read_cost(inside) for part, inside, _ in self._overlapping_parts(region)), ReadCost()
        )

    @cached_property
    def read_kind(self) -> Hashable:
        return ("concat", self.axis, tuple((part.shape, part.read_kind) for part in self.parts))

    def first_byte(self, region: Region) -> tuple[str, int]:
        overlap = next(self._overlapping_parts(region), None)
        return ("", 0) if overlap is None else overlap[0].first_byte(overlap[1])


def concat(parts: Sequence[LazyArray], axis: int) -> LazyArray:
    """Concatenate `parts` along `axis`; return a single part unchanged.

    Raises:
        ShapeError: The parts differ in dtype or in another axis, or the list is empty.
    """
    kinds = {(part.dtype, part.shape[:axis], part.shape[axis + 1 :]) for part in parts}
    if len(kinds) != 1:
        types_text = ", ".join(sorted(f"{part.dtype}{list(part.shape)}" for part in parts))
        raise ShapeError(
            "only arrays that differ in a single axis can be concatenated", got=types_text or "none"
        )
    if len(parts) == 1:
        return parts[0]
    ((dtype, before, after),) = kinds
    length = sum(part.shape[axis] for part in parts)
    return Concat((*before, length, *after), dtype, tuple(parts), axis)


_F32 = DTYPES["float32"]
# Elements computed at a time; their intermediate values fit in cache.
_BLOCK = 1 << 15
# The standard deviation and the mean of the sum of four random 16-bit integers.
_DEVIATION, _MEAN = 37837.22, 131070


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class SeededNoise(Unstored):
    """Float32 noise: bell-shaped around zero, with no value beyond 3.46 standard deviations.

    Each element is the sum of the four 16-bit parts of a hashed 64-bit counter (splitmix64), so regions are
    reproducible across processes and numpy versions.

    Attributes:
        key: Start value of the 64-bit counter.
        scale: The standard deviation.
    """

    key: int
    scale: float

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for piece in split_evenly(region, _BLOCK):
            subview(out, piece.relative_to(region))[...] = self._noise(piece).view(_F32.carrier)

    def _noise(self, region: Region) -> np.ndarray:
        import numpy as np

        numbers = np.full(region.shape, self.key, np.uint64)
        with np.errstate(over="ignore"):
            for axis, (start, stop) in enumerate(zip(region.start, region.stop, strict=True)):
                step = prod(self.shape[axis + 1 :])
                counters = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
                numbers += counters.reshape(-1, *[1] * (region.rank - axis - 1))
            numbers *= np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                numbers ^= numbers >> np.uint64(shift)
                numbers *= np.uint64(factor)
            numbers ^= numbers >> np.uint64(31)
        parts = numbers.reshape(-1).view(np.uint16).reshape(-1, 4)
        sums = parts.sum(axis=1, dtype=np.int32) - np.int32(_MEAN)
        result: np.ndarray = sums.astype(np.float32) * np.float32(self.scale / _DEVIATION)
        return result.reshape(region.shape)

    @property
    def scratch_bytes(self) -> int:
        # The counters, the shifted counters and the sums are temporaries: 20 bytes per element of a block.
        return read_blocks.page(0)

    @property
    def is_computed(self) -> bool:
        return True

    @property
    def read_kind(self) -> Hashable:
        return ("seeded", self.shape)


def seeded_noise(shape: Shape, seed: int, name: str, scale: float) -> SeededNoise:
    """Return noise that depends on the seed and the array's name."""
    key = int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    return SeededNoise(shape, _F32, key, scale)
