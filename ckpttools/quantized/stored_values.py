"""What can be said of quantised weights only by looking: scales that are no numbers.

All scales are looked at when they are used. Here those are that lie on this machine, before any other byte is
read: of MXFP4 1/17 of the bytes, of blocks of 128 x 128 next to none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Region, split_to
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.damaged_scales import are_near, damaged_error, of_no_numbers
from ckpttools.quantized.decoding import Decode, Like
from ckpttools.quantized.logical import decode_of
from ckpttools.quantized.schemes.base import Weight

if TYPE_CHECKING:
    import numpy as np

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
    tree: Tree, weights: Iterable[Weight], dtype: DType | None = None, like: Like = "float32"
) -> None:
    """Reads all scales that lie on this machine.

    Args:
        tree: with the quantised weights.
        weights: those whose scales are read.
        dtype: of the numbers that are wanted; None for bfloat16.
        like: how products are rounded.

    Raises:
        DamagedScalesError: a scale makes no finite number; lists all.
        StorageError: they cannot be read.
    """
    found = value_faults(tree, weights, dtype, like, signs=False)
    said = says_quantized(tree.metadata.config)
    if found.damaged:
        raise damaged_error(
            found.damaged,
            place=tree.metadata.place or None,
            got=f"{scheme(said)} ({FIELD})" if said else None,
        )


def value_faults(
    tree: Tree,
    weights: Iterable[Weight],
    dtype: DType | None = None,
    like: Like = "float32",
    *,
    signs: bool = True,
) -> ValueFaults:
    """What `check_values` refuses, and what is odd besides; arguments as there.

    Args:
        signs: whether scales that are zero or negative are told as well.

    Raises:
        StorageError: they cannot be read.
    """
    arrays = by_name(tree.arrays)
    looked_at = (each for each in weights if are_near(arrays[scale.name] for scale in each.scales))
    damaged: dict[str, str] = {}
    not_positive: dict[str, str] = {}
    for parts in _together(looked_at, arrays):
        beyond, odd = _scale_faults(parts, arrays, partial(decode_of, dtype=dtype, like=like), signs)
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


def _scale_faults(
    parts: Sequence[_Part],
    arrays: Mapping[str, LazyArray],
    decode_of: Callable[[Weight], Decode],
    signs: bool,
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
        of_scales = tuple((scale.dtype.name, scale.divides) for scale in each.scales)
        kind = each.numbers, of_scales, each.zero_points is not None
        alike[kind].append((each, read))
    beyond: dict[str, str] = {}
    odd: dict[str, str] = {}
    for group in alike.values():
        decode = decode_of(group[0][0])
        for weight, factors in _odd_factors(group, decode, signs):
            wrong = decode.beyond(factors)
            if wrong.size:
                beyond.setdefault(weight.name, f"{weight.scaled_by}: {wrong[0]:g}, {of_no_numbers(decode)}")
            if signs and (low := factors[factors <= 0]).size:
                odd.setdefault(weight.name, f"{weight.scaled_by}: {low[0]:g}")
    return beyond, odd


def _odd_factors(
    group: Sequence[tuple[Weight, list[np.ndarray]]], decode: Decode, signs: bool
) -> Iterator[tuple[Weight, np.ndarray]]:
    """What numbers are multiplied by, of weights alike and their scales; of none where all are sound."""
    import numpy as np

    # All at once: tens of thousands of experts have a few scales each.
    is_one = len(group) == 1 or len(group[0][1]) > 1
    together = None if is_one else [np.concatenate([read[0].reshape(-1) for _, read in group])]
    if together is None or not _are_sound(together, decode, signs):
        odd = ((weight, read) for weight, read in group if not _are_sound(read, decode, signs))
        yield from ((weight, decode.factors(read)) for weight, read in odd)


def _are_sound(scales: Sequence[np.ndarray], decode: Decode, signs: bool) -> bool:
    """Whether carriers of scales make finite numbers, and positive ones if `signs`."""
    first, *others = scales
    factors = decode.factors([_extremes(first.reshape(-1), decode.scales[0]), *others])
    return not (decode.beyond(factors).size or (signs and factors.min(initial=1) <= 0))


def _extremes(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Those of least and largest magnitude, without signs, and one with its sign if any has one.

    Of MXFP4's exponents 0.3 ns each with reading, where making numbers of them takes 1.5.
    """
    import numpy as np

    if dtype.layout is None or not dtype.layout.in_order or not carriers.size:
        return carriers
    magnitude = carriers.dtype.type((1 << (dtype.bits - 1)) - 1)
    magnitudes = carriers & magnitude if dtype.layout.sign else carriers
    return np.array([magnitudes.min(), magnitudes.max(), carriers.max()], carriers.dtype)
