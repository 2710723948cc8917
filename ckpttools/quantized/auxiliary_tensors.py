"""Find auxiliary tensors of quantized weights other than scales: everything else in their modules.

Shapes, column orders, code tables and activation scales differ between schemes, and loaders need all of them,
so a weight owns its full module. The module's `bias` is the exception: it is added to the result, is the same
without quantization, and loaders create one if the model has it. If a module has several weights, each owns
its own tensors (`up_proj_blocks`, `up_proj_bias`); `weight_bias` belongs to the quantized values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.quantized.scales import OBJECT, owner_words, scales_word, split_name, words_of_key

_BIAS, _QUANTIZER = "bias", "quant"
# Words for packing in the names of weights that the names of their biases lack.
_PACKINGS = frozenset(("blocks", "packed", "weight", "qweight", "qdata"))
# Layers and blocks of experts have few weights per module, and every array is compared with each of them.
_MOST_WEIGHTS = 256


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
            theirs = self.weights.get(module, ())
            has_all = all(their.name in self.whole for their in theirs)
            words = frozenset(chain(*(their.words for their in theirs)))
            self.module_facts[module] = _ModuleFacts(has_all, words, {*_stems(theirs)})
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
        like = module, words, index, is_alone, scales_word(key)
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
        words = set(owner_words(key)) if module in self.below and scales_word(key) else set()
        for below, weights in self.below[module].items() if words else ():
            if words <= set(words_of_key(below)):
                yield from weights


def auxiliary_tensors(
    arrays: Collection[str], weights: Mapping[str, Collection[str]], whole: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Find the auxiliary tensors of quantized weights, except their scales.

    Args:
        arrays: Names of all arrays, with keys joined by dots.
        weights: Name of each quantized weight -> names of its scales.
        whole: The weights that own everything below their modules.

    Returns:
        Name of a weight -> names in the order of `arrays`. An array may have several owners.
    """
    scales = {scale for weight in weights.values() for scale in weight}
    # If a module has several weights, the scale of one does not belong to the others.
    others = [(at, name) for at, name in enumerate(arrays) if name not in weights and name not in scales]
    if not others:
        return {}
    modules = _modules(weights, whole)
    # Hundreds of weights may own the same thousands of arrays, so arrays with the same owners are stored
    # once.
    owned: defaultdict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for at, name in others:
        if not modules.is_bias(name):
            owned[tuple(owner.name for owner in modules.owners(name))][name] = at
    result: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for owners, names in owned.items():
        theirs = tuple(names)
        for owner in owners:
            result[owner].append(theirs)
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
    if len(weights) > _MOST_WEIGHTS and not index:
        return []
    near = [weight for weight in weights if not (weight.index and index) or weight.index == index]
    if is_alone and len(near) == 1:
        return near
    shared = [len(item.words & words) for item in near]
    limit = max(shared, default=0)
    if limit:
        return [item for item, count in zip(near, shared, strict=True) if count == limit]
    return near if is_alone and has_all else []
