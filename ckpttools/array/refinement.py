"""Two ways to split axes as one: what lets a permutation of a permutation be one permutation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttools.core.region import Shape


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
        made: list[list[tuple[int, int]]] = [[] for _ in split]
        for atom in group:
            of_inner[atom] = []
        for length, mine, theirs in finer:
            atom = group[mine]
            made[theirs].append((atom, len(of_inner[atom])))
            of_inner[atom].append(length)
        of_outer += made
    starts, count = {}, 0
    for atom in range(len(lengths)):
        starts[atom] = count
        count += len(of_inner[atom])
    order = [starts[atom] + number for each in outer.order for atom, number in of_outer[each]]
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
    found: list[tuple[int, int, int]] = []
    places = [len(first) - 1, len(second) - 1]
    left = [1, 1]
    while True:
        for side, factors in enumerate((first, second)):
            while left[side] == 1 and places[side] >= 0:
                left[side] = factors[places[side]]
                places[side] -= 1
        if left == [1, 1]:
            return found[::-1]
        least = min(left)
        if least < 1 or max(left) % least:
            return None
        found.append((least, places[0] + 1, places[1] + 1))
        left = [length // least for length in left]
