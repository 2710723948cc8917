"""FP8 as MaxText keeps it: beside each quantised leaf its scales, `kernel` and `kernel_scale`.

The grid of scales has the axes of the kernel, each with as many elements as it has blocks; an axis that is
shorter than a block has one for each of its coordinates. Scales of whole arrays have no axes but those on
which layers and experts are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.core.region import Shape
from ckpttools.mapping.blocks import Block
from ckpttools.mapping.row import Row
from ckpttools.mapping.scale_grids import Fits

SCALE = "_scale"
# The dtypes that MaxText knows as quantised.
CODES = frozenset(("float8_e4m3fn", "float8_e5m2"))


def scale_pairs(arrays: Mapping[str, LazyArray]) -> dict[str, str]:
    """The quantised leaves of a MaxText tree -> their scales.

    Args:
        arrays: by dotted names, without what NNX appends.
    """
    return {
        name: name + SCALE
        for name, array in arrays.items()
        if array.dtype.name in CODES and name + SCALE in arrays
    }


def fits_maxtext(block: int) -> Fits:
    """Says why MaxText has no place for a grid of scales.

    Args:
        block: MaxText's `weight_block_size`.
    """

    def why(row: Row, sizes: Mapping[str, int], grid: Shape) -> str:
        cut = {axis for group in row.right.groups[-2:] for axis in group}
        lengths = row.left.shape(sizes)
        for group, length, there in zip(row.left.groups, lengths, grid, strict=True):
            wanted = length if length < block else length // block
            if there != wanted and not cut.isdisjoint(group):
                axes = " ".join(group)
                return (
                    f"MaxText has {wanted} scales on {axes} {length} with weight_block_size={block}, "
                    f"and blocks of {block} make {there}"
                )
        return ""

    return why


def block_of(arrays: Mapping[str, LazyArray], pairs: Mapping[str, str]) -> int | None:
    """The size of blocks that scales show: the most neighbours with one scale; None for one scale each.

    Args:
        arrays, pairs: as of `scale_pairs`.
    """
    sizes = [
        length // count
        for name, scale in pairs.items()
        if arrays[scale].ndim == arrays[name].ndim
        for length, count in zip(arrays[name].shape, arrays[scale].shape, strict=True)
        if count
    ]
    return max(sizes, default=None)


def square(block: Block | None) -> int | None:
    """The block size that MaxText is told; None for blocks that are not square."""
    return block[0] if block and block[0] == block[1] else None
