"""Lazy arrays without sources: stored bytes (plain, chunked or encoded) and constants."""

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

# A read costs a system call and the interpreter lock: about 6 us between two busy threads, in which 16 KiB
# come out of the page cache. Shorter runs are fetched together with the gaps between them, up to
# `_MOST_GROWTH` times their bytes, or up to the cost of the reads: a column of a large matrix has 16 KiB and
# more for each element.
# Remote sources declare their `gap`, the bytes that they send in the time of a request. No larger gap is
# fetched there to save a request.
_SHORT_RUN = 16 * 1024
_MOST_GROWTH = 16
# Packed elements unpacked at once: their loose bits are a few times their number, outside the scratch.
_PACKED_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Stored(LazyArray):
    """A C-ordered, little-endian array stored contiguously in a file.

    Attributes:
        source: the file.
        offset: byte at which the first element starts.
        whole_bytes: elements of less than a byte take one each, as in zarr; else they are packed, as in
            safetensors.
    """

    source: ByteSource
    offset: int
    whole_bytes: bool = False

    @property
    def stored_nbytes(self) -> int:
        """Return the bytes in the file."""
        return -(-self.size * self.stored_bits // 8)

    @property
    def _is_packed(self) -> bool:
        return self.dtype.packed and not self.whole_bytes

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        if self._is_packed:
            self._read_packed(region, out, scratch)
            return
        fetched = _fetched_region(self.shape, region, self.dtype.itemsize, self._short_run)
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
        """Unpack elements of less than a byte: little-endian bit order, as in safetensors."""
        for block in split_evenly(region, _PACKED_BLOCK):
            with scratch.take((block.size,), self.dtype.carrier) as part:
                done = 0
                for start, length in contiguous_runs(self.shape, block):
                    part[done : done + length] = self._unpacked(start, length)
                    done += length
                out[block.relative_to(region).slices] = part.reshape(block.shape)

    def _unpacked(self, start: int, length: int) -> np.ndarray:
        import numpy as np

        bits = self.dtype.bits
        first, last = start * bits // 8, -(-(start + length) * bits // 8)
        raw = np.empty(last - first, np.uint8)
        self.source.read_into(self.offset + first, raw.data)
        if 8 % bits == 0:
            # 8.4 million elements of 4 bits: 4 ms, bit by bit 71.
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


def _fetched_region(shape: Shape, region: Region, itemsize: int, short_run: int = _SHORT_RUN) -> Region:
    """Extend inner axes to full length if runs are short: few long reads, cut in memory."""
    runs = count_runs(shape, region)
    if runs <= 1:
        return region
    nbytes = region.size * itemsize
    limit = (
        max(_MOST_GROWTH * nbytes, short_run * runs) if short_run <= _SHORT_RUN else nbytes + short_run * runs
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
    fetched = _fetched_region(shape, region, itemsize, short_run)
    return ReadCost(fetched.size * itemsize, count_runs(shape, fetched))


class _CellSpan(NamedTuple):
    """The part of a cell between two of its coordinates along one axis, for a number of cells."""

    start: int
    stop: int
    cells: int


def _spans(start: int, stop: int, chunk: int) -> list[_CellSpan]:
    """Split a range of an axis into the cells that it overlaps, complete except the first and last."""
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
        array: its name.
        missing, chunks: the number of missing and of expected chunks.
        first: key of the first that is missing.
        hint: suggestion for finding them.
        faults: problems of the files that should contain them; empty if no files are known.
        error: the error for reading them.
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
    """An array stored as a grid of equal chunks, each a lazy array of its own.

    Attributes:
        chunk: shape of the grid's cells; chunks at the edge have it, too, and are cut when read.
        part: the chunk at a grid index.
        part_scratch: scratch that reading the parts takes at most; None where each is a `Stored`.
        gaps: chunks that are missing, or whose files are or end before them: reading them is refused; None
            where none is.
    """

    chunk: Shape
    part: Callable[[Shape], LazyArray]
    part_scratch: int | None = None
    gaps: Gaps | None = None

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, length in enumerate(self.chunk) if length == 1 < self.shape[axis])

    def _cells(self, region: Region) -> Iterator[tuple[Region, Region, LazyArray]]:
        """Yield the overlapping chunks: the region in the array, the region in the chunk, the chunk."""
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
        """Plain chunks are counted, not asked one by one; those that were left out count as if stored."""
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
    """Encoded bytes of an array in a file; the format knows the code."""

    @property
    def source(self) -> ByteSource: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Return the encoded bytes for reading all elements."""

    @property
    def code(self) -> str:
        """Return a key that distinguishes arrays in the same bytes: their part and the code."""

    @property
    def scratch_bytes(self) -> int: ...

    def fetched(self, region: Region) -> int:
        """Return the encoded bytes for reading this region."""

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read a region; see `LazyArray.read_into`."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Decoded(LazyArray):
    """An array stored under a code, such as compression. It is read from its start only."""

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
        """Return a proportional location: later elements have later encoded bytes."""
        before = next(contiguous_runs(self.shape, region), (0, 0))[0]
        ahead = before * self.encoded.nbytes // max(1, self.size)
        return self.encoded.source.path, self.encoded.offset + ahead


_OF_PYTHON: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64"}


def number_array(value: object) -> Constant | None:
    """Convert a Python number to an array; None for integers out of range, and for other types."""
    import numpy as np

    if type(value) not in _OF_PYTHON:
        return None
    dtype = DTYPES[_OF_PYTHON[type(value)]]
    try:
        return Constant((), dtype, np.asarray(value, dtype.numpy).tobytes())
    except OverflowError:
        return None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Constant(Unstored):
    """One element, repeated: a scalar such as the step, or rows of zeros.

    Attributes:
        element: the bytes of the element.
    """

    element: bytes

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        out[...] = np.frombuffer(self.element, self.dtype.carrier)[0]

    @property
    def scratch_bytes(self) -> int:
        return 0
