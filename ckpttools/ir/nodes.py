"""The closed set of lazy arrays: stored bytes, constants, and what can be said about other lazy arrays.

Every node reads any region of itself from the regions of its sources that matter, through slabs of at
most `SLAB_BYTES`, so no node ever needs memory in proportion to its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

from ckpttools.dtypes import DType
from ckpttools.errors import ShapeError
from ckpttools.ir.array import ByteSource, LazyArray, ReadCost
from ckpttools.region import Region, Shape, contiguous_runs, count_runs, grid_cell, grid_indices, split_to

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.ir.scratch import Scratch

# Source bytes held at once by one node. What is read stays in the cache until it has been rearranged:
# whole 32 MiB matrices instead of slabs of 2 MiB took 1.4 times as long.
SLAB_BYTES = 2 * 1024 * 1024
# A read costs a system call and the interpreter's lock: about 6 us between two busy threads, in which 16 KiB
# come out of the page cache. Shorter runs are fetched with what lies between them, up to so many times more.
_SHORT_RUN = 16 * 1024
_MOST_GROWTH = 16
# Packed elements unpacked at once: their loose bits are a few times their number, outside the scratch.
_PACKED_SLAB = 1 << 16
# Allocation granularity of scratch: every buffer taken may be rounded up to a page.
_PAGE = 4096


@dataclass(frozen=True, eq=False, repr=False)
class Stored(LazyArray):
    """A C-ordered, little-endian array that lies in one piece in a file.

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
        """Bytes in the file."""
        return -(-self.size * self.stored_bits // 8)

    @property
    def _is_packed(self) -> bool:
        return self.dtype.packed and not self.whole_bytes

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        if self._is_packed:
            self._read_packed(region, out, scratch)
            return
        fetched = self._fetched(region)
        if fetched == region and out.flags.c_contiguous:
            self._read_contiguous(region, out)
            return
        for slab in split_to(fetched, SLAB_BYTES // self.dtype.itemsize):
            wanted = slab.intersect(region)
            if wanted is not None:
                with scratch.take(slab.shape, self.dtype.carrier) as buffer:
                    self._read_contiguous(slab, buffer)
                    out[wanted.relative_to(region).slices] = buffer[wanted.relative_to(slab).slices]

    def _fetched(self, region: Region) -> Region:
        """The region, with inner axes made whole where its runs are short: few long reads, cut in memory."""
        wide = region
        for axis in reversed(range(region.rank)):
            run = wide.shape[axis] * prod(self.shape[axis + 1 :]) * self.dtype.itemsize
            wider = wide.replaced(axis, 0, self.shape[axis])
            if run >= _SHORT_RUN or wider.size > _MOST_GROWTH * region.size:
                break
            wide = wider
        return wide if count_runs(self.shape, wide) < count_runs(self.shape, region) else region

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
        """Unpacks elements of less than a byte: little-endian bit order, as safetensors packs them."""
        for slab in split_to(region, _PACKED_SLAB):
            with scratch.take((slab.size,), self.dtype.carrier) as part:
                done = 0
                for start, length in contiguous_runs(self.shape, slab):
                    part[done : done + length] = self._unpacked(start, length)
                    done += length
                out[slab.relative_to(region).slices] = part.reshape(slab.shape)

    def _unpacked(self, start: int, length: int) -> np.ndarray:
        import numpy as np

        bits = self.dtype.bits
        first, last = start * bits // 8, -(-(start + length) * bits // 8)
        raw = np.empty(last - first, np.uint8)
        self.source.read_into(self.offset + first, raw.data)
        loose = np.unpackbits(raw, bitorder="little")[start * bits - first * 8 :][: length * bits]
        return np.packbits(loose.reshape(length, bits), axis=1, bitorder="little")[:, 0]

    @property
    def scratch_bytes(self) -> int:
        return min(self.nbytes, SLAB_BYTES) + _PAGE

    def read_cost(self, region: Region) -> ReadCost:
        fetched = region if self._is_packed else self._fetched(region)
        return ReadCost(-(-fetched.size * self.stored_bits // 8), count_runs(self.shape, fetched))

    @property
    def stored_bits(self) -> int:
        return self.dtype.bits if self._is_packed else 8 * self.dtype.itemsize

    def sources(self) -> Iterator[ByteSource]:
        yield self.source

    def first_byte(self, region: Region) -> tuple[str, int]:
        start = next(contiguous_runs(self.shape, region), (0, 0))[0]
        return self.source.path, self.offset + start * self.stored_bits // 8


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(LazyArray):
    """An array stored as a grid of equal chunks, each a lazy array of its own.

    Attributes:
        chunk: shape of the grid's cells; chunks at the edge have it, too, and are cut when read.
        part: the chunk at a grid index.
        part_scratch: scratch that reading the parts takes at most; None where each is a `Stored`.
    """

    chunk: Shape
    part: Callable[[Shape], LazyArray]
    part_scratch: int | None = None

    def _cells(self, region: Region) -> Iterator[tuple[Region, Region, LazyArray]]:
        """For each chunk that the region meets: the part in the array, the same in the chunk, the chunk."""
        ranges = zip(region.start, region.stop, self.chunk, strict=True)
        for index in itertools.product(*(range(a // c, -(-b // c)) for a, b, c in ranges)):
            part = region.intersect(grid_cell(self.shape, self.chunk, index))
            if part is not None:
                origin = [-i * c for i, c in zip(index, self.chunk, strict=True)]
                yield part, part.shifted(origin), self.part(index)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, inside, stored in self._cells(region):
            stored.read_into(inside, _view(out, part.relative_to(region)), scratch)

    @property
    def scratch_bytes(self) -> int:
        if self.part_scratch is not None:
            return self.part_scratch
        return min(prod(self.chunk) * self.dtype.itemsize, SLAB_BYTES) + _PAGE

    def read_cost(self, region: Region) -> ReadCost:
        return sum((stored.read_cost(inside) for _, inside, stored in self._cells(region)), ReadCost())

    def sources(self) -> Iterator[ByteSource]:
        for index in grid_indices(self.shape, self.chunk):
            yield from self.part(index).sources()

    @property
    def stored_bits(self) -> int:
        return 8 * self.dtype.itemsize

    def first_byte(self, region: Region) -> tuple[str, int]:
        _, inside, stored = next(self._cells(region))
        return stored.first_byte(inside)


class Encoded(Protocol):
    """Bytes of a file that are an array's elements under some code; a format knows which."""

    @property
    def source(self) -> ByteSource: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Encoded bytes that reading all elements fetches."""

    @property
    def code(self) -> str:
        """What tells it from other arrays in the same bytes: the part of them and the code."""

    @property
    def scratch_bytes(self) -> int: ...

    def fetched(self, region: Region) -> int:
        """Encoded bytes that reading this region fetches."""

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """As `LazyArray.read_into`."""


@dataclass(frozen=True, eq=False, repr=False)
class Decoded(LazyArray):
    """An array stored under a code: compressed, for instance. Read from its start, not anywhere.

    Attributes:
        encoded: the bytes, and how they become elements.
    """

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

    @property
    def stored_bits(self) -> int:
        return 8 * self.dtype.itemsize

    def first_byte(self, region: Region) -> tuple[str, int]:
        """The place in proportion: what lies behind in the array lies behind in its code, too."""
        before = next(contiguous_runs(self.shape, region), (0, 0))[0]
        ahead = before * self.encoded.nbytes // max(1, self.size)
        return self.encoded.source.path, self.encoded.offset + ahead


@dataclass(frozen=True, eq=False, repr=False)
class Constant(LazyArray):
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

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost()

    def sources(self) -> Iterator[ByteSource]:
        return iter(())

    @property
    def stored_bits(self) -> int:
        return 0

    def first_byte(self, region: Region) -> tuple[str, int]:
        return "", 0


@dataclass(frozen=True, eq=False, repr=False)
class Stack(LazyArray):
    """Arrays of one shape and dtype side by side along a new axis.

    Attributes:
        parts: one array per coordinate of the new axis.
        axis: position of the new axis in `shape`.
    """

    parts: tuple[LazyArray, ...]
    axis: int

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        inner = region.without(self.axis)
        views = np.moveaxis(out, self.axis, 0)
        for k, part in enumerate(self._parts(region)):
            part.read_into(inner, views[k, ...], scratch)

    def _parts(self, region: Region) -> tuple[LazyArray, ...]:
        return self.parts[region.start[self.axis] : region.stop[self.axis]]

    @property
    def scratch_bytes(self) -> int:
        return max(part.scratch_bytes for part in self.parts)

    def read_cost(self, region: Region) -> ReadCost:
        inner = region.without(self.axis)
        return sum((part.read_cost(inner) for part in self._parts(region)), ReadCost())

    def sources(self) -> Iterator[ByteSource]:
        for part in self.parts:
            yield from part.sources()

    @property
    def stored_bits(self) -> int:
        return self.parts[0].stored_bits

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self._parts(region)[0].first_byte(region.without(self.axis))


def stack(parts: Sequence[LazyArray], axis: int) -> Stack:
    """`parts` side by side along a new axis before position `axis`.

    Raises:
        ShapeError: the parts differ in shape or dtype, or there are none.
    """
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(kinds) != 1:
        listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
        raise ShapeError("only arrays of one shape and dtype can be stacked", got=listed or "none")
    ((inner, dtype),) = kinds
    return Stack((*inner[:axis], len(parts), *inner[axis:]), dtype, tuple(parts), axis)


@dataclass(frozen=True, eq=False, repr=False)
class Take(LazyArray):
    """One coordinate of an axis of another array; the axis is gone. The inverse of `Stack`."""

    source: LazyArray
    axis: int
    index: int

    def _inner(self, region: Region) -> Region:
        return region.inserted(self.axis, self.index, self.index + 1)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        self.source.read_into(self._inner(region), np.expand_dims(out, self.axis), scratch)

    @property
    def scratch_bytes(self) -> int:
        return self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return self.source.read_cost(self._inner(region))

    def sources(self) -> Iterator[ByteSource]:
        return self.source.sources()

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.source.first_byte(self._inner(region))


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

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        """target[...] = f(source): equal shapes, carriers of `dtype` and of `result(dtype)`."""


@dataclass(frozen=True, eq=False, repr=False)
class Elementwise(LazyArray):
    """Another array with a function applied to every element."""

    source: LazyArray
    op: ElementOp

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        dtype = self.source.dtype
        for slab in split_to(region, SLAB_BYTES // dtype.itemsize):
            with scratch.take(slab.shape, dtype.carrier) as buffer:
                self.source.read_into(slab, buffer, scratch)
                self.op.apply(buffer, _view(out, slab.relative_to(region)), dtype)

    @property
    def scratch_bytes(self) -> int:
        return min(self.source.nbytes, SLAB_BYTES) + _PAGE + self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        return self.source.read_cost(region)

    def sources(self) -> Iterator[ByteSource]:
        return self.source.sources()

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.source.first_byte(region)


def elementwise(source: LazyArray, op: ElementOp) -> LazyArray:
    """`source` with `op` applied to every element.

    The op goes below whatever only moves elements, so that it sees the slabs that were read, in the order
    in which they are stored.
    """
    if isinstance(source, Stack):
        return stack([elementwise(part, op) for part in source.parts], source.axis)
    if isinstance(source, Take):
        return take(elementwise(source.source, op), source.axis, source.index)
    if isinstance(source, Relayout):
        return relayout(elementwise(source.source, op), source.split, source.order, source.merge)
    return Elementwise(source.shape, op.result(source.dtype), source, op)


@dataclass(frozen=True, eq=False, repr=False)
class Relayout(LazyArray):
    """Another array with its axes split into atoms, the atoms reordered, and merged again.

    A transpose, a reshape, a head split and RoPE's interleaving are all of this kind: a permutation of
    elements that is a permutation of atoms.

    Attributes:
        split: for each source axis the lengths of its atoms, outermost first; their product is the axis.
        order: for each target atom its number among the source's atoms, all of them counted through.
        merge: for each target axis how many target atoms it is made of.
    """

    source: LazyArray
    split: tuple[Shape, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]

    @cached_property
    def _atoms(self) -> Shape:
        """Lengths of the source's atoms."""
        return tuple(length for group in self.split for length in group)

    @cached_property
    def _target_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each target axis the source numbers of its atoms."""
        rest = iter(self.order)
        return tuple(tuple(next(rest) for _ in range(count)) for count in self.merge)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, atoms in self._atom_boxes(region):
            view = _view(out, part.relative_to(region))
            self._read_box(atoms, view.reshape([atoms.shape[a] for a in self.order]), scratch)

    def _atom_boxes(self, region: Region) -> Iterator[tuple[Region, Region]]:
        """The region cut into parts that are boxes of atoms: (part, box in the source's atom order)."""
        groups = self._target_groups
        lengths = tuple(tuple(self._atoms[a] for a in group) for group in groups)
        ranges = zip(region.start, region.stop, strict=True)
        choices = [list(_boxes(n, a, b)) for n, (a, b) in zip(lengths, ranges, strict=True)]
        for picked in itertools.product(*choices):
            start, stop = [0] * len(self._atoms), [0] * len(self._atoms)
            for group, (_, box) in zip(groups, picked, strict=True):
                for atom, a, b in zip(group, box.start, box.stop, strict=True):
                    start[atom], stop[atom] = a, b
            part = Region(tuple(run[0] for run, _ in picked), tuple(run[1] for run, _ in picked))
            yield part, Region(tuple(start), tuple(stop))

    def _read_box(self, atoms: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Reads one box of atoms through slabs of the source; `out` has the target's atom order."""
        from ckpttools.ir.copy import copy

        carrier = self.dtype.carrier
        cover = self._cover(atoms)
        for slab in split_to(cover, max(1, SLAB_BYTES // carrier.itemsize)):
            wanted = slab.intersect(atoms)
            if wanted is None:
                continue
            region = self._source_region(slab)
            with scratch.take(region.shape, carrier) as buffer:
                self.source.read_into(region, buffer, scratch)
                view = _view(buffer.reshape(slab.shape), wanted.relative_to(slab))
                place = wanted.relative_to(atoms)
                index: tuple[slice | EllipsisType, ...] = (*(place.slices[a] for a in self.order), ...)
                target = out[index]
                copy(target, view.transpose(self.order), scratch)

    def _cover(self, atoms: Region) -> Region:
        """The smallest box around `atoms` whose every slab is a box of the source, too."""
        starts: list[int] = []
        stops: list[int] = []
        for group, first in zip(self.split, self._group_starts, strict=True):
            free = False
            for k, length in enumerate(group):
                a, b = atoms.start[first + k], atoms.stop[first + k]
                starts.append(0 if free else a)
                stops.append(length if free else b)
                free = free or b - a > 1
        return Region(tuple(starts), tuple(stops))

    @cached_property
    def _group_starts(self) -> tuple[int, ...]:
        counts = [len(group) for group in self.split]
        return tuple(sum(counts[:k]) for k in range(len(counts)))

    def _source_region(self, atoms: Region) -> Region:
        """The source's region that a box of atoms spans."""
        starts: list[int] = []
        stops: list[int] = []
        for group, first in zip(self.split, self._group_starts, strict=True):
            part = slice(first, first + len(group))
            starts.append(_flat(atoms.start[part], group))
            stops.append(_flat([b - 1 for b in atoms.stop[part]], group) + 1)
        return Region(tuple(starts), tuple(stops))

    @property
    def scratch_bytes(self) -> int:
        from ckpttools.ir.copy import scratch_bytes

        slab = min(self.nbytes, SLAB_BYTES) + _PAGE
        return slab + scratch_bytes() + self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        regions = [self._source_region(self._cover(box)) for _, box in self._atom_boxes(region)]
        return sum((self.source.read_cost(each) for each in regions), ReadCost())

    def sources(self) -> Iterator[ByteSource]:
        return self.source.sources()

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits

    def first_byte(self, region: Region) -> tuple[str, int]:
        _, box = next(self._atom_boxes(region))
        return self.source.first_byte(self._source_region(box))


def relayout(
    source: LazyArray, split: Sequence[Shape], order: Sequence[int], merge: Sequence[int]
) -> LazyArray:
    """`source` with its atoms in another order; `source` itself where nothing changes.

    Raises:
        ShapeError: the atoms do not multiply to the source's shape, or `order` is no permutation.
    """
    atoms = [length for group in split for length in group]
    if tuple(map(prod, split)) != source.shape:
        raise ShapeError("the parts of an axis must multiply to it", got=split, wanted=source.shape)
    if sorted(order) != list(range(len(atoms))) or sum(merge) != len(order):
        raise ShapeError("not a permutation of the atoms", got=tuple(order), wanted=len(atoms))
    rest = iter(order)
    shape = tuple(prod(atoms[next(rest)] for _ in range(count)) for count in merge)
    if shape == source.shape and _keeps_order(atoms, order):
        return source
    return Relayout(shape, source.dtype, source, tuple(split), tuple(order), tuple(merge))


def _keeps_order(atoms: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the permutation moves only atoms of length one, which moves nothing."""
    moved = [atom for atom in order if atoms[atom] != 1]
    return moved == sorted(moved)


def described(array: LazyArray) -> object:
    """What an array is made of, as plain values: arrays described alike hold the same elements.

    Raises:
        TypeError: not a node of the closed set.
    """
    match array:
        case Stored():
            return ["stored", array.source.path, array.source.version, array.offset]
        case Chunked():
            parts = (array.part(index) for index in grid_indices(array.shape, array.chunk))
            return ["chunked", array.chunk, *map(described, parts)]
        case Decoded(encoded=code):
            return ["decoded", code.source.path, code.source.version, code.offset, code.code]
        case Constant():
            return ["constant", array.element.hex()]
        case Stack():
            return ["stack", array.axis, *map(described, array.parts)]
        case Take():
            return ["take", array.axis, array.index, described(array.source)]
        case Elementwise():
            return ["elementwise", repr(array.op), described(array.source)]
        case Relayout():
            return ["relayout", array.split, array.order, array.merge, described(array.source)]
        case _:
            raise TypeError(f"{array!r} is no node")


def _view(array: np.ndarray, region: Region) -> np.ndarray:
    """The region of an array as a view, where plain indexing makes a copy: at rank 0, too."""
    index: tuple[slice | EllipsisType, ...] = (*region.slices, ...)
    view: np.ndarray = array[index]
    return view


def _flat(index: Sequence[int], lengths: Sequence[int]) -> int:
    """The C-order position of a multi-index."""
    position = 0
    for i, n in zip(index, lengths, strict=True):
        position = position * n + i
    return position


def _boxes(lengths: Shape, start: int, stop: int) -> Iterator[tuple[tuple[int, int], Region]]:
    """A range of a merged axis as ranges that are boxes of its atoms: ((start, stop), box)."""
    if start >= stop:
        return
    if len(lengths) <= 1:
        yield (start, stop), Region((start,) * len(lengths), (stop,) * len(lengths))
        return
    inner = prod(lengths[1:])
    position = start
    while position < stop:
        outer, offset = divmod(position, inner)
        if offset == 0 and stop - position >= inner:
            last = stop // inner
            box = Region((outer, *(0 for _ in lengths[1:])), (last, *lengths[1:]))
            yield (position, last * inner), box
            position = last * inner
            continue
        end = min(stop, (outer + 1) * inner)
        for (a, b), rest in _boxes(lengths[1:], offset, offset + end - position):
            box = rest.inserted(0, outer, outer + 1)
            yield (outer * inner + a, outer * inner + b), box
        position = end
