"""What can be said of quantised weights only by looking: scales that are no numbers.

All scales are looked at when they are used. Here those are that are few, before any other byte is read, so
that one error lists all that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region, split_to
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.decoding import Decode
from ckpttools.quantized.logical import decode_of
from ckpttools.quantized.schemes.base import Weight

if TYPE_CHECKING:
    import numpy as np

# So many elements share a scale where scales are few: 1/4096 of the bytes and less.
_FEW = 1024
# Scales that are looked at together, of many weights or of a part of one. Those of 45,000 weights took 3 s
# one by one, and 0.9 GB all at once.
_TOGETHER = 1 << 20


_Part = tuple[Weight, Region]


@dataclass(frozen=True, slots=True)
class ValueFaults:
    """What is wrong with the values of quantised weights, a line for each.

    Attributes:
        damaged: scales that make no finite numbers.
        not_positive: scales that are zero or negative, with which numbers vanish or change their signs.
    """

    damaged: tuple[str, ...]
    not_positive: tuple[str, ...]


def check_values(
    tree: Tree, weights: Iterable[Weight], dtype: DType | None = None, *, are_kept: bool = False
) -> None:
    """Reads scales where they are few, of what lies on this machine.

    Args:
        tree: with the quantised weights.
        weights: they.
        dtype: of the numbers that are wanted; None for bfloat16.
        are_kept: whether no number is made of them, so that scales are looked at here or nowhere: of these
            many are read as well.

    Raises:
        FormatError: a scale makes no finite number; lists all.
        StorageError: they cannot be read.
    """
    found = value_faults(tree, weights, dtype, are_kept=are_kept, signs=False)
    said = says_quantized(tree.metadata.config)
    if found.damaged:
        raise FormatError(
            "these quantised weights cannot be dequantised:" + listing(list(found.damaged)),
            place=tree.metadata.place or None,
            got=f"{scheme(said)} ({FIELD})" if said else None,
            hint="get the checkpoint again: its scales are damaged",
        )


def value_faults(
    tree: Tree,
    weights: Iterable[Weight],
    dtype: DType | None = None,
    *,
    are_kept: bool = False,
    signs: bool = True,
) -> ValueFaults:
    """What `check_values` refuses, and what is odd besides; arguments as there.

    Args:
        signs: whether scales that are zero or negative are told as well.

    Raises:
        StorageError: they cannot be read.
    """
    arrays = by_name(tree.arrays)
    looked_at = (each for each in weights if (are_kept or _is_few(each)) and _are_near(each, arrays))
    damaged: dict[str, str] = {}
    not_positive: dict[str, str] = {}
    for parts in _together(looked_at, arrays):
        beyond, odd = _scale_faults(parts, arrays, dtype, signs)
        damaged |= {name: line for name, line in beyond.items() if name not in damaged}
        not_positive |= {name: line for name, line in odd.items() if name not in not_positive}
    return ValueFaults(tuple(damaged.values()), tuple(not_positive.values()))


def _together(weights: Iterable[Weight], arrays: Mapping[str, LazyArray]) -> Iterator[list[_Part]]:
    """Weights and the regions of their first arrays of scales, so many that they fit into memory."""
    parts: list[_Part] = []
    size = 0
    for each in weights:
        for region in split_to(Region.whole(arrays[each.scales[0].name].shape), _TOGETHER):
            if parts and size + region.size > _TOGETHER:
                yield parts
                parts, size = [], 0
            parts.append((each, region))
            size += region.size
    if parts:
        yield parts


def _is_few(weight: Weight) -> bool:
    return prod(weight.scales[0].block) >= _FEW


def _are_near(weight: Weight, arrays: Mapping[str, LazyArray]) -> bool:
    """Whether reading its scales takes no request to a store behind a network."""
    sources = (source for each in weight.scales for source in arrays[each.name].sources())
    return all(getattr(source, "price", 1) == 1 for source in sources)


def _scale_faults(
    parts: Sequence[_Part], arrays: Mapping[str, LazyArray], dtype: DType | None, signs: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Lines for weights with scales that make no finite number, and for those with some below or at zero."""
    import numpy as np

    from ckpttools.array.scratch import Scratch

    named = [arrays[scale.name] for each, _ in parts for scale in each.scales]
    scratch = Scratch(max((each.scratch_bytes for each in named), default=0))

    def carriers(name: str, region: Region) -> np.ndarray:
        made = np.empty(region.shape, arrays[name].dtype.carrier)
        arrays[name].read_into(region, made, scratch)
        return made

    alike: defaultdict[Hashable, list[tuple[Weight, list[np.ndarray]]]] = defaultdict(list)
    for each, region in parts:
        first, *others = (scale.name for scale in each.scales)
        # All but the first have one element.
        read = [carriers(first, region), *(carriers(o, Region.whole(arrays[o].shape)) for o in others)]
        kind = each.numbers, tuple((scale.dtype.name, scale.divides) for scale in each.scales)
        alike[kind].append((each, read))
    beyond: dict[str, str] = {}
    odd: dict[str, str] = {}
    for group in alike.values():
        decode = decode_of(group[0][0], dtype)
        for weight, factors in _odd_factors(group, decode, signs):
            wrong, low = factors[decode.is_beyond(factors)], factors[factors <= 0] if signs else factors[:0]
            names = ", ".join(scale.name for scale in weight.scales)
            if wrong.size:
                line = f"{names}: {wrong.flat[0]:g}, of which no finite {decode.result} can be made"
                beyond.setdefault(weight.name, line)
            if low.size:
                odd.setdefault(weight.name, f"{names}: {low.flat[0]:g}")
    return beyond, odd


def _odd_factors(
    group: Sequence[tuple[Weight, list[np.ndarray]]], decode: Decode, signs: bool
) -> Iterator[tuple[Weight, np.ndarray]]:
    """What numbers are multiplied by, of weights alike and their scales; of none where all are sound."""
    import numpy as np

    if len(group[0][1]) > 1:
        yield from ((weight, decode.factors(read)) for weight, read in group)
        return
    # All at once: tens of thousands of experts have a few scales each.
    ends = np.cumsum([read[0].size for _, read in group])
    factors = decode.factors([np.concatenate([read[0].reshape(-1) for _, read in group])])
    if decode.is_beyond(factors).any() or (signs and (factors <= 0).any()):
        yield from zip((weight for weight, _ in group), np.split(factors, ends[:-1]), strict=True)
