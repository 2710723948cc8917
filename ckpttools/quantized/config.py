"""Parse quantization settings in `config.json`: the scheme, unquantized modules, and dtypes.

The selection follows published models, which quantize the matrices that tokens are multiplied by.
Embeddings, norms, output heads, routers and towers are left unchanged; loaders find them in a list in
`config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import translate
from typing import Any, Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import take, window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.text import sort_naturally
from ckpttools.quantized.scales import ArrayLike, is_plain, split_name, words_of_key

FIELD = "quantization_config"
Like = Literal["float32", "maxtext"]
"""How products are rounded: once, or with scales first rounded to bfloat16 as in MaxText."""
DEQUANTIZE_MODES: tuple[Like, ...] = ("float32", "maxtext")
DEFAULT_DTYPE = DTYPES["bfloat16"]
RESULTS = ("bfloat16", "float16", "float32")
"""The dtypes of products."""
_FIELDS = (FIELD, "compression_config")
# Files next to config.json in which tools describe the quantization; loaders read them first.
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
# Keys that list unquantized modules.
_EXEMPT = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules", "unquantized_modules"),
)
# Limit on patterns, because each one takes time for every module; further patterns are ignored.
_MAX_PATTERNS = 256
_DTYPES, _PART = ("dtype", "torch_dtype"), "_config"
_EXPERTS = "expert_dtype"


def declared_quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the quantization settings of a `config.json`; None if there are none."""
    config = config or {}
    text = config.get("text_config")
    locations = [config, text] if isinstance(text, Mapping) else [config]
    result = ((location.get(field), location) for location in locations for field in _FIELDS)
    declared, location = next(
        (item for item in result if isinstance(item[0], Mapping) and item[0]), (None, config)
    )
    # DeepSeek V4 states this next to the quantization settings, V4.1 inside them.
    expert_settings = location.get(_EXPERTS, config.get(_EXPERTS))
    return (
        {_EXPERTS: expert_settings, **declared} if declared and isinstance(expert_settings, str) else declared
    )


@dataclass(frozen=True, slots=True)
class ExemptModules:
    """Modules that are not quantized.

    Attributes:
        names: Names of modules, or their last keys.
        pattern: Pattern for full names of further modules, or None.
    """

    names: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def has(self, name: str) -> bool:
        """Return whether an array is in one of the modules."""
        if not (self.names or self.pattern):
            return False
        keys = split_name(name)[0].split(".")
        stops = range(1, len(keys) + 1)
        if any(".".join(keys[start:stop]) in self.names for stop in stops for start in range(stop)):
            return True
        return self.pattern is not None and any(self.pattern.match(".".join(keys[:stop])) for stop in stops)


def exempt_modules(settings: Mapping[str, Any] | None) -> ExemptModules:
    """Return the modules that a `quantization_config` exempts from quantization.

    Regular expressions (`re:.*lm_head`) are supported if they are equivalent to globs; others are ignored.
    """
    lists = [(settings or {}).get(field) for field in _EXEMPT]
    entries = [item for one in lists if isinstance(one, list) for item in one if isinstance(item, str)]
    globs = [glob for entry in entries if (glob := _glob(entry)) and "*" in glob][:_MAX_PATTERNS]
    names = frozenset(entry for entry in entries if entry and not entry.startswith("re:"))
    return ExemptModules(names, re.compile("|".join(map(translate, globs))) if globs else None)


def _glob(entry: str) -> str:
    """Convert an entry of such a list to a glob; return "" for unsupported regular expressions."""
    if not entry.startswith("re:"):
        return entry
    pattern = entry.removeprefix("re:").removeprefix("^").removesuffix("$")
    glob = pattern.replace(".*", "*").replace("\\.", ".")
    return "" if set(glob) & set("\\[](){}|+?^$") else glob


def states_dtype(config: Mapping[str, Any] | None, dtype: DType) -> bool:
    """Return whether a configuration states the dtype of its weights, at the top level or in a part."""
    return dtype.name in stated_dtypes(config)


def stated_dtypes(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the dtypes that a configuration states, at the top level and in its parts."""
    parts = [part for name, part in (config or {}).items() if name.endswith(_PART) and name != FIELD]
    values = [
        location.get(field)
        for location in (config, *parts)
        if isinstance(location, Mapping)
        for field in _DTYPES
    ]
    return tuple(dict.fromkeys(item.removeprefix("torch.") for item in values if isinstance(item, str)))


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the quantization settings from a configuration and its parts."""
    left = {field: item for field, item in config.items() if field not in (*_FIELDS, _EXPERTS)}
    parts = {field: item for field, item in left.items() if field.endswith(_PART) and isinstance(item, dict)}
    return left | {field: without_quantization(item) for field, item in parts.items()}


def scheme(settings: Mapping[str, Any] | None) -> str:
    """Describe a `quantization_config`: `fp8 in blocks of 128 x 128`; empty if there is none."""
    if not settings:
        return ""
    groups = [_scheme_of_group(group) for group in _groups(settings)]
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "of no named method")
    parts = [method, *(str(settings[key]) for key in ("quant_algo", "format", "fmt") if settings.get(key))]
    block = settings.get("weight_block_size")
    size = f" in blocks of {' x '.join(map(str, block))}" if isinstance(block, list | tuple) and block else ""
    return ", ".join(dict.fromkeys((*parts, *groups, *_bits(settings)))) + size


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the weight settings of each group in compressed-tensors."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _scheme_of_group(weights: Mapping[str, Any]) -> str:
    size = f" in groups of {weights['group_size']}" if weights.get("group_size") else ""
    return f"{weights.get('type', '')}{weights.get('num_bits', '')}{size}"


def _bits(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of bits that GPTQ and AWQ state."""
    if isinstance(settings.get("bits"), int):
        yield f"{settings['bits']} bits in groups of {settings.get('group_size')}"


WEIGHT, _HEAD = "weight", "lm_head"
# Last keys of modules whose matrices are small or sensitive.
_UNQUANTIZED_KEYS = frozenset(
    (
        *(_HEAD, "head", "score", "wte", "wpe", "eh_proj"),
        # GPT-2's modules, whose matrices are transposed.
        *("c_attn", "c_proj", "c_fc"),
        *("gate", "router", "shared_expert_gate", "weights_proj"),
        *("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d"),
    )
)
_ROUTER = "router"
_UNQUANTIZED_WORDS = frozenset(("embed", "embedding", "embeddings", "norm", "layernorm"))
_TOWERS = (
    "visual",
    "vision",
    "audio",
    "multi_modal",
    "multimodal",
    "mm_",
    "image",
    "patch",
)
EXPERTS, MLP_EXPERTS = ".experts.", ".mlp.experts."
SEPARATE_EXPERTS = frozenset(
    (
        *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe"),
    )
)
"""Models whose fused experts, (expert, out, in), transformers 5.23 also loads from single experts.

Its dequantization supports only scales of single experts, and treats fused codes as plain numbers.
"""
_FUSED_IN, _FUSED_OUT = "gate_up_proj", "down_proj"
# Modules that vLLM fuses (`packed_modules_mapping`), for each of their members.
_FUSED_MODULES = {
    key: keys
    for keys in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
    )
    for key in keys
}


def is_linear(name: str, array: ArrayLike) -> bool:
    """Return whether an array is the matrix of a linear layer that published models quantize."""
    module, key, index = split_name(name)
    if key != WEIGHT or index or len(array.shape) != 2 or not is_plain(array.dtype):
        return False
    keys = module.split(".")
    return (
        keys[-1] not in _UNQUANTIZED_KEYS
        and _ROUTER not in keys
        and _UNQUANTIZED_WORDS.isdisjoint(words_of_key(keys[-1]))
        and not any(item.startswith(_TOWERS) for item in keys)
    )


def is_fused(name: str, array: ArrayLike) -> bool:
    """Return whether an array contains the matrices of all experts of a layer."""
    last = name.rpartition(".")[2]
    is_one = EXPERTS in name and last in (_FUSED_IN, _FUSED_OUT)
    return is_one and len(array.shape) == 3 and is_plain(array.dtype)


def single_matrices(name: str, array: LazyArray) -> Iterator[tuple[str, LazyArray]]:
    """Yield the matrices of linear layers in an array by name; fused experts give one matrix each."""
    if array.ndim == 2:
        yield name, array
        return
    above, _, last = name.rpartition(".")
    for expert in range(array.shape[0]):
        both, rows = take(array, 0, expert), array.shape[1] // 2
        if last == _FUSED_OUT:
            yield f"{above}.{expert}.{_FUSED_OUT}.{WEIGHT}", both
            continue
        for number, key in enumerate(("gate_proj", "up_proj")):
            matrix = window(both, (number * rows, 0), (rows, both.shape[1]))
            yield f"{above}.{expert}.{key}.{WEIGHT}", matrix


def is_out_first(name: str, array: ArrayLike, hidden: int | None) -> bool | None:
    """Return whether fused matrices are (expert, out, in), as in linear layers; None if unknown.

    Args:
        name, array: Name and array of the fused matrices.
        hidden: Hidden size of the model.
    """
    first, second = array.shape[-2:]
    if first == second or hidden not in (first, second):
        return None
    return (second == hidden) == name.endswith(_FUSED_IN)


def half_quantized_experts(quantized: Iterable[str], plain: Iterable[str]) -> list[str]:
    """Return the quantized matrices that vLLM fuses with unquantized ones.

    Fused matrices are q, k and v; gate and up; and all experts of a layer. vLLM refuses models that quantize
    only some of them (`is_layer_skipped`), or takes codes for numbers.
    """
    others = set(map(_fused_pattern, plain))
    return [name for name in quantized if _fused_pattern(name) in others]


def _fused_pattern(name: str) -> tuple[str, ...]:
    """Return patterns of the matrices that are fused with a given one."""
    above, experts, _ = name.partition(EXPERTS)
    if experts:
        return above, experts
    above, _, last = split_name(name)[0].rpartition(".")
    return above, *_FUSED_MODULES.get(last, (last,))


def unquantized_modules(arrays: Mapping[str, ArrayLike], quantized: Collection[str]) -> list[str]:
    """Return the full names of modules with unquantized matrices.

    The result includes a tied output head, which is not stored as an array, because loaders create a module
    for it. Names must be complete: vLLM compares full names of linear layers, and transformers before 5
    matches parts of names, so that `model.layers.1` would also match `model.layers.10`.

    Args:
        arrays: Arrays by name.
        quantized: Names of the quantized arrays.
    """
    others = set(_modules_above(quantized))
    matrices = (name for name, array in arrays.items() if name not in quantized and len(array.shape) > 1)
    modules = dict.fromkeys((_HEAD, *(name.rpartition(".")[0] for name in matrices)))
    return sort_naturally(module for module in modules if module and module not in others)


def _modules_above(names: Iterable[str]) -> Iterator[str]:
    """Yield the modules that contain arrays, outermost first."""
    for name in names:
        keys = name.split(".")[:-1]
        yield from (".".join(keys[:stop]) for stop in range(1, len(keys) + 1))
