"""A permutation of elements that is a permutation of axes, split and merged."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

from ckpttools.array import read_blocks
from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import Derived, LazyArray, ReadCost
from ckpttools.array.lowrank import LowRank, low_rank
from ckpttools.array.read_blocks import subview
from ckpttools.array.stored import Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, Shape, split_to

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Relayout(Derived):
    """Another array with its axes split into atoms, the atoms reordered, and merged again.

    A transpose, a reshape, a head split and RoPE's interleaving are all of this kind: a permutation of
    elements that is a permutation of atoms.

    Attributes:
        split: for each source axis the lengths of its atoms, outermost first; their product is the axis.
        order: for each target atom its number among the source's atoms, all of them counted through.
        merge: for each target axis how many target atoms it is made of.
    """

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

    @property
    def is_across(self) -> bool:
        """Whether neighbours in the source are neighbours along the last axis but one."""
        innermost = max((atom for atom in self.order if self._atoms[atom] != 1), default=None)
        return self.ndim > 1 and innermost in self._target_groups[-2]

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, atoms in self._atom_boxes(region):
            view = subview(out, part.relative_to(region))
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
        """Reads one box of atoms through read blocks of the source; `out` has the target's atom order."""
        from ckpttools.array.copy import copy

        if self._read_straight(atoms, out, scratch):
            return
        carrier = self.dtype.carrier
        count = read_blocks.elements(carrier.itemsize)
        for read in itertools.chain.from_iterable(split_to(cover, count) for cover in self._covers(atoms)):
            expected = read.intersect(atoms)
            if expected is None:
                continue
            region = self._source_region(read)
            with scratch.take(region.shape, carrier) as buffer:
                self.source.read_into(region, buffer, scratch)
                view = subview(buffer.reshape(read.shape), expected.relative_to(read))
                location = expected.relative_to(atoms)
                index: tuple[slice | EllipsisType, ...] = (*(location.slices[a] for a in self.order), ...)
                target = out[index]
                copy(target, view.transpose(self.order), scratch)

    def _read_straight(self, atoms: Region, out: np.ndarray, scratch: Scratch) -> bool:
        """Whether the source has written into `out`, as one does in any order: no number is moved then."""
        source = self.source
        if not (isinstance(source, Dequantized) and source.is_in_any_order and self._cover(atoms) == atoms):
            return False
        view = out.transpose(sorted(range(out.ndim), key=self.order.__getitem__))
        rest = iter(zip(view.shape, view.strides, strict=True))
        if not all(_is_one_axis([next(rest) for _ in group]) for group in self.split):
            return False
        region = self._source_region(atoms)
        source.read_in_order_of(region, view.reshape(region.shape), scratch)
        return True

    def _covers(self, atoms: Region) -> Iterator[Region]:
        """Boxes that hold `atoms` and whose every read block is a box of the source, too.

        One, with more in it than was asked for where need be; several without that where elements are
        computed: those that count something must see each element once.
        """
        cover = self._cover(atoms)
        if cover == atoms or not self.source.computed:
            yield cover
            return
        wider = next(a for a in range(atoms.rank) if cover.shape[a] != atoms.shape[a])
        first = max(start for start in self._group_starts if start <= wider)
        free = next(a for a in range(first, wider) if atoms.shape[a] > 1)
        for piece in atoms.pieces(free, 1):
            yield from self._covers(piece)

    def _cover(self, atoms: Region) -> Region:
        """The smallest box around `atoms` whose every read block is a box of the source, too."""
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
        from ckpttools.array.copy import scratch_bytes

        read = read_blocks.scratch(self.nbytes)
        return read + scratch_bytes() + self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        regions = [self._source_region(self._cover(box)) for _, box in self._atom_boxes(region)]
        return sum((self.source.read_cost(item) for item in regions), ReadCost())

    @property
    def read_kind(self) -> Hashable:
        return ("relayout", self.split, self.order, self.merge, self.source.read_kind)

    def first_byte(self, region: Region) -> tuple[str, int]:
        if region.shape == self.shape:
            return self.source.first_byte(Region.whole(self.source.shape))
        _, box = next(self._atom_boxes(region))
        return self.source.first_byte(self._source_region(box))


def relayout(
    source: LazyArray, split: Sequence[Shape], order: Sequence[int], merge: Sequence[int]
) -> LazyArray:
    """`source` with its atoms in another order; `source` itself where nothing changes.

    Raises:
        ShapeError: the atoms do not multiply to the source's shape, or `order` is not a permutation.
    """
    atoms = [length for group in split for length in group]
    if tuple(map(prod, split)) != source.shape:
        raise ShapeError("the parts of an axis must multiply to it", got=split, expected=source.shape)
    if sorted(order) != list(range(len(atoms))) or sum(merge) != len(order):
        raise ShapeError("not a permutation of the atoms", got=tuple(order), expected=len(atoms))
    rest = iter(order)
    shape = tuple(prod(atoms[next(rest)] for _ in range(count)) for count in merge)
    if shape == source.shape and _keeps_order(atoms, order):
        return source
    asked = Permutation(tuple(split), tuple(order), tuple(merge))
    if isinstance(source, Relayout):
        # Elements are moved once.
        one = composed(Permutation(source.split, source.order, source.merge), asked)
        if one is not None:
            return relayout(source.source, *one)
    through = _through_product(source, asked)
    if through is not None:
        return through
    if isinstance(source, Dequantized):
        source, finer = _split_below(source, asked.split)
        asked = asked._replace(split=finer)
    return Relayout(shape, source.dtype, source, *asked)


def _through_product(source: LazyArray, asked: Permutation) -> LazyArray | None:
    """A product of which the factors are permuted instead.

    None for any other array, and where atoms of rows and of columns take turns.

    A product is made in the order in which it is expected: no element is moved, and none made for nothing.
    """
    from ckpttools.array.nodes import Elementwise

    if isinstance(source, Elementwise) and isinstance(source.source, LowRank):
        inner = _through_product(source.source, asked)
        return None if inner is None else replace(source, shape=inner.shape, source=inner)
    if not isinstance(source, LowRank) or source.ndim != 2:
        return None
    rows = len(asked.split[0])
    of_column = [atom >= rows for atom in asked.order]
    rows_first = of_column == sorted(of_column)
    if not rows_first and of_column != sorted(of_column, reverse=True):
        return None
    left, right = source.parts
    of_rows = [atom for atom in asked.order if atom < rows]
    of_columns = [atom - rows for atom in asked.order if atom >= rows]
    rank = (source.rank,)
    left = relayout(left, (asked.split[0], rank), (*of_rows, rows), (rows, 1))
    right = relayout(right, (rank, asked.split[1]), (0, *(n + 1 for n in of_columns)), (1, len(of_columns)))
    if not rows_first:
        left, right = swapped(right), swapped(left)
    built = low_rank(left, right, source.scale)
    atoms = [length for group in asked.split for length in group]
    lengths = [atoms[atom] for atom in asked.order]
    first = rows if rows_first else len(of_columns)
    split = (tuple(lengths[:first]), tuple(lengths[first:]))
    return _in_order(built, Permutation(split, tuple(range(len(atoms))), asked.merge))


def _is_one_axis(atoms: Sequence[tuple[int, int]]) -> bool:
    """Whether axes, each a length and a stride, are one in memory."""
    long = [atom for atom in atoms if atom[0] > 1]
    return all(outer == length * inner for (_, outer), (length, inner) in itertools.pairwise(long))


def transposed(array: LazyArray, order: Sequence[int]) -> LazyArray:
    """`array` with its axes in another order."""
    return relayout(array, [(length,) for length in array.shape], order, [1] * array.ndim)


def swapped(array: LazyArray) -> LazyArray:
    """`array` with its last two axes exchanged."""
    *outer, rows, columns = range(array.ndim)
    return transposed(array, (*outer, columns, rows))


def _in_order(source: LazyArray, same: Permutation) -> LazyArray:
    """`source` in another shape, by a permutation that moves nothing."""
    lengths = iter(length for group in same.split for length in group)
    shape = tuple(prod(next(lengths) for _ in range(count)) for count in same.merge)
    return source if shape == source.shape else Relayout(shape, source.dtype, source, *same)


def _split_below(array: Dequantized, split: Sequence[Shape]) -> tuple[Dequantized, tuple[Shape, ...]]:
    """Codes and scales with axes split as numbers are to be, so that of rows that take turns only those are
    decoded that are expected; and how the axes that it has then are still to be split.

    An axis along which a scale is for several numbers, but not for all, stays whole; so does the last.
    """
    groups = [
        group if len(group) > 1 and axis < array.ndim - 1 and _is_free(array, axis) else (length,)
        for axis, (group, length) in enumerate(zip(split, array.shape, strict=True))
    ]
    if all(len(group) == 1 for group in groups):
        return array, tuple(split)
    blocks = [
        tuple(length for group, cell in zip(groups, block, strict=True) for length in _cells(group, cell))
        for block in array.blocks
    ]
    built = replace(
        array,
        shape=tuple(length for group in groups for length in group),
        codes=_with_axes_split(array.codes, [*groups[:-1], array.codes.shape[-1:]]),
        scales=tuple(
            _with_axes_split(scale, [_of_scales(*three) for three in zip(groups, scale.shape, strict=True)])
            for scale in array.scales
        ),
        blocks=tuple(blocks),
    )
    finer: list[Shape] = []
    for group, asked in zip(groups, split, strict=True):
        finer += [(length,) for length in group] if len(group) > 1 else [asked]
    return built, tuple(finer)


def _is_free(array: Dequantized, axis: int) -> bool:
    """Whether each number along an axis has a scale of its own, or all have the same."""
    both = zip(array.scales, array.blocks, strict=True)
    return all(block[axis] == 1 or scale.shape[axis] == 1 for scale, block in both)


def _cells(group: Shape, cell: int) -> Shape:
    """The lengths of a block along the parts of an axis."""
    if len(group) == 1:
        return (cell,)
    return (1,) * len(group) if cell == 1 else group


def _of_scales(group: Shape, length: int) -> Shape:
    """How an axis of scales is split."""
    if len(group) == 1:
        return (length,)
    return (1,) * len(group) if length == 1 else group


def _with_axes_split(array: LazyArray, groups: Sequence[Shape]) -> LazyArray:
    """The same elements in the same order."""
    shape = tuple(length for group in groups for length in group)
    if isinstance(array, Stored):
        return replace(array, shape=shape)
    return Relayout(shape, array.dtype, array, tuple(groups), tuple(range(len(shape))), (1,) * len(shape))


def _keeps_order(atoms: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the permutation moves only atoms of length one, which moves nothing."""
    moved = [atom for atom in order if atoms[atom] != 1]
    return moved == sorted(moved)


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


class Permutation(NamedTuple):
    """What `ckpttools.array.relayout.Relayout` does to an array; its fields are those."""

    split: tuple[Shape, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]


def composed(inner: Permutation, outer: Permutation) -> Permutation | None:
    """The permutation that does `inner`, then `outer`; None where their atoms cut each other."""
    lengths = [length for group in inner.split for length in group]
    rest = iter(inner.order)
    groups = [[next(rest) for _ in range(count)] for count in inner.merge]
    # For each atom of `inner`, and of `outer`, the finer ones that it is made of: (atom of `inner`, number).
    of_inner: dict[int, list[int]] = {}
    of_outer: list[list[tuple[int, int]]] = []
    for group, split in zip(groups, outer.split, strict=True):
        finer = _refined([lengths[atom] for atom in group], split)
        if finer is None:
            return None
        built: list[list[tuple[int, int]]] = [[] for _ in split]
        for atom in group:
            of_inner[atom] = []
        for length, mine, theirs in finer:
            atom = group[mine]
            built[theirs].append((atom, len(of_inner[atom])))
            of_inner[atom].append(length)
        of_outer += built
    starts, count = {}, 0
    for atom in range(len(lengths)):
        starts[atom] = count
        count += len(of_inner[atom])
    order = [starts[atom] + number for item in outer.order for atom, number in of_outer[item]]
    atoms = iter(range(len(lengths)))
    split_of = [[length for _ in group for length in of_inner[next(atoms)]] for group in inner.split]
    turns = iter(outer.order)
    merge = [sum(len(of_outer[next(turns)]) for _ in range(count)) for count in outer.merge]
    return Permutation(tuple(map(tuple, split_of)), tuple(order), tuple(merge))


def _refined(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Lengths of which both lists of factors are products, outermost first; those of one are left out.

    Returns:
        (length, place in `first`, place in `second`); None where there are none.
    """
    result: list[tuple[int, int, int]] = []
    locations = [len(first) - 1, len(second) - 1]
    left = [1, 1]
    while True:
        for side, factors in enumerate((first, second)):
            while left[side] == 1 and locations[side] >= 0:
                left[side] = factors[locations[side]]
                locations[side] -= 1
        if left == [1, 1]:
            return result[::-1]
        least = min(left)
        if least < 1 or max(left) % least:
            return None
        result.append((least, locations[0] + 1, locations[1] + 1))
        left = [length // least for length in left]


def reshaped(source: LazyArray, shape: Shape) -> LazyArray:
    """`source` with axes merged into others, or with axes of length one that it lacks or has besides.

    Raises:
        ShapeError: an axis would have to be cut.
    """
    if shape == source.shape:
        return source
    merge = _merged(source.shape, shape)
    if isinstance(source, Stored):
        return replace(source, shape=shape)
    split = tuple((length,) for length in source.shape)
    return Relayout(shape, source.dtype, source, split, tuple(range(len(split))), merge)


def _merged(before: Shape, after: Shape) -> tuple[int, ...]:
    """For each axis after, how many of the axes before it is made of."""
    rest, counts = list(before), []
    for length in after:
        count, product = 0, 1
        while rest and (product < length or (product == length and rest[0] == 1)):
            product *= rest.pop(0)
            count += 1
        if product != length:
            break
        counts.append(count)
    if rest or len(counts) < len(after):
        raise ShapeError("axes can be merged, not cut", got=before, expected=after)
    return tuple(counts)
