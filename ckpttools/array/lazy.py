"""Lazy arrays: a shape, a dtype and a source of bytes, which are read on demand.

Elements are handled as opaque unsigned integers of their size (`DType.carrier`), so bits never change by
accident. Only value ops interpret them as numbers.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Region, Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike
    from typing_extensions import Buffer

    from ckpttools.array.relayout import Permutation
    from ckpttools.array.scratch import Scratch

# Prefix of counters that are merged by maximum instead of sum. It is here because this module needs no numpy.
LARGEST = "largest_"


class ByteSource(Protocol):
    """A source of bytes that supports positional reads from several threads."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> str:
        """Return an identifier that changes when the content changes."""

    def read_into(self, offset: int, out: Buffer) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of a read: the bytes fetched and the number of separate reads. Costs can be added."""

    nbytes: int = 0
    reads: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.nbytes + other.nbytes, self.reads + other.reads)

    def __mul__(self, count: int) -> ReadCost:
        return ReadCost(self.nbytes * count, self.reads * count)


@dataclass(frozen=True, eq=False, slots=True)
class LazyArray(ABC):
    """An array of `shape` and `dtype` whose regions can be read separately, each at its own cost.

    The set of implementations is closed; see `ckpttools.array.nodes`.
    """

    shape: Shape
    dtype: DType

    @abstractmethod
    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read the elements of `region` into `out`.

        Args:
            region: A region within `shape`.
            out: Destination of the region's shape and dtype `dtype.carrier`, with any strides.
            scratch: Has `scratch_bytes` bytes free.

        Raises:
            FormatError, StorageError: The bytes do not exist or cannot be read.
        """

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Return the maximum scratch memory for reading any region, in bytes."""

    @abstractmethod
    def read_cost(self, region: Region) -> ReadCost:
        """Return the number of bytes and reads that `read_into` needs for this region."""

    @property
    def read_kind(self) -> Hashable:
        """Return a key that is equal for arrays whose regions have the same `read_cost`."""
        return id(self)

    @property
    def stored_bits(self) -> int:
        """Return the number of stored bits per element; 0 if nothing is stored."""
        return 8 * self.dtype.itemsize

    @property
    def is_computed(self) -> bool:
        """Return whether elements are computed, so that reading them twice doubles the work."""
        return False

    @abstractmethod
    def first_byte(self, region: Region) -> tuple[str, int]:
        """Return the file and offset at which reading a region starts, for ordering tasks by locality."""

    @abstractmethod
    def sources(self) -> Iterator[ByteSource]:
        """Yield the files that a full read accesses; a file may occur several times."""

    @property
    def has_factors(self) -> bool:
        """Return whether the array is a product of two small factors, which `permuted` permutes."""
        return False

    def permuted(self, permutation: Permutation) -> LazyArray | None:
        """Return the permuted array, built from permuted sources, if possible.

        Returns:
            None if elements have to be moved after reading the array itself.
        """
        return None

    @property
    def can_read_in_any_order(self) -> bool:
        """Return whether `read_in_any_order` uses the memory order of `out`."""
        return False

    def read_in_any_order(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read like `read_into`, in the memory order of `out` if that is faster."""
        self.read_into(region, out, scratch)

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """Return the axes whose indices are stored separately, such as stacked layers and experts."""
        return ()

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in memory, in bytes; elements of less than a byte take one byte."""
        return self.size * self.dtype.itemsize

    def read(self, region: Region | None = None) -> np.ndarray:
        """Read a region (by default the full array) as a new C-ordered numpy array of dtype `dtype.numpy`.

        Raises:
            FormatError: As for `read_into`, or a boolean array has bytes other than 0 and 1.
            StorageError: As for `read_into`.
        """
        import numpy as np

        from ckpttools.array.scratch import Scratch

        region = Region.whole(self.shape) if region is None else region
        out = np.empty(region.shape, self.dtype.carrier)
        self.read_into(region, out, Scratch(self.scratch_bytes))
        if self.dtype.kind == "bool" and out.size:
            require_booleans(out, self.dtype, self.first_byte(region)[0])
        return out.view(self.dtype.numpy)

    def __getitem__(self, index: Index) -> np.ndarray:
        """Read with numpy's basic indexing (`array[3, :, 10:20]`) from the smallest enclosing region.

        Raises:
            IndexError: The index is out of bounds or contains anything but integers, slices and an ellipsis.
            FormatError, StorageError: As for `read_into`.
        """

        selection = parse_index(self.shape, index)
        return self.read(selection.region)[selection.within]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Read the full array for `np.asarray(array)`; each call reads again.

        Raises:
            ValueError: `copy` is False; a lazy array has no memory to share.
        """
        if copy is False:
            raise ValueError("a lazy array has no memory that numpy could share: it is read")
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def to_numpy(self) -> np.ndarray:
        """Read the whole array, like `np.asarray(array)`."""
        return self.read()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"

    def _repr_html_(self) -> str:
        from ckpttools.core.text import format_disk

        size = f"{self.size:,} elements, {format_disk(self.nbytes)}"
        return f"<div>{self.dtype}{[*self.shape]} <span style='opacity:0.65'>{size}, not read</span></div>"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Unstored(LazyArray):
    """An array that is not stored in a file, so reading it fetches nothing."""

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost()

    def sources(self) -> Iterator[ByteSource]:
        return iter(())

    @property
    def stored_bits(self) -> int:
        return 0

    def first_byte(self, region: Region) -> tuple[str, int]:
        return "", 0


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Derived(LazyArray):
    """An array derived from one other array.

    Attributes:
        source: The other array.
    """

    source: LazyArray

    def sources(self) -> Iterator[ByteSource]:
        return self.source.sources()

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits

    @property
    def is_computed(self) -> bool:
        return self.source.is_computed


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Regionwise(Derived):
    """An array whose regions are each read from one region of its source."""

    @abstractmethod
    def _source_region(self, region: Region) -> Region | None:
        """Return the source region that a region is read from, or None if the source is not needed."""

    @property
    def scratch_bytes(self) -> int:
        return self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        inner = self._source_region(region)
        return ReadCost() if inner is None else self.source.read_cost(inner)

    def first_byte(self, region: Region) -> tuple[str, int]:
        inner = self._source_region(region)
        return ("", 0) if inner is None else self.source.first_byte(inner)


@dataclass(frozen=True, eq=False, repr=False)
class Composite(LazyArray):
    """An array composed of several others; each region overlaps some of them.

    Attributes:
        parts: The other arrays, in order; at least one.
    """

    parts: tuple[LazyArray, ...]

    @property
    def scratch_bytes(self) -> int:
        return max(part.scratch_bytes for part in self.parts)

    def sources(self) -> Iterator[ByteSource]:
        for part in self.parts:
            yield from part.sources()

    @property
    def stored_bits(self) -> int:
        return self.parts[0].stored_bits

    @property
    def is_computed(self) -> bool:
        return any(part.is_computed for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class ElementwiseCombination(Composite):
    """An array whose elements combine elements at the same index of all parts, which share its shape."""

    @property
    def is_computed(self) -> bool:
        return True

    def read_cost(self, region: Region) -> ReadCost:
        return sum((part.read_cost(region) for part in self.parts), ReadCost())

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.parts[0].first_byte(region)


Key = SupportsIndex | slice | EllipsisType
Index = Key | tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Indexing:
    """A parsed numpy index.

    Attributes:
        region: The smallest enclosing region.
        within: The index within that region.
    """

    region: Region
    within: tuple[int | slice, ...]


def parse_index(shape: Shape, index: Index) -> Indexing:
    """Parse an index of integers, slices and an ellipsis like numpy: `array[3, :, -1]`, `array[..., ::2]`.

    Raises:
        IndexError: The index has other types or too many entries, or is out of bounds.
    """
    keys = _expand_ellipsis(index if isinstance(index, tuple) else (index,), len(shape))
    starts, stops, within = [], [], []
    for axis, (key, length) in enumerate(zip(keys, shape, strict=True)):
        indices, take = _axis_indices(key, length, axis)
        starts.append(min(indices[0], indices[-1]) if indices else 0)
        stops.append(max(indices[0], indices[-1]) + 1 if indices else 0)
        within.append(take)
    return Indexing(Region(tuple(starts), tuple(stops)), tuple(within))


def _expand_ellipsis(keys: tuple[Key, ...], rank: int) -> tuple[Key, ...]:
    """Replace the ellipsis with full slices, and append full slices for missing axes."""
    locations = [location for location, key in enumerate(keys) if key is Ellipsis]
    missing = rank - (len(keys) - len(locations))
    if missing < 0 or len(locations) > 1:
        got = "more than one ellipsis" if len(locations) > 1 else f"{len(keys) - len(locations)} indices"
        raise IndexError(f"{got} for an array of {rank} ax{'i' if rank == 1 else 'e'}s")
    location = locations[0] if locations else len(keys)
    return (*keys[:location], *[slice(None)] * missing, *keys[location + 1 :])


def _axis_indices(key: Key, length: int, axis: int) -> tuple[range, int | slice]:
    """Return the requested coordinates, and their positions in the range from the first to the last."""
    # numpy treats a boolean as a mask, but `operator.index` treats it as 0 or 1.
    if isinstance(key, bool) or not isinstance(key, SupportsIndex | slice):
        raise _index_error(key)
    try:
        if isinstance(key, slice):
            indices = range(*key.indices(length))
            return indices, slice(None, None, indices.step)
        number = operator.index(key)
    except (TypeError, ValueError) as error:
        raise _index_error(key) from error
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of bounds for axis {axis} of length {length}")
    at = number % length
    return range(at, at + 1), 0


def _index_error(key: object) -> IndexError:
    return IndexError(f"lazy arrays are indexed by integers, slices and ..., not by {key!r}")


def require_booleans(values: np.ndarray, dtype: DType, name: str) -> None:
    """Refuse boolean arrays with bytes other than 0 and 1, which readers interpret differently.

    Args:
        values: Elements, as carriers of `dtype`.
        dtype: The dtype of the array; dtypes other than boolean are not checked.
        name: Name of the array or its file, for the message.

    Raises:
        FormatError: The array is boolean and has a byte other than 0 or 1.
    """
    if dtype.kind == "bool" and values.size and (limit := int(values.max())) > 1:
        raise FormatError(
            "an array of booleans has a byte that is not a boolean",
            location=name,
            got=f"{limit}",
            expected="0 or 1 in every byte",
            hint="fetch the checkpoint again; if it was written so, write it again as uint8",
        )
