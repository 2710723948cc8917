"""What a lazy array is: shape, dtype and where its bytes come from. Only reading reads them.

Elements travel as opaque unsigned numbers of their size (`DType.carrier`), so bits are never touched by
accident; only value ops look at them as numbers.
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

    from ckpttools.array.permutation import Permutation
    from ckpttools.array.scratch import Scratch


class ByteSource(Protocol):
    """Something that bytes can be read from by position, from several threads at once."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> str:
        """Something that changes when the content does."""

    def read_into(self, offset: int, out: Buffer) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a read will take: bytes fetched, and the number of separate reads. Adds up."""

    nbytes: int = 0
    reads: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.nbytes + other.nbytes, self.reads + other.reads)

    def __mul__(self, count: int) -> ReadCost:
        return ReadCost(self.nbytes * count, self.reads * count)


@dataclass(frozen=True, eq=False, slots=True)
class LazyArray(ABC):
    """An array of `shape` and `dtype` of which any region can be had at the cost of that region.

    The set of implementations is closed: `ckpttools.array.nodes`.
    """

    shape: Shape
    dtype: DType

    @abstractmethod
    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Writes the elements of `region` into `out`.

        Args:
            region: a box within `shape`.
            out: of the region's shape and `dtype.carrier`, any strides.
            scratch: has `scratch_bytes` free.

        Raises:
            FormatError, StorageError: the bytes are not there or cannot be read.
        """

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes of scratch that reading any region takes at most."""

    @abstractmethod
    def read_cost(self, region: Region) -> ReadCost:
        """Bytes that `read_into` of this region will fetch, and in how many reads."""

    @property
    def read_kind(self) -> Hashable:
        """Equal for arrays of which any region has the same `read_cost`."""
        return id(self)

    @property
    def stored_bits(self) -> int:
        """Bits of one element where it is stored; 0 where nothing is."""
        return 8 * self.dtype.itemsize

    @property
    def is_computed(self) -> bool:
        """Whether elements are functions of others, so that reading one twice is work done twice."""
        return False

    @abstractmethod
    def first_byte(self, region: Region) -> tuple[str, int]:
        """File and offset at which reading this region starts; orders tasks by locality."""

    @abstractmethod
    def sources(self) -> Iterator[ByteSource]:
        """The files that reading all of it reads; one may come several times."""

    def permuted(self, permutation: Permutation) -> LazyArray | None:
        """Return the permuted array, built from permuted sources.

        Returns:
            None if the array itself has to be read and its elements moved.
        """
        return None

    @property
    def can_read_in_any_order(self) -> bool:
        """Whether `read_in_any_order` writes elements in the order of `out` in memory."""
        return False

    def read_in_any_order(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read as `read_into` does, in the order of `out` in memory where that is faster."""
        self.read_into(region, out, scratch)

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """The axes whose coordinates are stored separately, such as those of stacked layers and experts."""
        return ()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: elements of less than a byte take one."""
        return self.size * self.dtype.itemsize

    def read(self, region: Region | None = None) -> np.ndarray:
        """The region (by default all of it) as a new C-ordered numpy array of `dtype.numpy`.

        Raises:
            FormatError: as `read_into`; or an array of booleans has others than 0 and 1.
            StorageError: as `read_into`.
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
        """What numpy's basic indexing takes: `array[3, :, 10:20]`. Reads the smallest box that has all of it.

        Raises:
            IndexError: not whole numbers, slices and an ellipsis, or beyond the array.
            FormatError, StorageError: as `read_into`.
        """

        chosen = parse_index(self.shape, index)
        return self.read(chosen.region)[chosen.within]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """All of it, read anew at each call: `np.asarray(array)`.

        Raises:
            ValueError: asked for without a copy; there is no memory to share.
        """
        if copy is False:
            raise ValueError("a lazy array has no memory that numpy could share: it is read")
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Unstored(LazyArray):
    """An array that is in no file: reading it fetches nothing."""

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
    """An array made from one other.

    Attributes:
        source: the other.
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
    """An array of which each region is read from one region of the other."""

    @abstractmethod
    def _source_region(self, region: Region) -> Region | None:
        """The source's region that a region is read from; None if it is made without the source."""

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
    """An array made of several others, of which a region meets some.

    Attributes:
        parts: the others, in order; at least one.
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
    """An array each of whose elements is made of the elements there of all parts, which have its shape."""

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
    """What an index asks for.

    Attributes:
        region: the smallest box that has all of it.
        within: the index that takes it out of that box.
    """

    region: Region
    within: tuple[int | slice, ...]


def parse_index(shape: Shape, index: Index) -> Indexing:
    """Whole numbers, slices and an ellipsis, meant as numpy means them: `array[3, :, -1]`, `array[..., ::2]`.

    Raises:
        IndexError: anything else, too many of them, or a number beyond the axis.
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
    """The keys with the ellipsis written out, and whole axes at the end."""
    locations = [location for location, key in enumerate(keys) if key is Ellipsis]
    missing = rank - (len(keys) - len(locations))
    if missing < 0 or len(locations) > 1:
        got = "two ellipses" if len(locations) > 1 else f"{len(keys) - len(locations)} indices"
        raise IndexError(f"an array of {rank} axes has no place for {got}")
    location = locations[0] if locations else len(keys)
    return (*keys[:location], *[slice(None)] * missing, *keys[location + 1 :])


def _axis_indices(key: Key, length: int, axis: int) -> tuple[range, int | slice]:
    """The coordinates that are asked for, and how they lie between the first and the last of them."""
    # numpy takes a boolean for a mask, `operator.index` for 0 or 1.
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
    return IndexError(f"a lazy array is indexed by whole numbers, slices and ..., not by {key!r}")


def require_booleans(values: np.ndarray, dtype: DType, name: str) -> None:
    """Refuses what would be read differently by everyone.

    Args:
        values: elements as carriers of `dtype`, which may be any.
        dtype: of the array.
        name: of the array, or the file that it is in, for the message.

    Raises:
        FormatError: the array is of booleans, and a byte is neither 0 nor 1.
    """
    if dtype.kind == "bool" and values.size and (limit := int(values.max())) > 1:
        raise FormatError(
            "an array of booleans has a byte that is not a boolean",
            location=name,
            got=f"{limit}",
            expected="0 or 1 in every byte",
            hint="fetch the checkpoint again; if it was written so, write it again as uint8",
        )
