"""The same elements in the same order under another shape."""

from __future__ import annotations

from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.relayout import Relayout
from ckpttools.array.stored import Stored
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Shape


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
