"""Choose the chunk grid of an array, for its readers.

Measured with Orbax restoring an array of 2048 x 16 x 8192 onto 8 devices, GB/s by sharded axis: whole layers
as chunks 0.4 to 1.1, with the first axis also cut by 16 1.5 to 1.6 on either axis, Orbax's own grid with zstd
0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckpttools.core.region import Shape, ceil_div

MIB = 1 << 20
# Arrays up to this size are one chunk; larger arrays have no smaller chunks.
SMALLEST = 4 * MIB
LARGEST = 64 * MIB
# Hosts that load in parallel are mostly powers of two; no known mesh benefits from more pieces.
MOST_PIECES = 16


def chunk_shape(
    shape: Sequence[int], itemsize: int, single_axes: Sequence[int], largest: int | None = None
) -> Shape:
    """Return the grid for an array.

    Args:
        shape: shape of the array, without empty axes.
        itemsize: bytes of one element.
        single_axes: axes whose coordinates each get a chunk, such as layers and experts, so that stacking and
            unstacking only edit the index.
        largest: maximum bytes of a chunk, in whole elements; None for `LARGEST`.

    Returns:
        A chunk shape of `SMALLEST` to `LARGEST` bytes if the array and `largest` allow it.
    """
    smallest = SMALLEST if largest is None else min(SMALLEST, largest)
    largest = LARGEST if largest is None else min(LARGEST, largest)
    if prod(shape) * itemsize <= smallest:
        return tuple(shape)
    chunk = [1 if axis in single_axes else length for axis, length in enumerate(shape)]
    for axis in (axis for axis in range(len(shape)) if axis not in single_axes):
        nbytes = prod(chunk) * itemsize
        pieces = _even_pieces(shape[axis], nbytes // smallest)
        if nbytes // pieces > largest:
            pieces = min(shape[axis], max(pieces, ceil_div(nbytes, largest)))
        chunk[axis] = ceil_div(shape[axis], pieces)
        if pieces > 1 and prod(chunk) * itemsize <= largest:
            break
    return tuple(chunk)


def _even_pieces(length: int, limit: int) -> int:
    """Return the largest power of two that divides `length`, at most `limit` and `MOST_PIECES`."""
    pieces = 1
    while pieces * 2 <= min(limit, MOST_PIECES) and length % (pieces * 2) == 0:
        pieces *= 2
    return pieces
