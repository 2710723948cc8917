"""Lazy arrays without source arrays: stored bytes (plain, chunked or encoded) and constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpttools.array import read_blocks
from ckpttools.array.lazy import ByteSource, LazyArray, ReadCost, Unstored
from ckpttools.array.read_blocks import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.region import (
    Region,
    Shape,
    ceil_div,
    contiguous_runs,
    count_runs,
    grid_cell,
    grid_indices,
    intersecting_cells,
    split_evenly,
)

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# A read costs a system call and the interpreter lock: about 6 us with two busy threads, in which time the
# page cache delivers 16 KiB. Shorter runs are fetched together with the gaps between them, as long as that
# fetches at most `_MAX_GROWTH` times their bytes, or costs at most as much as separate reads: in a column of
# a large matrix, the gap after each element is 16 KiB or more. Remote sources declare their `gap`: the bytes
# that they send in the time of one request. Larger gaps are not fetched to save a request.
_SHORT_RUN = 16 * 1024
_MAX_GROWTH = 16
# Packed elements that are unpacked at a time. The temporary bits, outside the scratch memory, take a few
# times as many bytes.
_PACKED_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Stored(LazyArray):
    """A C-ordered, little-endian array stored contiguously in a file.

    Attributes:
        source: The file.
        offset: Byte offset of the first element.
        whole_bytes: Whether elements of less than a byte take one byte each, as in zarr; otherwise they are
            packed, as in safetensors.
    """

    source: ByteSource
    offset: int
    whole_bytes: bool = False

    @property
    def stored_nbytes(self) -> int:
        """Return the size in the file, in bytes."""
        return -(-self.size * self.stored_bits // 8)

    @property
    def _is_packed(self) -> bool:
        return self.dtype.packed and not self.whole_bytes

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        if self._is_packed:
            self._read_packed(region, out, scratch)
            return
        fetched = _fetch_region(self.shape, region, self.dtype.itemsize, self._short_run)
        if fetched == region and out.flags.c_contiguous:
            self._read_contiguous(region, out)
            return
        for block in split_evenly(fetched, read_blocks.elements(self.dtype.itemsize)):
            expected = block.intersect(region)
            if expected is not None:
                with scratch.take(block.shape, self.dtype.carrier) as buffer:
                    self._read_contiguous(block, buffer)
                    out[expected.relative_to(region).slices] = buffer[expected.relative_to(block).slices]

    def _read_contiguous(self, region: Region, out: np.ndarray) -> None:
        import numpy as np

        itemsize = self.dtype.itemsize
        target = out.reshape(-1).view(np.uint8).data
        done = 0
        for start, length in contiguous_runs(self.shape, region):
            count = length * itemsize
            self.source.read_into(self.offset + start * itemsize, target[done : done + count])
            done += count

    def _read_packed(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Unpack elements of less than a byte, in little-endian bit order as in safetensors."""
        for block in split_evenly(region, _PACKED_BLOCK):
            with scratch.take((block.size,), self.dtype.carrier) as part:
                done = 0
                for start, length in contiguous_runs(self.shape, block):
                    part[done : done + length] = self._unpack(start, length)
                    done += length
                out[block.relative_to(region).slices] = part.reshape(block.shape)

    def _unpack(self, start: int, length: int) -> np.ndarray:
        import numpy as np

        bits = self.dtype.bits
        first, last = start * bits // 8, -(-(start + length) * bits // 8)
        raw = np.empty(last - first, np.uint8)
        self.source.read_into(self.offset + first, raw.data)
        if 8 % bits == 0:
            # Unpacking 8.4 million 4-bit elements takes 4 ms this way, and 71 ms bit by bit.
            loose = np.empty((raw.size, 8 // bits), np.uint8)
            for location, column in enumerate(loose.T):
                np.right_shift(raw, location * bits, out=column)
            np.bitwise_and(loose, (1 << bits) - 1, out=loose)
            return loose.reshape(-1)[start - first * 8 // bits :][:length]
        loose = np.unpackbits(raw, bitorder="little")[start * bits - first * 8 :][: length * bits]
        return np.packbits(loose.reshape(length, bits), axis=1, bitorder="little")[:, 0]

    @property
    def scratch_bytes(self) -> int:
        return read_blocks.scratch(self.nbytes)

    def read_cost(self, region: Region) -> ReadCost:
        if self._is_packed:
            return ReadCost(-(-region.size * self.stored_bits // 8), count_runs(self.shape, region))
        return _cost(self.shape, region, self.dtype.itemsize, self._short_run)

    @property
    def _short_run(self) -> int:
        return getattr(self.source, "gap", _SHORT_RUN)

    @property
    def read_kind(self) -> Hashable:
        return ("stored", self.shape, self.dtype, self.whole_bytes, self._short_run)

    @property
    def stored_bits(self) -> int:
        return self.dtype.bits if self._is_packed else 8 * self.dtype.itemsize

    def sources(self) -> Iterator[ByteSource]:
        yield self.source

    def first_byte(self, region: Region) -> tuple[str, int]:
        start = next(contiguous_runs(self.shape, region), (0, 0))[0]
        return self.source.path, self.offset + start * self.stored_bits // 8


def _fetch_region(shape: Shape, region: Region, itemsize: int, short_run: int = _SHORT_RUN) -> Region:
    """Extend inner axes to their full length if runs are short, to do few long reads and cut in memory."""
    runs = count_runs(shape, region)
    if runs <= 1:
        return region
    nbytes = region.size * itemsize
    limit = (
        max(_MAX_GROWTH * nbytes, short_run * runs) if short_run <= _SHORT_RUN else nbytes + short_run * runs
    )
    wide, inner = region, itemsize
    for axis in reversed(range(region.rank)):
        if (wide.stop[axis] - wide.start[axis]) * inner >= short_run:
            break
        wider = wide.replaced(axis, 0, shape[axis])
        if wider.size * itemsize > limit:
            break
        wide = wider
        inner *= shape[axis]
    return wide if count_runs(shape, wide) < runs else region


def _cost(shape: Shape, region: Region, itemsize: int, short_run: int = _SHORT_RUN) -> ReadCost:
    """Return the read cost of a region of a contiguous array."""
    fetched = _fetch_region(shape, region, itemsize, short_run)
    return ReadCost(fetched.size * itemsize, count_runs(shape, fetched))


class _CellSpan(NamedTuple):
    """A range of indices within a cell along one axis, and the number of cells that it applies to."""

    start: int
    stop: int
    cells: int


def _spans(start: int, stop: int, chunk: int) -> list[_CellSpan]:
    """Split a range along an axis into overlapping cells; all but the first and last are complete."""
    first, last = start // chunk, ceil_div(stop, chunk) - 1
    if first > last:
        return []
    if first == last:
        return [_CellSpan(start - first * chunk, stop - first * chunk, 1)]
    ends = [_CellSpan(start - first * chunk, chunk, 1), _CellSpan(0, stop - last * chunk, 1)]
    between = last - first - 1
    return [*ends, _CellSpan(0, chunk, between)] if between else ends


@dataclass(frozen=True, slots=True)
class Gaps:
    """The chunks that an array lacks.

    Attributes:
        array: Name of the array.
        missing, chunks: Number of missing and of expected chunks.
        first: Key of the first missing chunk.
        hint: A suggestion for finding the chunks.
        faults: Problems of the files that should contain the chunks; empty if no files are known.
        error: The class of the error that reading the chunks raises.
    """

    array: str
    missing: int
    chunks: int
    first: str
    hint: str
    faults: tuple[str, ...] = ()
    error: type[CheckpointError] = FormatError


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Chunked(LazyArray):
    """An array stored as a grid of equal chunks, which are lazy arrays themselves.

    Attributes:
        chunk: Shape of a chunk; chunks at the edge have it too, and are cut when they are read.
        part: Returns the chunk at a grid index.
        part_scratch: Maximum scratch memory for reading a chunk; None if each chunk is a `Stored`.
        gaps: Missing chunks, including chunks whose file is missing or truncated; reading them is refused.
            None if all chunks exist.
    """

    chunk: Shape
    part: Callable[[Shape], LazyArray]
    part_scratch: int | None = None
    gaps: Gaps | None = None

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, length in enumerate(self.chunk) if length == 1 < self.shape[axis])

    def _cells(self, region: Region) -> Iterator[tuple[Region, Region, LazyArray]]:
        """Yield the overlapping chunks, each with the region in the array and the region in the chunk."""
        for index in intersecting_cells(self.chunk, region):
            part = region.intersect(grid_cell(self.shape, self.chunk, index))
            if part is not None:
                origin = [-i * c for i, c in zip(index, self.chunk, strict=True)]
                yield part, part.shifted(origin), self.part(index)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, inside, stored in self._cells(region):
            stored.read_into(inside, subview(out, part.relative_to(region)), scratch)

    @property
    def scratch_bytes(self) -> int:
        if self.part_scratch is not None:
            return self.part_scratch
        return read_blocks.scratch(prod(self.chunk) * self.dtype.itemsize)

    def read_cost(self, region: Region) -> ReadCost:
        """Return the read cost; plain chunks are counted, not asked, and missing ones count as stored."""
        if self.part_scratch is not None:
            return sum((stored.read_cost(inside) for _, inside, stored in self._cells(region)), ReadCost())
        total, short_run = ReadCost(), self._short_run
        for spans in itertools.product(*map(_spans, region.start, region.stop, self.chunk)):
            inside = Region(tuple(span.start for span in spans), tuple(span.stop for span in spans))
            cells = prod(span.cells for span in spans)
            total += _cost(self.chunk, inside, self.dtype.itemsize, short_run) * cells
        return total

    @property
    def _short_run(self) -> int:
        """Return the short-run threshold of all plainly stored chunks."""
        if not self.size:
            return _SHORT_RUN
        first = self.part((0,) * len(self.shape))
        return first._short_run if isinstance(first, Stored) else _SHORT_RUN

    @property
    def read_kind(self) -> Hashable:
        if self.part_scratch is not None:
            return id(self)
        return ("chunked", self.shape, self.dtype, self.chunk, self._short_run)

    def sources(self) -> Iterator[ByteSource]:
        for index in grid_indices(self.shape, self.chunk):
            yield from self.part(index).sources()

    def first_byte(self, region: Region) -> tuple[str, int]:
        _, inside, stored = next(self._cells(region))
        return stored.first_byte(inside)


class Encoded(Protocol):
    """Encoded bytes of an array in a file; the format knows how to decode them."""

    @property
    def source(self) -> ByteSource: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Return the number of encoded bytes for reading all elements."""

    @property
    def code(self) -> str:
        """Return a key that distinguishes arrays in the same bytes: the part and the codec."""

    @property
    def scratch_bytes(self) -> int: ...

    def fetched(self, region: Region) -> int:
        """Return the number of encoded bytes for reading this region."""

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read a region; see `LazyArray.read_into`."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Decoded(LazyArray):
    """An array stored with an encoding such as compression, which can be read only from its start."""

    encoded: Encoded

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self.encoded.read_into(region, out, scratch)

    @property
    def scratch_bytes(self) -> int:
        return self.encoded.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost(self.encoded.fetched(region), 1)

    def sources(self) -> Iterator[ByteSource]:
        yield self.encoded.source

    def first_byte(self, region: Region) -> tuple[str, int]:
        """Return an approximate location: later elements are assumed to have later encoded bytes."""
        before = next(contiguous_runs(self.shape, region), (0, 0))[0]
        estimate = before * self.encoded.nbytes // max(1, self.size)
        return self.encoded.source.path, self.encoded.offset + estimate


_PYTHON_DTYPES: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64"}


def number_array(value: object) -> Constant | None:
    """Convert a Python number to an array; return None for other types and for integers out of range."""
    import numpy as np

    if type(value) not in _PYTHON_DTYPES:
        return None
    dtype = DTYPES[_PYTHON_DTYPES[type(value)]]
    try:
        return Constant((), dtype, np.asarray(value, dtype.numpy).tobytes())
    except OverflowError:
        return None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Constant(Unstored):
    """One element repeated over a shape: a scalar such as the step, or rows of zeros.

    Attributes:
        element: The bytes of the element.
    """

    element: bytes

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        out[...] = np.frombuffer(self.element, self.dtype.carrier)[0]

    @property
    def scratch_bytes(self) -> int:
        return 0
