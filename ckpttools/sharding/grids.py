"""Chunk grids for a mesh: what a device loads is made of whole chunks."""

from __future__ import annotations

from collections.abc import Collection
from math import isqrt, prod

from ckpttools.core.region import Shape
from ckpttools.formats.zarr.chunking import LARGEST, SMALLEST


def mesh_chunk(
    shape: Shape, shard: Shape, itemsize: int, stacked: Collection[int], limit: int | None = None
) -> Shape:
    """The chunks of an array.

    Args:
        shape: of the array, no axis empty.
        shard: what each device has of it; divides the shape.
        itemsize: bytes of one element.
        stacked: axes of layers and experts, along which it is cut first.
        limit: bytes of a chunk at most, in whole elements; None for `LARGEST`.

    Returns:
        The shard, or an even part of it; all of an array that is small.
    """
    limit = LARGEST if limit is None else limit
    if prod(shape) * itemsize <= min(SMALLEST, limit):
        return shape
    chunk = list(shard)
    # The outermost first: what is left of a row is then read in one go.
    order = [*sorted(stacked), *(axis for axis in range(len(shape)) if axis not in stacked)]
    for axis in order:
        while chunk[axis] > 1 and prod(chunk) * itemsize > limit:
            chunk[axis] //= _least_factor(chunk[axis])
    return tuple(chunk)


def _least_factor(number: int) -> int:
    """The least prime that divides a number above 1."""
    return next((item for item in range(2, isqrt(number) + 1) if number % item == 0), number)
