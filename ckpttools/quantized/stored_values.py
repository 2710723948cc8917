"""What can be said of quantised weights only by looking: shapes that are stored, scales that are no numbers.

All scales are looked at when they are used. Here those are that are few, before any other byte is read, so
that one error lists all that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.logical import decode_of
from ckpttools.quantized.schemes.base import Weight

# So many elements share a scale where scales are few: 1/4096 of the bytes and less.
_FEW = 1024


def check_values(tree: Tree, weights: Iterable[Weight], dtype: DType | None = None) -> None:
    """Reads shapes that are stored, and of what lies on this machine scales where they are few.

    Args:
        tree: with the quantised weights.
        weights: they.
        dtype: of the numbers that are wanted; None for bfloat16.

    Raises:
        FormatError: a shape is another than that of the codes, or a scale makes no finite number; lists all.
        StorageError: they cannot be read.
    """
    arrays = {dotted(path): array for path, array in tree.arrays.items()}
    faults = [line for each in weights for line in _faults(each, arrays, dtype)]
    if faults:
        raise FormatError(
            "these quantised weights cannot be dequantised:" + listing(faults),
            place=tree.metadata.place or None,
            got=f"{scheme(says_quantized(tree.metadata.config))} ({FIELD})",
            hint="get the checkpoint again: its scales are damaged",
        )


def _faults(weight: Weight, arrays: dict[str, LazyArray], dtype: DType | None) -> Iterator[str]:
    if weight.stored_shape is not None:
        said = tuple(int(length) for length in arrays[weight.stored_shape].read())
        if said != weight.shape:
            yield f"{weight.stored_shape}: {list(said)}, where the codes are of {list(weight.shape)}"
    first = weight.scales[0]
    if prod(first.block) < _FEW or not all(_is_near(arrays[each.name]) for each in weight.scales):
        return
    decode = decode_of(weight, dtype)
    factors = decode.factors(
        [arrays[each.name].read().view(arrays[each.name].dtype.carrier) for each in weight.scales]
    )
    wrong = factors[decode.is_beyond(factors)]
    if wrong.size:
        names = ", ".join(each.name for each in weight.scales)
        yield f"{names}: {wrong.flat[0]:g}, of which no finite number of {decode.result} can be made"


def _is_near(array: LazyArray) -> bool:
    """Whether reading it takes no request to a store behind a network."""
    return all(getattr(source, "price", 1) == 1 for source in array.sources())
