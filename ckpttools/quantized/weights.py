"""Detect quantized weights.

The numbers of a quantized weight are meaningless without its scales, so the two must not be separated, and
the numbers must not be used as the plain weight. `ckpttools.quantized.scales` finds the scales of each array,
and `ckpttools.quantized.auxiliary_tensors` finds the other auxiliary tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.quantized.config import (
    declared_quantization,
    exempt_modules,
    states_dtype,
)
from ckpttools.quantized.scales import (
    BLOCK_SCALE,
    ArrayLike,
    activation_scales,
    bare_name,
    is_narrow,
    is_plain,
    last_key,
    owner_words,
    scales_no_weight,
    scales_of,
    scales_word,
    split_name,
    words_of_key,
)

if TYPE_CHECKING:
    from ckpttools.quantized.schemes.base import Weight

# Used only for the wording of messages, because norms also have a `scale`.
_SCALE_ENDS = (
    BLOCK_SCALE,
    *("weight_scale", "weight_scale_2", "weight_global_scale", "kernel_scale", "_scales", ".scales"),
    *(".qzeros", "_zero_point", "absmax", ".SCB", "_amax"),
)
# Last words in the names of integer arrays that must be packed weights.
_WEIGHT_WORDS = frozenset(("weight", "qweight", "kernel", "embedding", "wo"))
# Words in the names of integers that are never quantized values: positions, random states, step counts, and
# DeepSeek V4's expert tables.
_NO_CODES = frozenset(("position", "positions", "token", "key", "rng", "rngs", "count", "step", "tid2eid"))
# Words for integers that select elements, which are not the quantized values of a full-precision weight next
# to them.
_INDICES = frozenset(("mask", "masks", "valid", "flag", "flags", "index", "indices", "idx", "id", "ids"))
# Maximum depth of weights in a linear layer, in keys below its module: `centroids.weight`.
_DEEPEST = 2


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight.

    Attributes:
        name: Name of the array.
        dtype: Stored dtype.
        scales: Names of the existing scales.
        others: Names of the other auxiliary tensors.
    """

    name: str
    dtype: DType
    scales: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[str, ...]:
        """Return the names of all auxiliary tensors."""
        return (*self.scales, *self.others)

    @property
    def is_bare(self) -> bool:
        """Return whether the scales are missing; packed numbers may use tables instead."""
        return not (self.scales or (self.others and not self.dtype.is_float))

    def __str__(self) -> str:
        beside = f"with {last_keys(self.scales)}" if self.scales else "without its scale"
        return f"{self.name}: {self.dtype}, {beside}"


@dataclass(frozen=True, slots=True)
class Weights:
    """The quantized weights of a checkpoint as supported schemes interpret them.

    Attributes:
        readable: The weights that can be dequantized, by the names of their arrays of quantized values.
        faults: One line for each other weight, and for each scale without a weight.
        left_out: Names of activation and cache scales that do not belong to a weight.
        is_whole: Whether all faults are unsupported schemes, with nothing missing or damaged.
    """

    readable: Mapping[str, Weight]
    faults: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_whole: bool = False


def last_keys(names: Iterable[str]) -> str:
    """Return the last keys of names, so that lines about many layers can be folded into one."""
    return ", ".join(last_key(name) for name in names)


def find_weights(
    arrays: Mapping[str, ArrayLike], config: Mapping[str, Any] | None = None
) -> dict[str, QuantizedWeight]:
    """Find the quantized weights among arrays.

    Quantized weights are:

    - arrays with scales, under any name;
    - unscaled arrays of float8 or less, unless `config` declares that the numbers are the weights themselves
      (its list of unquantized modules does not count);
    - integers with the name of a weight;
    - if `config` declares quantization, integer matrices with several arrays next to them, and the largest
      special array of every other module that has more than plain numbers, which represents a weight of an
      unknown scheme.

    Args:
        arrays: Arrays by name, with keys joined by dots.
        config: The model's `config.json`, or None.

    Returns:
        The quantized weights by name.
    """
    if not any(can_be_scaled(name, array.dtype) for name, array in arrays.items()):
        return {}
    # Few models are quantized.
    from ckpttools.quantized.auxiliary_tensors import auxiliary_tensors

    declared, scales = declared_quantization(config), scales_of(arrays)
    if not declared:
        scales = _without_indices(arrays, scales)
    narrow = {name for name, array in arrays.items() if _needs_scale(name, array)}
    packed = _packed(arrays) if declared else set()
    exempt = exempt_modules(declared)

    def is_exempt(name: str) -> bool:
        return _can_be_exempt(arrays[name], config) and exempt.has(name)

    bare = {name for name in narrow | packed if name not in scales and not is_exempt(name)}
    if not (declared or scales):
        bare = {name for name in bare if not states_dtype(config, arrays[name].dtype)}
    weights = {name: scales.get(name, ()) for name in arrays if name in scales or name in bare}
    whole = narrow | scales.keys() if declared else set()
    whole |= _of_layers(arrays, packed - whole)
    others = auxiliary_tensors(arrays, weights, whole) if weights else {}
    strange = _is_unclear(arrays, weights, others, is_exempt) if declared else set()
    if strange:
        weights |= dict.fromkeys(strange, ())
        others = auxiliary_tensors(arrays, weights, whole | _of_layers(arrays, strange))
    # Hundreds of weights may share thousands of auxiliary tensors, in the same tuple.
    several = {id(theirs): theirs for theirs in others.values()}
    left = {at: tuple(name for name in theirs if not exempt.has(name)) for at, theirs in several.items()}
    may_scale = {name for theirs in left.values() for name in theirs if scales_word(name)}
    return {
        name: _with_further_scales(
            QuantizedWeight(name, arrays[name].dtype, theirs, left.get(id(others.get(name)), ())),
            arrays,
            may_scale,
        )
        for name, theirs in weights.items()
        # Integers without auxiliary tensors are indices.
        if theirs or name in narrow or arrays[name].dtype.is_float or others.get(name)
    }


def _without_indices(
    arrays: Mapping[str, ArrayLike], scales: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Drop the scales of masks and indices next to a full-precision weight, unless a name connects them.

    A `scale` in their common module belongs to the module or to the weight.
    """
    doubted = {
        name
        for name, theirs in scales.items()
        if arrays[name].dtype.kind in ("int", "uint") and not _INDICES.isdisjoint(_words(name))
        if not any(_is_named_for(name, scale) for scale in theirs)
    }
    if not doubted:
        return dict(scales)
    full: dict[str, int] = {}
    for name, array in arrays.items():
        if len(array.shape) > 1 and is_plain(array.dtype) and not _WEIGHT_WORDS.isdisjoint(_words(name)[-1:]):
            module = split_name(name)[0]
            full[module] = max(full.get(module, 0), prod(array.shape))
    beside = {name for name in doubted if full.get(split_name(name)[0], 0) >= prod(arrays[name].shape) > 0}
    return {name: theirs for name, theirs in scales.items() if name not in beside}


def _is_named_for(name: str, scale: str) -> bool:
    """Return whether a scale is below an array or shares the words of its key, as in `mask_scale`."""
    below = scale.startswith(f"{bare_name(name)}.")
    return below or not {*owner_words(split_name(scale)[1])}.isdisjoint(_words(name))


def _words(name: str) -> tuple[str, ...]:
    return words_of_key(split_name(name)[1])


def _with_further_scales(
    weight: QuantizedWeight, arrays: Mapping[str, ArrayLike], may_scale: AbstractSet[str]
) -> QuantizedWeight:
    """Add scales below or above a weight's module, such as `X.weight_quantizer._scale`."""
    if may_scale.isdisjoint(weight.others):
        return weight
    module = split_name(weight.name)[0]
    further = [
        name
        for name in weight.others
        if name in may_scale and not activation_scales(words_of_key(_normal(name).removeprefix(module)))
        # A float8 array next to another one is not its weight.
        if not (weight.dtype.is_float and arrays[name].dtype == weight.dtype)
    ]
    others = tuple(name for name in weight.others if name not in further) if further else weight.others
    return replace(weight, scales=(*weight.scales, *further), others=others)


def _normal(name: str) -> str:
    """Return a name in the form of module names."""
    return ".".join(filter(None, split_name(name)))


def _packed(arrays: Mapping[str, ArrayLike]) -> set[str]:
    """Find integer matrices in modules with several float arrays, such as codes with their tables.

    Indices have only one such array: `position_ids` with `class_embedding`, or `relative_position_index` with
    its table.
    """
    count = Counter(split_name(name)[0] for name, array in arrays.items() if array.dtype.is_float)
    modules = {module for module, several in count.items() if several > 1}
    return {
        name
        for name, array in arrays.items()
        if len(array.shape) > 1 and array.dtype.kind in ("int", "uint") and not scales_word(name)
        if split_name(name)[0] in modules and can_be_codes(name, array)
    }


def can_be_codes(name: str, array: ArrayLike) -> bool:
    """Return whether a scheme may store such an array as a weight: integers, packed or narrow numbers."""
    key, is_float = split_name(name)[1], array.dtype.is_float
    stored = array.dtype.kind in ("int", "uint") or (is_float and not is_plain(array.dtype))
    # Integer biases are added unscaled, and scalars are counters.
    is_added = key == "bias" and not is_float
    is_number = not (array.shape or is_float)
    return stored and not (is_number or is_added) and _NO_CODES.isdisjoint(words_of_key(key))


def _is_unclear(
    arrays: Mapping[str, ArrayLike],
    weights: Mapping[str, tuple[str, ...]],
    others: Mapping[str, tuple[str, ...]],
    is_exempt: Callable[[str], bool],
) -> set[str]:
    """Return, for each module with unowned codes, the array with the most axes and elements."""
    known = {*weights}.union(*weights.values(), *others.values())
    largest: dict[str, tuple[tuple[int, int], str]] = {}
    for name, array in arrays.items():
        if name in known or not can_be_codes(name, array) or is_exempt(name):
            continue
        module, size = split_name(name)[0], (len(array.shape), prod(array.shape))
        if module not in largest or size > largest[module][0]:
            largest[module] = size, name
    return {name for _, name in largest.values()}


def _of_layers(arrays: Iterable[str], weights: Collection[str]) -> set[str]:
    """Return the weights whose modules are at most a layer, so that they own everything below.

    Larger modules contain other weights at deeper levels.
    """
    modules = {split_name(name)[0] for name in weights} - {""}
    for name in arrays if modules else ():
        module, key, _ = split_name(name)
        keys = module.split(".")
        far = len(keys) - _DEEPEST
        if name in weights or not _WEIGHT_WORDS.isdisjoint(words_of_key(key)):
            modules -= {".".join(keys[:stop]) for stop in range(1, far + 1)}
    return {name for name in weights if split_name(name)[0] in modules}


def can_be_scaled(name: str, dtype: DType) -> bool:
    """Return whether an array deserves a closer check; very few do, and checkpoints have 100,000 arrays."""
    return not is_plain(dtype) or bare_name(name).endswith(BLOCK_SCALE)


def _can_be_exempt(array: ArrayLike, config: Mapping[str, Any] | None) -> bool:
    """Return whether an unquantized module may have such an array.

    Only a configuration can distinguish float8 arrays that have lost their scales from intended float8
    arrays.
    """
    return not array.dtype.is_float or not is_narrow(array.dtype) or states_dtype(config, array.dtype)


def is_scale(name: str) -> bool:
    """Return whether an array with this name is a scale or another required auxiliary tensor."""
    return bare_name(name).endswith(_SCALE_ENDS) or scales_no_weight(name)


def _needs_scale(name: str, array: ArrayLike) -> bool:
    """Return whether an unscaled array is nevertheless a quantized weight."""
    if len(array.shape) < 2 or not is_narrow(array.dtype) or scales_word(name):
        return False
    words = words_of_key(bare_name(name).rpartition(".")[2])
    if array.dtype.is_float or not words:
        return array.dtype.is_float
    is_blocks = words[-1] == "blocks" and array.dtype.name == "uint8"
    is_expert = len(words) > 1 and words[-2] == "wi" and words[-1].isdigit()
    return is_blocks or is_expert or words[-1] in _WEIGHT_WORDS or words[-2:] == ("weight", "packed")
