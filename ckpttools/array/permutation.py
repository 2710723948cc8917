"""Permutations of elements, expressed as splitting, permuting and merging axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, Shape


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
