"""Detect quantized weights.

The numbers of a quantized weight are meaningless without its scales, so the two must not be separated,
and the numbers must not be used as the plain weight. `ckpttools.quantized.scales` finds the scales of
each array.

Shapes, column orders, code tables and activation scales differ between schemes, and loaders need all of
them, so a weight owns its full module. The module's `bias` is the exception: it is added to the result,
is the same without quantization, and loaders create one if the model has it. If a module has several
weights, each owns its own tensors (`up_proj_blocks`, `up_proj_bias`); `weight_bias` belongs to the
quantized values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.quantized.config import declared_quantization, exempt_modules, states_dtype
from ckpttools.quantized.scales import (
    BLOCK_SCALE,
    OBJECT,
    ArrayLike,
    activation_scales,
    bare_name,
    has_scale_word,
    is_narrow,
    is_plain,
    last_key,
    owner_words,
    scales_no_weight,
    scales_of,
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
_INTEGER_WORDS = frozenset(
    ("position", "positions", "token", "key", "rng", "rngs", "count", "step", "tid2eid")
)
# Words for integers that select elements, which are not the quantized values of a full-precision weight next
# to them.
_INDICES = frozenset(("mask", "masks", "valid", "flag", "flags", "index", "indices", "idx", "id", "ids"))
# Maximum depth of weights in a linear layer, in keys below its module: `centroids.weight`.
_MAX_DEPTH = 2


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
        scales_text = f"with {last_keys(self.scales)}" if self.scales else "without its scale"
        return f"{self.name}: {self.dtype}, {scales_text}"


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
    declared, scales = declared_quantization(config), scales_of(arrays)
    if not declared:
        scales = _drop_index_scales(arrays, scales)
    narrow = {name for name, array in arrays.items() if _needs_scale(name, array)}
    packed = _find_packed(arrays) if declared else set()
    exempt = exempt_modules(declared)

    def is_exempt(name: str) -> bool:
        return _can_be_exempt(arrays[name], config) and exempt.has(name)

    without_scales = {name for name in narrow | packed if name not in scales and not is_exempt(name)}
    if not (declared or scales):
        without_scales = {name for name in without_scales if not states_dtype(config, arrays[name].dtype)}
    weights = {name: scales.get(name, ()) for name in arrays if name in scales or name in without_scales}
    required = narrow | scales.keys() if declared else set()
    required |= _layer_weights(arrays, packed - required)
    others = auxiliary_tensors(arrays, weights, required) if weights else {}
    unclear = _ambiguous_weights(arrays, weights, others, is_exempt) if declared else set()
    if unclear:
        weights |= dict.fromkeys(unclear, ())
        others = auxiliary_tensors(arrays, weights, required | _layer_weights(arrays, unclear))
    # Hundreds of weights may share thousands of auxiliary tensors, in the same tuple.
    several = {id(weight): weight for weight in others.values()}
    left = {at: tuple(name for name in weight if not exempt.has(name)) for at, weight in several.items()}
    may_scale = {name for weight in left.values() for name in weight if has_scale_word(name)}
    return {
        name: _with_further_scales(
            QuantizedWeight(name, arrays[name].dtype, weight, left.get(id(others.get(name)), ())),
            arrays,
            may_scale,
        )
        for name, weight in weights.items()
        # Integers without auxiliary tensors are indices.
        if weight or name in narrow or arrays[name].dtype.is_float or others.get(name)
    }


def _drop_index_scales(
    arrays: Mapping[str, ArrayLike], scales: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Drop the scales of masks and indices next to a full-precision weight, unless a name connects them.

    A `scale` in their common module belongs to the module or to the weight.
    """
    doubted = {
        name
        for name, own_scales in scales.items()
        if arrays[name].dtype.kind in ("int", "uint") and not _INDICES.isdisjoint(_split_words(name))
        if not any(_is_named_for(name, scale) for scale in own_scales)
    }
    if not doubted:
        return dict(scales)
    full: dict[str, int] = {}
    for name, array in arrays.items():
        if (
            len(array.shape) > 1
            and is_plain(array.dtype)
            and not _WEIGHT_WORDS.isdisjoint(_split_words(name)[-1:])
        ):
            module = split_name(name)[0]
            full[module] = max(full.get(module, 0), prod(array.shape))
    full_precision = {
        name for name in doubted if full.get(split_name(name)[0], 0) >= prod(arrays[name].shape) > 0
    }
    return {name: own_scales for name, own_scales in scales.items() if name not in full_precision}


def _is_named_for(name: str, scale: str) -> bool:
    """Return whether a scale is below an array or shares the words of its key, as in `mask_scale`."""
    below = scale.startswith(f"{bare_name(name)}.")
    return below or not {*owner_words(split_name(scale)[1])}.isdisjoint(_split_words(name))


def _split_words(name: str) -> tuple[str, ...]:
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


def _find_packed(arrays: Mapping[str, ArrayLike]) -> set[str]:
    """Find integer matrices in modules with several float arrays, such as codes with their tables.

    Indices have only one such array: `position_ids` with `class_embedding`, or `relative_position_index` with
    its table.
    """
    count = Counter(split_name(name)[0] for name, array in arrays.items() if array.dtype.is_float)
    modules = {module for module, several in count.items() if several > 1}
    return {
        name
        for name, array in arrays.items()
        if len(array.shape) > 1 and array.dtype.kind in ("int", "uint") and not has_scale_word(name)
        if split_name(name)[0] in modules and can_be_codes(name, array)
    }


def can_be_codes(name: str, array: ArrayLike) -> bool:
    """Return whether a scheme may store such an array as a weight: integers, packed or narrow numbers."""
    key, is_float = split_name(name)[1], array.dtype.is_float
    stored = array.dtype.kind in ("int", "uint") or (is_float and not is_plain(array.dtype))
    # Integer biases are added unscaled, and scalars are counters.
    is_added = key == "bias" and not is_float
    is_number = not (array.shape or is_float)
    return stored and not (is_number or is_added) and _INTEGER_WORDS.isdisjoint(words_of_key(key))


def _ambiguous_weights(
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


def _layer_weights(arrays: Iterable[str], weights: Collection[str]) -> set[str]:
    """Return the weights whose modules are at most a layer, so that they own everything below.

    Larger modules contain other weights at deeper levels.
    """
    modules = {split_name(name)[0] for name in weights} - {""}
    for name in arrays if modules else ():
        module, key, _ = split_name(name)
        keys = module.split(".")
        far = len(keys) - _MAX_DEPTH
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
    if len(array.shape) < 2 or not is_narrow(array.dtype) or has_scale_word(name):
        return False
    words = words_of_key(bare_name(name).rpartition(".")[2])
    if array.dtype.is_float or not words:
        return array.dtype.is_float
    is_blocks = words[-1] == "blocks" and array.dtype.name == "uint8"
    is_expert = len(words) > 1 and words[-2] == "wi" and words[-1].isdigit()
    return is_blocks or is_expert or words[-1] in _WEIGHT_WORDS or words[-2:] == ("weight", "packed")


_BIAS, _QUANTIZER = "bias", "quant"
# Words about packing that appear in the names of weights but not in the names of their biases.
_PACKINGS = frozenset(("blocks", "packed", "weight", "qweight", "qdata"))
# Layers and blocks of experts have few weights per module, and every array is compared with each of them.
_MAX_WEIGHTS = 256


@dataclass(frozen=True, slots=True)
class _ModuleWeight:
    """A weight in its module. `index` is its list index if the key is a list, else empty."""

    name: str
    index: str
    words: frozenset[str]


class _ModuleFacts(NamedTuple):
    """Facts about a module.

    Attributes:
        has_all: Whether the module's weights own everything in and below the module.
        words: The words in the keys of the module's weights.
        biased: Possible prefixes of `bias` in the names of the module's biases.
    """

    has_all: bool
    words: frozenset[str]
    biased: Collection[frozenset[str]]


@dataclass(frozen=True)
class _Modules:
    """The modules that have quantized weights.

    Attributes:
        weights: The weights of each module.
        below: Module -> the weights of each direct submodule, by the submodule's key.
        objects: Module -> the weights that are parts of its `weight`, an object with several arrays.
        whole: The weights that own everything below their modules; other weights own only arrays that refer
            to quantization or share their name.
    """

    weights: Mapping[str, list[_ModuleWeight]]
    below: Mapping[str, Mapping[str, list[_ModuleWeight]]]
    objects: Mapping[str, Sequence[_ModuleWeight]]
    whole: Collection[str]
    owner_cache: dict[tuple[str, frozenset[str], str, bool, bool], Sequence[_ModuleWeight]] = field(
        default_factory=dict
    )

    module_facts: dict[str, _ModuleFacts] = field(default_factory=dict)

    def facts_of(self, module: str) -> _ModuleFacts:
        """Return the facts about a module; computed on first use, because most modules are never queried."""
        if module not in self.module_facts:
            weights = self.weights.get(module, ())
            has_all = all(their.name in self.whole for their in weights)
            words = frozenset(chain(*(their.words for their in weights)))
            self.module_facts[module] = _ModuleFacts(has_all, words, {*_stems(weights)})
        return self.module_facts[module]

    def is_bias(self, name: str) -> bool:
        """Return whether an array is a bias, which is added to the result of a module."""
        module, key, _ = split_name(name)
        *words, last = words_of_key(key) or ("",)
        return key == _BIAS or (last == _BIAS and frozenset(words) in self.facts_of(module).biased)

    def owners(self, name: str) -> Iterable[_ModuleWeight]:
        """Return the weights that own an array."""
        module, key, index = split_name(name)
        if module in self.weights:
            return self._owners(module, key, index, is_alone=bool(module))
        return (
            self._owners_above(module)
            or tuple(self._owners_below(module, key))
            or self._owners_in_object(name)
        )

    def _owners_above(self, module: str) -> Iterable[_ModuleWeight]:
        """Find owners above: `X.weight_quantizer._amax` belongs to the weight of `X`."""
        while module:
            module, _, key = module.rpartition(".")
            if module and module in self.weights:
                speaks = _QUANTIZER in key or self._shares_all(module, frozenset(words_of_key(key)))
                return (
                    self._owners(module, key, "", is_alone=True)
                    if speaks or self.facts_of(module).has_all
                    else ()
                )
        return ()

    def _shares_all(self, module: str, words: frozenset[str]) -> bool:
        """Return whether all words of a weight are among these words."""
        return any(weight.words <= words for weight in self.weights[module])

    def _owners(self, module: str, key: str, index: str, *, is_alone: bool) -> Iterable[_ModuleWeight]:
        """Like `_owners`, but cached for keys that share the same words with the weights."""
        words = frozenset(words_of_key(key)) & self.facts_of(module).words
        like = module, words, index, is_alone, has_scale_word(key)
        if like not in self.owner_cache:
            has_all = self.facts_of(module).has_all or like[-1]
            self.owner_cache[like] = _owners(
                self.weights[module], words, index, is_alone=is_alone, has_all=has_all
            )
        return self.owner_cache[like]

    def _owners_in_object(self, name: str) -> Sequence[_ModuleWeight]:
        """Find owners in an object: `X.weight.meta.table` belongs to `X.weight.data.qdata`."""
        result = self.objects.get(name.replace("/", ".").partition(OBJECT)[0], ())
        return result if all(self.facts_of(split_name(item.name)[0]).has_all for item in result) else ()

    def _owners_below(self, module: str, key: str) -> Iterator[_ModuleWeight]:
        """Find owners below: `self_attn.k_scale` belongs to the weight of `self_attn.k_proj`."""
        words = set(owner_words(key)) if module in self.below and has_scale_word(key) else set()
        for below, weights in self.below[module].items() if words else ():
            if words <= set(words_of_key(below)):
                yield from weights


def auxiliary_tensors(
    arrays: Collection[str], weights: Mapping[str, Collection[str]], complete: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Find the auxiliary tensors of quantized weights, except their scales.

    Args:
        arrays: Names of all arrays, with keys joined by dots.
        weights: Name of each quantized weight -> names of its scales.
        complete: The weights that own everything below their modules.

    Returns:
        Name of a weight -> names in the order of `arrays`. An array may have several owners.
    """
    scales = {scale for weight in weights.values() for scale in weight}
    # If a module has several weights, the scale of one does not belong to the others.
    others = [(at, name) for at, name in enumerate(arrays) if name not in weights and name not in scales]
    if not others:
        return {}
    modules = _modules(weights, complete)
    # Hundreds of weights may own the same thousands of arrays, so arrays with the same owners are stored
    # once.
    owned: defaultdict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for at, name in others:
        if not modules.is_bias(name):
            owned[tuple(owner.name for owner in modules.owners(name))][name] = at
    result: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for owners, names in owned.items():
        own_names = tuple(names)
        for owner in owners:
            result[owner].append(own_names)
    locations = {name: at for names in owned.values() for name, at in names.items()}
    return {
        name: groups[0] if len(groups) == 1 else tuple(sorted(chain(*groups), key=locations.__getitem__))
        for name, groups in result.items()
    }


def _modules(weights: Iterable[str], whole: Collection[str]) -> _Modules:
    modules: defaultdict[str, list[_ModuleWeight]] = defaultdict(list)
    for name in weights:
        module, key, index = split_name(name)
        modules[module].append(_ModuleWeight(name, index, frozenset(words_of_key(key))))
    below: defaultdict[str, dict[str, list[_ModuleWeight]]] = defaultdict(dict)
    for module, theirs in modules.items():
        above, _, key = module.rpartition(".")
        below[above][key] = theirs
    objects: defaultdict[str, list[_ModuleWeight]] = defaultdict(list)
    for item in chain(*modules.values()):
        above, nested, _ = item.name.replace("/", ".").partition(OBJECT)
        if nested:
            objects[above].append(item)
    return _Modules(modules, below, objects, whole)


def _stems(weights: Iterable[_ModuleWeight]) -> Iterator[frozenset[str]]:
    """Yield the stems that weights share with the names of their biases."""
    for weight in weights:
        yield from (stem for stem in (weight.words, weight.words - _PACKINGS) if stem - _PACKINGS)


def _owners(
    weights: Sequence[_ModuleWeight], words: frozenset[str], index: str, *, is_alone: bool, has_all: bool
) -> Sequence[_ModuleWeight]:
    """Return the weights of a module that own an array, judged by the array's last key.

    Args:
        weights: The weights of the module.
        words: The words of the array's key that also occur in weights.
        index: The list index of the array.
        is_alone: Whether the only weight of a module owns all of it; arrays without a module, as with flat
            names, may be unrelated.
        has_all: Whether all weights own the arrays that do not share a name with any of them.
    """
    if len(weights) > _MAX_WEIGHTS and not index:
        return []
    near = [weight for weight in weights if not (weight.index and index) or weight.index == index]
    if is_alone and len(near) == 1:
        return near
    shared = [len(item.words & words) for item in near]
    limit = max(shared, default=0)
    if limit:
        return [item for item, count in zip(near, shared, strict=True) if count == limit]
    return near if is_alone and has_all else []
