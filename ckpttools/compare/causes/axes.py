"""The same elements with axes in another order, or with another number of axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout, window
from ckpttools.compare.causes.base import (
    REMAP,
    Case,
    Cause,
    Claim,
    Hypothesis,
    detector,
    head_dims,
    zeros_like,
)
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape

_ORDER_NAMES = {"halves": "in halves", "interleaved": "interleaved"}


@detector("rope-layout", Claim.AXES_MOVED)
def rope_layout(case: Case) -> Iterator[Hypothesis]:
    """Detect rotary pairs that are adjacent on one side and half a head apart on the other."""
    a, b = case.alike
    for axis, length in enumerate(a.shape):
        for dim in head_dims(case, axis):
            for was, layout, parts in (
                ("halves", "interleaved", (2, dim // 2)),
                ("interleaved", "halves", (dim // 2, 2)),
            ):
                result = _with_parts_swapped(a, axis, (length // dim, *parts))
                text = (
                    f"rotary pairs of heads of {dim} are "
                    f"{_ORDER_NAMES[was]} in A, {_ORDER_NAMES[layout]} in B"
                )
                # Only a conversion from Hugging Face determines the layout of pairs.
                advice = (
                    "to get what A has, convert the Hugging Face model that B came from (or is) again, with "
                    f"{option('rope_layout', was)}"
                )
                yield Hypothesis(Cause("rope-layout", text, advice), ((result, b),))


def _with_parts_swapped(array: LazyArray, axis: int, parts: tuple[int, int, int]) -> LazyArray:
    """Swap the last two of three parts of an axis."""
    split: list[Shape] = [(length,) for length in array.shape]
    split[axis] = parts
    numbers = list(range(len(array.shape) + 2))
    numbers[axis + 1], numbers[axis + 2] = axis + 2, axis + 1
    return relayout(array, split, numbers, [3 if k == axis else 1 for k in range(len(array.shape))])


@detector("transposed", Claim.AXES_MOVED, shapes="any")
def transposed(case: Case) -> Iterator[Hypothesis]:
    """Detect axes in another order; several axes may count as one."""
    a, b = case.alike
    for result, order in transposes(a, b.shape):
        yield Hypothesis(Cause("transposed", f"B is A transposed ({order})", REMAP), ((result, b),))


@detector("reshaped", Claim.AXES_CHANGED, shapes="unequal")
def reshaped(case: Case) -> Iterator[Hypothesis]:
    """Detect the same elements in the same order under another shape."""
    a, b = case.alike
    result = reshape(a, b.shape)
    if result is not None:
        cause = Cause("reshaped", "the same elements in the same order, with other axes", REMAP)
        yield Hypothesis(cause, ((result, b),))


@detector("padded", Claim.AXES_CHANGED, shapes="unequal")
def padded(case: Case) -> Iterator[Hypothesis]:
    """Detect padding: one side is longer on one axis, as with a padded vocabulary."""
    a, b = case.alike
    axes = [k for k, (n, m) in enumerate(zip(a.shape, b.shape, strict=False)) if n != m]
    if len(a.shape) != len(b.shape) or len(axes) != 1:
        return
    (axis,) = axes
    side, long, short = ("A", a, b) if a.shape[axis] > b.shape[axis] else ("B", b, a)
    start = tuple(short.shape[axis] if k == axis else 0 for k in range(len(long.shape)))
    tail = window(long, start, tuple(n - s for n, s in zip(long.shape, start, strict=True)))
    head = (window(long, (0,) * len(start), short.shape), short)
    more = f"{side} has {tail.shape[axis]} more entries on axis {axis}"
    advice = f"{option('pad_vocab')} pads a vocabulary, and the conversion to Hugging Face cuts it again"
    yield Hypothesis(Cause("padded", f"{more}, all zeros", advice), (head, (tail, zeros_like(tail))))
    yield Hypothesis(Cause("padded", f"{more}, the others are equal", advice), (head,))


# Maximum number of axes for which all orders are tried.
_MAX_AXES = 4


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
    if rank <= _MAX_AXES:
        for order in itertools.permutations(range(rank)):
            moved = [k for k in order if array.shape[k] != 1]
            if moved != sorted(moved) and tuple(array.shape[k] for k in order) == shape:
                yield relayout(array, plain, order, (1,) * rank), f"axes {', '.join(map(str, order))}"
    for rows in range(1, rank):
        order = (*range(rows, rank), *range(rows))
        transposed = relayout(array, plain, order, (1,) * rank)
        result = reshape(transposed, shape)
        if result is not None and transposed.shape != shape:
            yield result, "as a matrix"
