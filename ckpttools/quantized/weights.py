"""Quantised weights: which arrays they are, what `config.json` says of them, and why they are refused.

The numbers of a quantised weight mean nothing without its scales: nothing may part them, and none may be
taken for the weight's own numbers. `ckpttools.quantized.scales` finds which arrays scale which,
`ckpttools.quantized.belongings` what else belongs to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.quantized.belongings import belongings
from ckpttools.quantized.config import (
    FIELD,
    Exempt,
    exempt_modules,
    says_quantized,
    scheme,
    stated_dtypes,
    states,
)
from ckpttools.quantized.scales import (
    BLOCK_SCALE,
    Described,
    bare_name,
    is_narrow,
    is_plain,
    last_key,
    of_activations,
    owner_words,
    scales_of,
    scales_word,
    split_name,
    words_of,
)
from ckpttools.quantized.schemes.registry import READ_METHODS

# For the words of messages alone: norms have a `scale`, too.
_SCALE_ENDS = (
    BLOCK_SCALE,
    *("weight_scale", "weight_scale_2", "weight_global_scale", "kernel_scale", "_scales", ".scales"),
    *(".qzeros", "_zero_point", "absmax", ".SCB"),
    *("_amax", "input_scale", "output_scale", "activation_scale", ".k_scale", ".v_scale"),
)
# Last words of the names of arrays of whole numbers that can be nothing but packed weights.
_WEIGHT_WORDS = frozenset(("weight", "qweight", "kernel", "embedding", "wo"))
# Words in the names of whole numbers that no scheme stores: places, states of generators, numbers of steps,
# DeepSeek V4's tables of experts.
_NO_CODES = frozenset(("position", "positions", "token", "key", "rng", "rngs", "count", "step", "tid2eid"))
# Words of whole numbers that say which elements are meant: beside a weight in full they are no codes of it.
_INDICES = frozenset(("mask", "masks", "valid", "flag", "flags", "index", "indices", "idx", "id", "ids"))
# How deep arrays called weights lie in a linear layer at most, in keys below its module: `centroids.weight`.
_DEEPEST = 2
_WANTED = "weights in bfloat16, float16 or float32 that need no scales"
_IN_TRANSFORMERS = "in transformers from_pretrained, then dequantize() and save_pretrained"
_DEQUANTIZING = {
    "bitsandbytes": _IN_TRANSFORMERS,
    "gptq": "with GPTQModel, which quantised it",
    "awq": "with AutoAWQ, which quantised it",
    "compressed-tensors": "in transformers from_pretrained with CompressedTensorsConfig(dequantize=True), "
    "then save_pretrained",
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised weight.

    Attributes:
        name: of the array.
        dtype: of what is stored.
        scales: names of the arrays it is scaled by, as far as they are there.
        others: names of what else belongs to it.
    """

    name: str
    dtype: DType
    scales: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[str, ...]:
        """All that it needs."""
        return (*self.scales, *self.others)

    @property
    def is_bare(self) -> bool:
        """Whether it lacks its scales; packed numbers may go by tables instead."""
        return not (self.scales or (self.others and not self.dtype.is_float))

    def __str__(self) -> str:
        scales = f"scaled by {last_keys(self.scales)}" if self.scales else "without its scale"
        return f"{self.name}: {self.dtype}, {scales}"


def last_keys(names: Iterable[str]) -> str:
    """What names end in, so that lines about many layers fold into one."""
    return ", ".join(last_key(name) for name in names)


def quantized(
    arrays: Mapping[str, Described], config: Mapping[str, Any] | None = None
) -> dict[str, Quantized]:
    """The quantised weights among arrays.

    Args:
        arrays: by name, keys joined by dots.
        config: the `config.json` beside them, if there is one.

    Returns:
        By name, those that have scales, whatever they are called; those without that are float8 or less,
        unless `config` says that the numbers are the weights themselves; and whole numbers with the name of
        a weight. Where `config` says that weights are quantised, matrices of whole numbers with several
        arrays beside them as well, and of every other module with anything but plain numbers the largest
        such array: it stands for a weight of a scheme that is not known.
    """
    if not any(may_be_scaled(name, array.dtype) for name, array in arrays.items()):
        return {}
    said, scales = says_quantized(config), scales_of(arrays)
    if not said:
        scales = _without_indices(arrays, scales)
    narrow = {name for name, array in arrays.items() if _needs_scale(name, array)}
    packed = _packed(arrays) if said else set()
    exempt = exempt_modules(said)
    bare = {name for name in narrow | packed if name not in scales and not exempt.has(name)}
    if not (said or scales):
        bare = {name for name in bare if not states(config, arrays[name].dtype)}
    weights = {name: scales.get(name, ()) for name in arrays if name in scales or name in bare}
    whole = narrow | scales.keys() if said else set()
    whole |= _of_layers(arrays, packed - whole)
    others = belongings(arrays, weights, whole) if weights else {}
    strange = _strange(arrays, weights, others, exempt) if said else set()
    if strange:
        weights |= dict.fromkeys(strange, ())
        others = belongings(arrays, weights, whole | _of_layers(arrays, strange))
    # Hundreds of weights may have thousands of others in common, and the same tuple of them.
    several = {id(theirs): theirs for theirs in others.values()}
    left = {at: tuple(name for name in theirs if not exempt.has(name)) for at, theirs in several.items()}
    may_scale = {name for theirs in left.values() for name in theirs if scales_word(name)}
    return {
        name: _with_further_scales(
            Quantized(name, arrays[name].dtype, theirs, left.get(id(others.get(name)), ())), arrays, may_scale
        )
        for name, theirs in weights.items()
        # Whole numbers with nothing beside them are indices.
        if theirs or name in narrow or others.get(name)
    }


def _without_indices(
    arrays: Mapping[str, Described], scales: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """The scales less those of masks and indices beside a weight in full, where no name says whose they are.

    A `scale` that only lies in the module of both is the module's, or the weight's.
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
    """Whether a scale lies below an array, or its key says what that of the array says: `mask_scale`."""
    below = scale.startswith(f"{bare_name(name)}.")
    return below or not {*owner_words(split_name(scale)[1])}.isdisjoint(_words(name))


def _words(name: str) -> tuple[str, ...]:
    return words_of(split_name(name)[1])


def _with_further_scales(
    weight: Quantized, arrays: Mapping[str, Described], may_scale: AbstractSet[str]
) -> Quantized:
    """The scales of a weight may lie below its module or above it: `X.weight_quantizer._scale`."""
    if may_scale.isdisjoint(weight.others):
        return weight
    module = split_name(weight.name)[0]
    further = [
        name
        for name in weight.others
        if name in may_scale and not of_activations(words_of(_normal(name).removeprefix(module)))
        # A float8 array that has another beside it is no weight of it.
        if not (weight.dtype.is_float and arrays[name].dtype == weight.dtype)
    ]
    others = tuple(name for name in weight.others if name not in further) if further else weight.others
    return replace(weight, scales=(*weight.scales, *further), others=others)


def _normal(name: str) -> str:
    """A name in the form that modules have."""
    return ".".join(filter(None, split_name(name)))


def _packed(arrays: Mapping[str, Described]) -> set[str]:
    """Matrices of whole numbers in modules with several arrays of fractions, as codes beside their tables.

    Indices lie beside one: `position_ids` and `class_embedding`, `relative_position_index` and its table.
    """
    count = Counter(split_name(name)[0] for name, array in arrays.items() if array.dtype.is_float)
    modules = {module for module, several in count.items() if several > 1}
    return {
        name
        for name, array in arrays.items()
        if len(array.shape) > 1 and array.dtype.kind in ("int", "uint") and not scales_word(name)
        if split_name(name)[0] in modules and _may_be_codes(name, array)
    }


def _may_be_codes(name: str, array: Described) -> bool:
    """Whether a scheme may store this in place of a weight: whole numbers, packed ones, and of few bits."""
    key = split_name(name)[1]
    stored = array.dtype.kind in ("int", "uint") or (array.dtype.is_float and not is_plain(array.dtype))
    return stored and bool(array.shape) and key != "bias" and _NO_CODES.isdisjoint(words_of(key))


def _strange(
    arrays: Mapping[str, Described],
    weights: Mapping[str, tuple[str, ...]],
    others: Mapping[str, tuple[str, ...]],
    exempt: Exempt,
) -> set[str]:
    """Of each module with codes that belong to no weight the array of most axes and elements."""
    known = {*weights}.union(*weights.values(), *others.values())
    largest: dict[str, tuple[tuple[int, int], str]] = {}
    for name, array in arrays.items():
        if name in known or not _may_be_codes(name, array) or exempt.has(name):
            continue
        module, size = split_name(name)[0], (len(array.shape), prod(array.shape))
        if module not in largest or size > largest[module][0]:
            largest[module] = size, name
    return {name for _, name in largest.values()}


def _of_layers(arrays: Iterable[str], weights: Collection[str]) -> set[str]:
    """Those of the weights whose modules are no larger than a layer: all that lies below is of them.

    Modules of more than a layer have others' weights far below.
    """
    modules = {split_name(name)[0] for name in weights} - {""}
    for name in arrays if modules else ():
        module, key, _ = split_name(name)
        keys = module.split(".")
        far = len(keys) - _DEEPEST
        if name in weights or not _WEIGHT_WORDS.isdisjoint(words_of(key)):
            modules -= {".".join(keys[:stop]) for stop in range(1, far + 1)}
    return {name for name in weights if split_name(name)[0] in modules}


def may_be_scaled(name: str, dtype: DType) -> bool:
    """Whether an array is worth a closer look: very few are, and checkpoints have 100,000 of them."""
    return not is_plain(dtype) or bare_name(name).endswith(BLOCK_SCALE)


def is_scale(name: str) -> bool:
    """Whether an array of this name is a scale, or another thing without which weights mean nothing."""
    return bare_name(name).endswith(_SCALE_ENDS)


def refuse_quantized(arrays: Mapping[str, Described], config: Mapping[str, Any] | None, place: str) -> None:
    """Refuses quantised weights, with their scales and without.

    Args:
        arrays: all of them by name, before any is left out.
        config: the `config.json` beside them, or None.
        place: for messages.

    Raises:
        FormatError: there are some; says how they are quantised and which have no scale. Or the configuration
            says so, and there is no telling which they are.
    """
    found = quantized(arrays, config)
    if found:
        raise quantized_error(found.values(), config, place)
    refuse_unknown(arrays, config, place)


def signs_of_scheme(arrays: Mapping[str, Described], config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The arrays that plain weights do not have, where `config` says that weights are quantised."""
    said = says_quantized(config)
    exempt = exempt_modules(said)
    return tuple(
        name
        for name, array in (arrays.items() if said else ())
        if (is_scale(name) or _may_be_codes(name, array)) and not exempt.has(name)
    )


def refuse_unknown(
    arrays: Mapping[str, Described], config: Mapping[str, Any] | None, place: str, *, done: str = "converted"
) -> None:
    """Refuses arrays of a scheme where no quantised weight is known among them.

    Args:
        arrays, config, place: as for `refuse_quantized`.
        done: what cannot be done with them.

    Raises:
        FormatError: there are some.
    """
    signs = signs_of_scheme(arrays, config)
    if signs:
        raise FormatError(
            f"these arrays cannot be {done}: config.json says that weights are quantised, and these look so"
            + listing([f"{name}: {arrays[name].dtype}" for name in signs]),
            place=place or None,
            got=f"{scheme(says_quantized(config))} ({FIELD})",
            wanted=_WANTED,
            hint=f"{remedy(says_quantized(config))}; if it is plain, take {FIELD} out of config.json",
        )


def refuse_unmappable(arrays: Mapping[str, Described], config: Mapping[str, Any] | None, place: str) -> None:
    """Refuses weights of a model that are no plain floating-point numbers, whatever they are called.

    Args:
        arrays: by name, those that rows of a family take.
        config, place: as for `refuse_quantized`.

    Raises:
        FormatError: there are some.
    """
    odd = [
        Quantized(name, each.dtype, ())
        for name, each in arrays.items()
        if not (is_plain(each.dtype) or (each.dtype.is_float and states(config, each.dtype)))
    ]
    if odd:
        raise quantized_error(odd, config, place)


def quantized_error(
    found: Iterable[Quantized], config: Mapping[str, Any] | None, place: str, *, done: str = "converted"
) -> FormatError:
    """The error that says which weights are quantised, how, and what to do.

    Args:
        found: the weights.
        config: the `config.json` beside them, or None.
        place: for messages.
        done: what cannot be done with them.
    """
    weights = sorted(found, key=lambda each: not each.is_bare)
    said = says_quantized(config)
    if not said and all(each.dtype.is_float and not each.sides for each in weights):
        return _unclear_error(weights, config, place, done)
    bare = sum(each.is_bare for each in weights)
    how = f"{scheme(said)} ({FIELD})" if said else _dtypes(weights)
    return FormatError(
        f"quantised weights cannot be {done}: their numbers mean nothing without their scales"
        + listing([str(each) for each in weights]),
        place=place or None,
        got=f"{how}; {bare} of {len(weights)} without scales" if bare else how,
        wanted=_WANTED,
        hint=_missing(bare) + remedy(said),
    )


def _unclear_error(
    weights: list[Quantized], config: Mapping[str, Any] | None, place: str, done: str
) -> FormatError:
    """The error for numbers of few bits that nothing scales, and that no configuration calls the weights."""
    stated = " and ".join(stated_dtypes(config))
    return FormatError(
        f"these arrays cannot be {done}: their numbers may be the weights themselves, or mean nothing "
        "without their scales" + listing([f"{each.name}: {each.dtype}, without a scale" for each in weights]),
        place=place or None,
        got=_dtypes(weights) + (f", where config.json says {stated}" if stated else ""),
        wanted=_WANTED,
        hint="if a plain cast made them, cast them back first: ckpt cast SRC DST --dtype bfloat16 --force; "
        "if scales were lost, get the checkpoint with all of its scales",
    )


def _dtypes(weights: Iterable[Quantized]) -> str:
    return ", ".join(sorted({str(each.dtype) for each in weights}))


def _missing(bare: int) -> str:
    return "get the checkpoint with all of its scales; " if bare else ""


def remedy(said: Mapping[str, Any] | None, *, is_read: bool = True) -> str:
    """What to do with quantised weights where plain ones are needed.

    Args:
        said: the `quantization_config`.
        is_read: whether they are read where their method is.
    """
    release = "take a release of the model in bfloat16"
    method = str((said or {}).get("quant_method"))
    if is_read and method in READ_METHODS:
        return "dequantise it: ckpt cast SRC DST --dtype bfloat16"
    if method in _DEQUANTIZING:
        return f"dequantise it to bfloat16 ({_DEQUANTIZING[method]}), or {release}"
    return f"dequantise it to bfloat16 with the tool that quantised it, or {release}"


def _needs_scale(name: str, array: Described) -> bool:
    """Whether an array that nothing scales is a quantised weight all the same."""
    if len(array.shape) < 2 or not is_narrow(array.dtype) or scales_word(name):
        return False
    words = words_of(bare_name(name).rpartition(".")[2])
    if array.dtype.is_float or not words:
        return array.dtype.is_float
    is_blocks = words[-1] == "blocks" and array.dtype.name == "uint8"
    is_expert = len(words) > 1 and words[-2] == "wi" and words[-1].isdigit()
    return is_blocks or is_expert or words[-1] in _WEIGHT_WORDS or words[-2:] == ("weight", "packed")
