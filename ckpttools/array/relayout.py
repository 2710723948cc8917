"""Arrays with their axes split, reordered and merged."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

from ckpttools.array import read_blocks
from ckpttools.array.lazy import Derived, LazyArray, ReadCost
from ckpttools.array.read_blocks import subview
from ckpttools.array.stored import Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, Shape, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class Relayout(Derived):
    """Another array with its axes split into atoms, the atoms reordered, and the axes merged again.

    Transposes, reshapes, head splits and the interleaving of RoPE are permutations of atoms.

    Attributes:
        split, order, merge: See `ckpttools.array.relayout.Permutation`.
    """

    split: tuple[Shape, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]

    @property
    def permutation(self) -> Permutation:
        """The permutation of the source's axes."""
        return Permutation(self.split, self.order, self.merge)

    @cached_property
    def _atoms(self) -> Shape:
        """The lengths of the source's atoms."""
        return self.permutation.atoms

    @cached_property
    def _target_groups(self) -> tuple[tuple[int, ...], ...]:
        """The source atoms of each target axis."""
        rest = iter(self.order)
        return tuple(tuple(next(rest) for _ in range(count)) for count in self.merge)

    def permuted(self, permutation: Permutation) -> LazyArray | None:
        # Combine both permutations, so that elements are moved only once.
        both = compose(self.permutation, permutation)
        return None if both is None else relayout(self.source, *both)

    @property
    def has_transposed_matrices(self) -> bool:
        """Whether elements adjacent in the source are adjacent along the second-to-last axis."""
        innermost = max((atom for atom in self.order if self._atoms[atom] != 1), default=None)
        return self.ndim > 1 and innermost in self._target_groups[-2]

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for part, atoms in self._atom_boxes(region):
            view = subview(out, part.relative_to(region))
            self._read_box(atoms, view.reshape([atoms.shape[a] for a in self.order]), scratch)

    def _atom_boxes(self, region: Region) -> Iterator[tuple[Region, Region]]:
        """Split a region into boxes of atoms; yield each part with its box, in the source's atom order."""
        groups = self._target_groups
        lengths = tuple(tuple(self._atoms[a] for a in group) for group in groups)
        ranges = zip(region.start, region.stop, strict=True)
        choices = [list(split_into_boxes(n, a, b)) for n, (a, b) in zip(lengths, ranges, strict=True)]
        for picked in itertools.product(*choices):
            start, stop = [0] * len(self._atoms), [0] * len(self._atoms)
            for group, (_, box) in zip(groups, picked, strict=True):
                for atom, a, b in zip(group, box.start, box.stop, strict=True):
                    start[atom], stop[atom] = a, b
            part = Region(tuple(run[0] for run, _ in picked), tuple(run[1] for run, _ in picked))
            yield part, Region(tuple(start), tuple(stop))

    def _read_box(self, atoms: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read one box of atoms through read blocks of the source; `out` has the target's atom order."""
        from ckpttools.array.copy import copy

        if self._read_into_target(atoms, out, scratch):
            return
        carrier = self.dtype.carrier
        count = read_blocks.elements(carrier.itemsize)
        for read in itertools.chain.from_iterable(
            split_evenly(cover, count) for cover in self._cover_boxes(atoms)
        ):
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

    def _read_into_target(self, atoms: Region, out: np.ndarray, scratch: Scratch) -> bool:
        """Let the source write directly into `out`, without moving elements; return whether it did."""
        if not (self.source.can_read_in_any_order and self._cover(atoms) == atoms):
            return False
        view = out.transpose(sorted(range(out.ndim), key=self.order.__getitem__))
        rest = iter(zip(view.shape, view.strides, strict=True))
        if not all(_is_one_axis([next(rest) for _ in group]) for group in self.split):
            return False
        region = self._source_region(atoms)
        self.source.read_in_any_order(region, view.reshape(region.shape), scratch)
        return True

    def _cover_boxes(self, atoms: Region) -> Iterator[Region]:
        """Yield boxes that cover `atoms` and whose read blocks are all boxes of the source.

        This is a single box, which may cover more than `atoms`. If elements are computed, it is several boxes
        that cover exactly `atoms`, because elements that are counted must be read only once.
        """
        cover = self._cover(atoms)
        if cover == atoms or not self.source.is_computed:
            yield cover
            return
        wider = next(a for a in range(atoms.rank) if cover.shape[a] != atoms.shape[a])
        first = max(start for start in self._group_starts if start <= wider)
        free = next(a for a in range(first, wider) if atoms.shape[a] > 1)
        for piece in atoms.pieces(free, 1):
            yield from self._cover_boxes(piece)

    def _cover(self, atoms: Region) -> Region:
        """Return the smallest box around `atoms` whose read blocks are all boxes of the source."""
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
        """Return the region of the source that a box of atoms spans."""
        starts: list[int] = []
        stops: list[int] = []
        for group, first in zip(self.split, self._group_starts, strict=True):
            part = slice(first, first + len(group))
            starts.append(flat_index(atoms.start[part], group))
            stops.append(flat_index([b - 1 for b in atoms.stop[part]], group) + 1)
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
    """Reorder the atoms of `source`; return `source` itself if nothing changes.

    Args:
        source: The array to reorder.
        split, order, merge: As for `Permutation`.

    Raises:
        ShapeError: The atoms do not multiply to the source's shape, or `order` is not a permutation.
    """
    permutation = Permutation(tuple(split), tuple(order), tuple(merge))
    permutation.check(source.shape)
    if permutation.shape == source.shape and permutation.keeps_order:
        return source
    permuted = source.permuted(permutation)
    return Relayout(permutation.shape, source.dtype, source, *permutation) if permuted is None else permuted


def _is_one_axis(atoms: Sequence[tuple[int, int]]) -> bool:
    """Return whether axes, given as (length, stride), form a single axis in memory."""
    long = [atom for atom in atoms if atom[0] > 1]
    return all(outer == length * inner for (_, outer), (length, inner) in itertools.pairwise(long))


def transpose_axes(array: LazyArray, order: Sequence[int]) -> LazyArray:
    """Reorder the axes of `array`."""
    return relayout(array, [(length,) for length in array.shape], order, [1] * array.ndim)


def swap_last_axes(array: LazyArray) -> LazyArray:
    """Swap the last two axes of `array`."""
    *outer, rows, columns = range(array.ndim)
    return transpose_axes(array, (*outer, columns, rows))


def reshape_in_order(source: LazyArray, same: Permutation) -> LazyArray:
    """Reshape `source` with a permutation that keeps the order of elements."""
    shape = same.shape
    return source if shape == source.shape else Relayout(shape, source.dtype, source, *same)


def split_axes(array: LazyArray, groups: Sequence[Shape]) -> LazyArray:
    """Split each axis of an array into a group of axes; the elements keep their order."""
    shape = tuple(length for group in groups for length in group)
    if isinstance(array, Stored):
        return replace(array, shape=shape)
    return Relayout(shape, array.dtype, array, tuple(groups), tuple(range(len(shape))), (1,) * len(shape))


def reshape_array(source: LazyArray, shape: Shape) -> LazyArray:
    """Merge axes of `source`, and add or remove axes of length one.

    Raises:
        ShapeError: An axis would have to be split.
    """
    if shape == source.shape:
        return source
    merge = _merge_counts(source.shape, shape)
    if isinstance(source, Stored):
        return replace(source, shape=shape)
    split = tuple((length,) for length in source.shape)
    return Relayout(shape, source.dtype, source, split, tuple(range(len(split))), merge)


def _merge_counts(before: Shape, after: Shape) -> tuple[int, ...]:
    """Return the number of old axes that each new axis consists of."""
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
        raise ShapeError("axes can be merged, but not split", got=before, expected=after)
    return tuple(counts)


class Permutation(NamedTuple):
    """Splits axes into atoms, reorders the atoms, and merges them into new axes.

    Attributes:
        split: The lengths of the atoms of each source axis, outermost first; their product is the axis
            length.
        order: The index of each target atom among all source atoms.
        merge: The number of target atoms that each target axis consists of.
    """

    split: tuple[Shape, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]

    @property
    def atoms(self) -> Shape:
        """Lengths of the atoms, in source order."""
        return tuple(length for group in self.split for length in group)

    @property
    def shape(self) -> Shape:
        """The shape of the target."""
        atoms, order = self.atoms, iter(self.order)
        return tuple(prod(atoms[next(order)] for _ in range(count)) for count in self.merge)

    @property
    def keeps_order(self) -> bool:
        """Whether elements keep their order, because only atoms of length one move."""
        atoms = self.atoms
        moved = [atom for atom in self.order if atoms[atom] != 1]
        return moved == sorted(moved)

    def check(self, shape: Shape) -> None:
        """Raise an error unless an array of `shape` can be permuted this way.

        Raises:
            ShapeError: The atoms do not multiply to the shape, or `order` is not a permutation.
        """
        if tuple(map(prod, self.split)) != shape:
            raise ShapeError(
                "the atoms of an axis must multiply to its length", got=self.split, expected=shape
            )
        atoms = self.atoms
        if sorted(self.order) != list(range(len(atoms))) or sum(self.merge) != len(self.order):
            raise ShapeError("not a permutation of the atoms", got=self.order, expected=len(atoms))


def compose(first: Permutation, second: Permutation) -> Permutation | None:
    """Return the permutation that applies `first`, then `second`.

    Returns:
        None if an atom of one permutation partly overlaps an atom of the other.
    """
    lengths = first.atoms
    order = iter(first.order)
    groups = [[next(order) for _ in range(count)] for count in first.merge]
    # Split both into common atoms: the lengths for each atom of `first`, and for each atom of `second` pairs
    # (atom of `first`, index within it).
    finer_of_first: dict[int, list[int]] = {}
    finer_of_second: list[list[tuple[int, int]]] = []
    for group, split in zip(groups, second.split, strict=True):
        factors = _common_factors([lengths[atom] for atom in group], split)
        if factors is None:
            return None
        atoms_of_axis: list[list[tuple[int, int]]] = [[] for _ in split]
        for atom in group:
            finer_of_first[atom] = []
        for length, first_index, second_index in factors:
            atom = group[first_index]
            atoms_of_axis[second_index].append((atom, len(finer_of_first[atom])))
            finer_of_first[atom].append(length)
        finer_of_second += atoms_of_axis
    starts, count = {}, 0
    for atom in range(len(lengths)):
        starts[atom] = count
        count += len(finer_of_first[atom])
    both = [starts[atom] + index for position in second.order for atom, index in finer_of_second[position]]
    atoms = iter(range(len(lengths)))
    finer = [tuple(length for _ in group for length in finer_of_first[next(atoms)]) for group in first.split]
    positions = iter(second.order)
    merge = [sum(len(finer_of_second[next(positions)]) for _ in range(count)) for count in second.merge]
    return Permutation(tuple(finer), tuple(both), tuple(merge))


def _common_factors(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Factor two lists of lengths into common factors, outermost first, without factors of one.

    Returns:
        A list of (length, index in `first`, index in `second`); None if there is no common factorization.
    """
    factors: list[tuple[int, int, int]] = []
    positions = [len(first) - 1, len(second) - 1]
    rest = [1, 1]
    while True:
        for side, lengths in enumerate((first, second)):
            while rest[side] == 1 and positions[side] >= 0:
                rest[side] = lengths[positions[side]]
                positions[side] -= 1
        if rest == [1, 1]:
            return factors[::-1]
        smaller = min(rest)
        if smaller < 1 or max(rest) % smaller:
            return None
        factors.append((smaller, positions[0] + 1, positions[1] + 1))
        rest = [length // smaller for length in rest]


def flat_index(index: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the C-order position of a multi-index."""
    position = 0
    for coordinate, length in zip(index, lengths, strict=True):
        position = position * length + coordinate
    return position


def split_into_boxes(
    lengths: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, int], Region]]:
    """Split a range along a merged axis into ranges that are boxes of its atoms.

    Args:
        lengths: The lengths of the atoms that the axis consists of.
        start, stop: The range to split.

    Yields:
        Pairs ((start, stop), box of atoms).
    """
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
        for (a, b), rest in split_into_boxes(lengths[1:], offset, offset + end - position):
            box = rest.inserted(0, outer, outer + 1)
            yield (outer * inner + a, outer * inner + b), box
        position = end
