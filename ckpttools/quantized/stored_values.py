"""What can be said of quantised weights only by looking: shapes that are stored, scales that are no numbers.

All scales are looked at when they are used. Here those are that are few, before any other byte is read, so
that one error lists all that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.logical import decode_of
from ckpttools.quantized.refusals import remedy
from ckpttools.quantized.schemes.base import Weight

# So many elements share a scale where scales are few: 1/4096 of the bytes and less.
_FEW = 1024
# Weights whose scales are looked at together: one by one 45,000 took 3 s, all at once 0.9 GB.
_TOGETHER = 512


@dataclass(frozen=True, slots=True)
class ValueFaults:
    """What is wrong with the values of quantised weights, a line for each.

    Attributes:
        damaged: shapes that are not those of the codes, scales that make no finite numbers.
        cut: weights whose rows end within a code, which is not read.
        not_positive: scales that are zero or negative, with which numbers vanish or change their signs.
    """

    damaged: tuple[str, ...]
    cut: tuple[str, ...]
    not_positive: tuple[str, ...]


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
    found = value_faults(tree, weights, dtype)
    if found.cut or found.damaged:
        said = says_quantized(tree.metadata.config)
        raise FormatError(
            "these quantised weights cannot be dequantised:" + listing([*found.damaged, *found.cut]),
            place=tree.metadata.place or None,
            got=f"{scheme(said)} ({FIELD})",
            hint="get the checkpoint again: its scales are damaged"
            if found.damaged
            else remedy(said, is_read=False),
        )


def value_faults(tree: Tree, weights: Iterable[Weight], dtype: DType | None = None) -> ValueFaults:
    """What `check_values` refuses, and what is odd besides; arguments as there.

    Raises:
        StorageError: they cannot be read.
    """
    arrays = by_name(tree.arrays)
    listed = list(weights)
    cut, damaged = _shape_faults(listed, arrays)
    few = [each for each in listed if _is_few(each, arrays)]
    not_positive: list[str] = []
    for at in range(0, len(few), _TOGETHER):
        beyond, odd = _scale_faults(few[at : at + _TOGETHER], arrays, dtype)
        damaged += beyond
        not_positive += odd
    return ValueFaults(tuple(damaged), tuple(cut), tuple(not_positive))


def _shape_faults(weights: Iterable[Weight], arrays: Mapping[str, LazyArray]) -> tuple[list[str], list[str]]:
    """Lines for weights whose rows end within a word, which is not read, and for those of other shapes."""
    cut, other = [], []
    stored = {each.stored_shape: each for each in weights if each.stored_shape is not None}

    def place(name: str) -> tuple[str, int]:
        array = arrays[name]
        return array.first_byte(Region.whole(array.shape))

    # As they lie in files, which have them side by side: behind a network one request brings thousands.
    for name in sorted(stored, key=place):
        weight, said = stored[name], tuple(int(length) for length in arrays[name].read())
        if said == weight.shape:
            continue
        *rows, width = weight.shape
        if said[:-1] == (*rows,) and width - weight.packed < said[-1] < width:
            cut.append(f"{weight.name}: rows of {said[-1]} end within a code of {weight.packed}, not read")
        else:
            other.append(f"{name}: {list(said)}, where the codes are of {list(weight.shape)}")
    return cut, other


def _is_few(weight: Weight, arrays: Mapping[str, LazyArray]) -> bool:
    """Whether its scales are few, and near."""
    return prod(weight.scales[0].block) >= _FEW and all(_is_near(arrays[s.name]) for s in weight.scales)


def _scale_faults(
    weights: Sequence[Weight], arrays: Mapping[str, LazyArray], dtype: DType | None
) -> tuple[list[str], list[str]]:
    """Lines for weights with scales that make no finite number, and for those with some below or at zero."""
    import numpy as np

    from ckpttools.array.scratch import Scratch

    named = [arrays[scale.name] for each in weights for scale in each.scales]
    scratch = Scratch(max((each.scratch_bytes for each in named), default=0))

    def carriers(name: str) -> np.ndarray:
        array = arrays[name]
        made = np.empty(array.shape, array.dtype.carrier)
        array.read_into(Region.whole(array.shape), made, scratch)
        return made

    alike: defaultdict[Hashable, list[tuple[Weight, list[np.ndarray]]]] = defaultdict(list)
    for each in weights:
        kind = each.numbers, tuple((scale.dtype.name, scale.divides) for scale in each.scales)
        alike[kind].append((each, [carriers(scale.name) for scale in each.scales]))
    beyond, odd = [], []
    for group in alike.values():
        decode = decode_of(group[0][0], dtype)
        if len(group[0][1]) == 1:
            together = np.concatenate([read[0].reshape(-1) for _, read in group])
            factors = decode.factors([together])
            if not (decode.is_beyond(factors) | (factors <= 0)).any():
                continue
        for weight, read in group:
            factors = decode.factors(read)
            wrong, low = factors[decode.is_beyond(factors)], factors[factors <= 0]
            names = ", ".join(scale.name for scale in weight.scales)
            if wrong.size:
                beyond.append(f"{names}: {wrong.flat[0]:g}, of which no finite {decode.result} can be made")
            if low.size:
                odd.append(f"{names}: {low.flat[0]:g}")
    return beyond, odd


def _is_near(array: LazyArray) -> bool:
    """Whether reading it takes no request to a store behind a network."""
    return all(getattr(source, "price", 1) == 1 for source in array.sources())
