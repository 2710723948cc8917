"""Reshape and transpose arrays lazily."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout
from ckpttools.core.region import Shape

# Maximum number of axes for which all orders are tried.
_MOST_AXES = 4


def reshape(array: LazyArray, shape: Shape) -> LazyArray | None:
    """Return the elements in C order under another shape; None if the two shapes have no common factors."""
    if prod(array.shape) != prod(shape) or 0 in shape:
        return None
    cuts = sorted({*_cuts(array.shape), *_cuts(shape)})
    if any(larger % smaller for smaller, larger in itertools.pairwise(cuts)):
        return None
    split, merge = _parts(array.shape, cuts), _parts(shape, cuts)
    atoms = sum(map(len, split))
    return relayout(array, split, range(atoms), [len(group) for group in merge])


def _cuts(shape: Shape) -> list[int]:
    """Return the number of elements below each boundary between axes, from the last axis on."""
    return [prod(shape[k:]) for k in range(len(shape) + 1)]


def _parts(shape: Shape, cuts: Sequence[int]) -> list[Shape]:
    """Return each axis as the lengths between the cuts within it."""
    parts: list[Shape] = []
    for axis, length in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        within = [cut for cut in cuts if inner <= cut <= inner * length]
        parts.append(tuple(b // a for a, b in itertools.pairwise(within))[::-1])
    return parts


def transposes(array: LazyArray, shape: Shape) -> Iterator[tuple[LazyArray, str]]:
    """Yield ways to transpose an array to `shape`, each with a description.

    Tries all orders of axes first, then treats the array as a matrix whose rows are its first axes.
    """
    rank = len(array.shape)
    plain = [(n,) for n in array.shape]
    if rank <= _MOST_AXES:
        for order in itertools.permutations(range(rank)):
            moved = [k for k in order if array.shape[k] != 1]
            if moved != sorted(moved) and tuple(array.shape[k] for k in order) == shape:
                yield relayout(array, plain, order, (1,) * rank), f"axes {', '.join(map(str, order))}"
    for rows in range(1, rank):
        order = (*range(rows, rank), *range(rows))
        turned = relayout(array, plain, order, (1,) * rank)
        built = reshape(turned, shape)
        if built is not None and turned.shape != shape:
            yield built, "as a matrix"
