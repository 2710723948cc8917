"""Parse quantization settings in `config.json`: the scheme, unquantized modules, and dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from typing import Any, Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.quantized.scales import split_name

FIELD = "quantization_config"
Like = Literal["float32", "maxtext"]
"""How products are rounded: once, or with scales first rounded to bfloat16 as in MaxText."""
LIKES: tuple[Like, ...] = ("float32", "maxtext")
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
_MOST_PATTERNS = 256
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
    beside = location.get(_EXPERTS, config.get(_EXPERTS))
    return {_EXPERTS: beside, **declared} if declared and isinstance(beside, str) else declared


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


def exempt_modules(declared: Mapping[str, Any] | None) -> ExemptModules:
    """Return the modules that a `quantization_config` exempts from quantization.

    Regular expressions (`re:.*lm_head`) are supported if they are equivalent to globs; others are ignored.
    """
    lists = [(declared or {}).get(field) for field in _EXEMPT]
    entries = [item for one in lists if isinstance(one, list) for item in one if isinstance(item, str)]
    globs = [glob for entry in entries if (glob := _glob(entry)) and "*" in glob][:_MOST_PATTERNS]
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
    declared = [
        location.get(field)
        for location in (config, *parts)
        if isinstance(location, Mapping)
        for field in _DTYPES
    ]
    return tuple(dict.fromkeys(item.removeprefix("torch.") for item in declared if isinstance(item, str)))


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the quantization settings from a configuration and its parts."""
    left = {field: item for field, item in config.items() if field not in (*_FIELDS, _EXPERTS)}
    parts = {field: item for field, item in left.items() if field.endswith(_PART) and isinstance(item, dict)}
    return left | {field: without_quantization(item) for field, item in parts.items()}


def scheme(declared: Mapping[str, Any] | None) -> str:
    """Describe a `quantization_config`: `fp8 in blocks of 128 x 128`; empty if there is none."""
    if not declared:
        return ""
    groups = [_scheme_of_group(group) for group in _groups(declared)]
    method = str(declared.get("quant_method") or declared.get("quant_algo") or "of no named method")
    parts = [method, *(str(declared[key]) for key in ("quant_algo", "format", "fmt") if declared.get(key))]
    block = declared.get("weight_block_size")
    size = f" in blocks of {' x '.join(map(str, block))}" if isinstance(block, list | tuple) and block else ""
    return ", ".join(dict.fromkeys((*parts, *groups, *_bits(declared)))) + size


def _groups(declared: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the weight settings of each group in compressed-tensors."""
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _scheme_of_group(weights: Mapping[str, Any]) -> str:
    size = f" in groups of {weights['group_size']}" if weights.get("group_size") else ""
    return f"{weights.get('type', '')}{weights.get('num_bits', '')}{size}"


def _bits(declared: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of bits that GPTQ and AWQ state."""
    if isinstance(declared.get("bits"), int):
        yield f"{declared['bits']} bits in groups of {declared.get('group_size')}"
