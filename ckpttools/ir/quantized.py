"""Quantised weights: which arrays are such, how `config.json` says it, and what to tell who would use them.

The numbers of a quantised weight mean nothing without its scales: nothing may part them, and none may be
taken for the weight's own numbers. `ckpttools.ir.scales` finds which arrays scale which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, listing
from ckpttools.ir.scales import (
    BLOCK_SCALE,
    Described,
    bare_name,
    is_narrow,
    is_plain,
    last_key,
    scales_of,
    scales_word,
    words_of,
)

FIELD = "quantization_config"
_FIELDS = (FIELD, "compression_config")
# For the words of messages alone: norms have a `scale`, too.
_SCALE_ENDS = (
    BLOCK_SCALE,
    *("weight_scale", "weight_scale_2", "weight_global_scale", "kernel_scale", "_scales", ".scales"),
    *(".qzeros", "_zero_point", "absmax", ".SCB"),
)
# Last words of the names of arrays of whole numbers that can be nothing but packed weights.
_WEIGHT_WORDS = frozenset(("weight", "qweight", "kernel", "embedding", "wo"))
_DEQUANTIZING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised weight.

    Attributes:
        name: of the array.
        dtype: of what is stored.
        scales: names of the arrays it is scaled by, as far as they are there.
    """

    name: str
    dtype: DType
    scales: tuple[str, ...]

    def __str__(self) -> str:
        scales = f"scaled by {last_keys(self.scales)}" if self.scales else "without its scale"
        return f"{self.name}: {self.dtype}, {scales}"


def last_keys(names: Iterable[str]) -> str:
    """What names end in, so that lines about many layers fold into one."""
    return ", ".join(last_key(name) for name in names)


def quantized(arrays: Mapping[str, Described]) -> dict[str, Quantized]:
    """The quantised weights among arrays.

    Args:
        arrays: by name, keys joined by dots.

    Returns:
        By name, those that have scales, whatever they are called; and those without that are float8 or less,
        or whole numbers with the name of a weight.
    """
    if not any(may_be_scaled(name, array.dtype) for name, array in arrays.items()):
        return {}
    scales = scales_of(arrays)
    return {
        name: Quantized(name, array.dtype, scales.get(name, ()))
        for name, array in arrays.items()
        if name in scales or _needs_scale(name, array)
    }


def may_be_scaled(name: str, dtype: DType) -> bool:
    """Whether an array is worth a closer look: nearly none is, and checkpoints have 100,000 of them."""
    return not is_plain(dtype) or bare_name(name).endswith(BLOCK_SCALE)


def is_scale(name: str) -> bool:
    """Whether an array of this name is a scale, or another thing without which weights mean nothing."""
    return bare_name(name).endswith(_SCALE_ENDS)


def says_quantized(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a `config.json` says of how its weights are quantised; None if it says nothing."""
    config = config or {}
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    found = (place.get(field) for place in places for field in _FIELDS)
    return next((each for each in found if isinstance(each, Mapping) and each), None)


def without_quantization(config: dict[str, Any]) -> bool:
    """Takes out of a configuration what it says of that, in place; whether it said something."""
    found = [config.pop(field) for field in _FIELDS if field in config]
    text = config.get("text_config")
    return (isinstance(text, dict) and without_quantization(text)) or bool(found)


def scheme(said: Mapping[str, Any] | None) -> str:
    """A `quantization_config` in words: `fp8 in blocks of 128 x 128`; empty where there is none."""
    if not said:
        return ""
    groups = [_scheme_of_group(each) for each in _groups(said)]
    method = str(said.get("quant_method") or said.get("quant_algo") or "of no named method")
    parts = [method, *(str(said[key]) for key in ("format", "fmt") if said.get(key))]
    block = said.get("weight_block_size")
    size = f" in blocks of {' x '.join(map(str, block))}" if isinstance(block, list | tuple) and block else ""
    return ", ".join(dict.fromkeys((*parts, *groups, *_bits(said)))) + size


def _groups(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each of its groups."""
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _scheme_of_group(weights: Mapping[str, Any]) -> str:
    size = f" in groups of {weights['group_size']}" if weights.get("group_size") else ""
    return f"{weights.get('type', '')}{weights.get('num_bits', '')}{size}"


def _bits(said: Mapping[str, Any]) -> Iterator[str]:
    """What GPTQ and AWQ say."""
    if isinstance(said.get("bits"), int):
        yield f"{said['bits']} bits in groups of {said.get('group_size')}"


def refuse_quantized(arrays: Mapping[str, Described], said: Mapping[str, Any] | None, place: str) -> None:
    """Refuses quantised weights, with their scales and without.

    Args:
        arrays: all of them by name, before any is left out.
        said: the `quantization_config`, or None.
        place: for messages.

    Raises:
        FormatError: there are some; says how they are quantised and which have no scale.
    """
    found = quantized(arrays)
    if found:
        raise quantized_error(found.values(), said, place)


def refuse_unmappable(arrays: Mapping[str, Described], said: Mapping[str, Any] | None, place: str) -> None:
    """Refuses weights of a model that are no plain floating-point numbers, whatever they are called.

    Args:
        arrays: by name, those that rows of a family take.
        said, place: as for `refuse_quantized`.

    Raises:
        FormatError: there are some.
    """
    odd = [Quantized(name, each.dtype, ()) for name, each in arrays.items() if not is_plain(each.dtype)]
    if odd:
        raise quantized_error(odd, said, place)


def quantized_error(
    found: Iterable[Quantized], said: Mapping[str, Any] | None, place: str, *, done: str = "converted"
) -> FormatError:
    """The error that says which weights are quantised, how, and what to do.

    Args:
        found: the weights.
        said: the `quantization_config`, or None.
        place: for messages.
        done: what cannot be done with them.
    """
    weights = sorted(found, key=lambda each: bool(each.scales))
    bare = sum(not each.scales for each in weights)
    how = f"{scheme(said)} ({FIELD})" if said else ", ".join(sorted({str(each.dtype) for each in weights}))
    return FormatError(
        f"quantised weights cannot be {done}: their numbers mean nothing without their scales"
        + listing([str(each) for each in weights]),
        place=place or None,
        got=f"{how}; {bare} of {len(weights)} without scales" if bare else how,
        wanted="weights in bfloat16, float16 or float32 that need no scales",
        hint=_missing(bare) + _remedy(said),
    )


def _missing(bare: int) -> str:
    return "get the checkpoint with all of its scales; " if bare else ""


def _remedy(said: Mapping[str, Any] | None) -> str:
    release = "take a release of the model in bfloat16"
    kind = _DEQUANTIZING.get(str((said or {}).get("quant_method")))
    if kind is None:
        return f"dequantise it to bfloat16 with the tool that quantised it, or {release}"
    how = f"in transformers from_pretrained with quantization_config={kind}(dequantize=True)"
    return f"dequantise it to bfloat16 ({how}, then save_pretrained), or {release}"


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
