"""What can be said of quantised weights only by looking: shapes that are stored, scales that are no numbers.

All scales are looked at when they are used. Here those are that are few, before any other byte is read, so
that one error lists all that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
    arrays = by_name(tree.arrays)
    listed = list(weights)
    cut, shapes = _shape_faults(listed, arrays)
    few = [each for each in listed if _is_few(each, arrays)]
    batches = (few[at : at + _TOGETHER] for at in range(0, len(few), _TOGETHER))
    damaged = [*shapes, *(line for batch in batches for line in _scale_faults(batch, arrays, dtype))]
    if cut or damaged:
        said = says_quantized(tree.metadata.config)
        raise FormatError(
            "these quantised weights cannot be dequantised:" + listing([*damaged, *cut]),
            place=tree.metadata.place or None,
            got=f"{scheme(said)} ({FIELD})",
            hint="get the checkpoint again: its scales are damaged"
            if damaged
            else remedy(said, is_read=False),
        )


def _shape_faults(weights: Iterable[Weight], arrays: Mapping[str, LazyArray]) -> tuple[list[str], list[str]]:
    """Lines for weights whose rows end within a word, which is not read, and for those of other shapes."""
    cut, other = [], []
    for weight in weights:
        if weight.stored_shape is None:
            continue
        said = tuple(int(length) for length in arrays[weight.stored_shape].read())
        if said == weight.shape:
            continue
        *rows, width = weight.shape
        if said[:-1] == (*rows,) and width - weight.packed < said[-1] < width:
            cut.append(f"{weight.name}: rows of {said[-1]} end within a code of {weight.packed}, not read")
        else:
            other.append(f"{weight.stored_shape}: {list(said)}, where the codes are of {list(weight.shape)}")
    return cut, other


def _is_few(weight: Weight, arrays: Mapping[str, LazyArray]) -> bool:
    """Whether its scales are few, and near."""
    return prod(weight.scales[0].block) >= _FEW and all(_is_near(arrays[s.name]) for s in weight.scales)


def _scale_faults(
    weights: Sequence[Weight], arrays: Mapping[str, LazyArray], dtype: DType | None
) -> Iterator[str]:
    """A line for each weight with a scale that makes no finite number."""
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
    for group in alike.values():
        decode = decode_of(group[0][0], dtype)
        if len(group[0][1]) == 1:
            together = np.concatenate([read[0].reshape(-1) for _, read in group])
            if not decode.is_beyond(decode.factors([together])).any():
                continue
        for weight, read in group:
            factors = decode.factors(read)
            wrong = factors[decode.is_beyond(factors)]
            if wrong.size:
                names = ", ".join(scale.name for scale in weight.scales)
                yield f"{names}: {wrong.flat[0]:g}, of which no finite {decode.result} can be made"


def _is_near(array: LazyArray) -> bool:
    """Whether reading it takes no request to a store behind a network."""
    return all(getattr(source, "price", 1) == 1 for source in array.sources())
