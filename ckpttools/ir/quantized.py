"""Quantised weights: which arrays are such, and which others are their scales; told by names and dtypes.

The numbers of a quantised weight mean nothing without its scales: nothing may part them, and none may be
taken for the weight's own numbers. Names of scales: `X.weight_scale_inv` (float8 in blocks), `X.weight_scale`
and `X.scale` beside `X.weight` or `X.weight_packed` (compressed-tensors, ModelOpt, DeepSeek V4), `X_scales`
beside `X_blocks` (MXFP4), `X.scales` beside `X.qweight` (GPTQ, AWQ), `X.weight.absmax` and `X.SCB`
(bitsandbytes), `X.kernel_scale` beside `X.kernel` (MaxText).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, listing

FIELD = "quantization_config"
_FIELDS = (FIELD, "compression_config")
# NNX keeps an array below the name of its variable.
_NNX = ".value"
_BLOCK_SCALE = "_scale_inv"
_SCALE = re.compile(
    r"(_scale_inv|_scale_2|(weight|kernel)(_global)?_scale|[._]scales|\.qzeros|_zero_point|absmax|\.SCB)$"
)
_PACKED = (".weight_packed", ".qweight")
_WEIGHT = re.compile(r"(^|[._])(weight|kernel|embedding|wi_\d|wo)$")
_BLOCKS, _SCALES = "_blocks", "_scales"
# Ends of a scale's name after that of its weight, and after that of its weight's module.
_AFTER_WEIGHT = (_BLOCK_SCALE, "_scale", "_scale_2", "_global_scale", ".absmax", ".nested_absmax")
_AFTER_MODULE = (".scale", ".scales", ".SCB", ".weight_scale", ".weight_global_scale")
_PLAIN_BITS = 16
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
    return ", ".join(name.removesuffix(_NNX).rpartition(".")[2] for name in names)


def quantized(dtypes: Mapping[str, DType]) -> dict[str, Quantized]:
    """The quantised weights among arrays.

    Args:
        dtypes: name of an array, keys joined by dots, -> its dtype.

    Returns:
        By name, those whose dtype says so, and those that have a scale of blocks, whatever their dtype.
    """
    names = (weight for name, dtype in dtypes.items() if (weight := _candidate(name, dtype)) in dtypes)
    found = (Quantized(name, dtypes[name], _scales_of(name, dtypes)) for name in dict.fromkeys(names))
    return {each.name: each for each in found if _is_quantized(each)}


def may_be_scaled(name: str, dtype: DType) -> bool:
    """Whether an array is worth a closer look: nearly none is, and checkpoints have 100,000 of them."""
    return not _is_plain(dtype) or name.removesuffix(_NNX).endswith(_BLOCK_SCALE)


def _is_plain(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.bits >= _PLAIN_BITS


def _candidate(name: str, dtype: DType) -> str:
    """The weight that an array may be, or be the scale of."""
    if not _is_plain(dtype):
        return name
    own = name.removesuffix(_NNX)
    return own.removesuffix(_BLOCK_SCALE) + name[len(own) :] if own.endswith(_BLOCK_SCALE) else ""


def is_scale(name: str) -> bool:
    """Whether an array of this name is a scale, or another thing without which weights mean nothing."""
    return _SCALE.search(name.removesuffix(_NNX)) is not None


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


def refuse_quantized(dtypes: Mapping[str, DType], said: Mapping[str, Any] | None, place: str) -> None:
    """Refuses quantised weights, with their scales and without.

    Args:
        dtypes: name -> dtype of all arrays, before any is left out.
        said: the `quantization_config`, or None.
        place: for messages.

    Raises:
        FormatError: there are some; says how they are quantised and which have no scale.
    """
    found = quantized(dtypes)
    if found:
        raise quantized_error(found.values(), said, place)


def refuse_unmappable(dtypes: Mapping[str, DType], said: Mapping[str, Any] | None, place: str) -> None:
    """Refuses weights of a model that are no plain floating-point numbers, whatever they are called.

    Args:
        dtypes: name -> dtype of arrays that rows of a family take.
        said, place: as for `refuse_quantized`.

    Raises:
        FormatError: there are some.
    """
    odd = {name: dtype for name, dtype in dtypes.items() if not _is_plain(dtype)}
    if odd:
        raise quantized_error([Quantized(name, dtype, ()) for name, dtype in odd.items()], said, place)


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


def _scales_of(name: str, names: Mapping[str, DType]) -> tuple[str, ...]:
    own = name.removesuffix(_NNX)
    ending = _NNX if own != name else ""
    if is_scale(own):
        return ()
    candidates = [own + end for end in _AFTER_WEIGHT]
    module, dot, last = own.rpartition(".")
    if dot and last in ("weight", "weight_packed", "qweight"):
        candidates += [module + end for end in _AFTER_MODULE]
    if own.endswith(_BLOCKS):
        candidates.append(own.removesuffix(_BLOCKS) + _SCALES)
    there = dict.fromkeys(f"{each}{ending}" for each in candidates)
    return tuple(each for each in there if each in names)


def _is_quantized(each: Quantized) -> bool:
    name, dtype = each.name.removesuffix(_NNX), each.dtype
    if is_scale(name):
        return False
    if dtype.is_float:
        is_narrow = dtype.bits <= 8 and dtype.name != "float8_e8m0fnu" and not name.endswith("scale")
        return is_narrow or any(scale.removesuffix(_NNX).endswith(_BLOCK_SCALE) for scale in each.scales)
    if dtype.kind not in ("int", "uint"):
        return False
    is_blocks = name.endswith(_BLOCKS) and dtype.name == "uint8"
    return is_blocks or name.endswith(_PACKED) or _WEIGHT.search(name) is not None
