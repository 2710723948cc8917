"""What a `config.json` says of how weights are quantised, of which are not, and of their dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.quantized.scales import split_name

FIELD = "quantization_config"
_FIELDS = (FIELD, "compression_config")
# What tools write beside config.json that says how weights are quantised, and loaders read first.
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
# Where it lists the modules that are not quantised.
_EXEMPT = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules", "unquantized_modules"),
)
# Each takes time for each module; what is not read exempts nothing.
_MOST_PATTERNS = 256
_DTYPES, _PART = ("dtype", "torch_dtype"), "_config"
_EXPERTS = "expert_dtype"


def says_quantized(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a `config.json` says of how its weights are quantised; None if it says nothing."""
    config = config or {}
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    found = ((place.get(field), place) for place in places for field in _FIELDS)
    said, place = next((each for each in found if isinstance(each[0], Mapping) and each[0]), (None, config))
    # DeepSeek V4 says beside it what V4.1 says in it.
    beside = place.get(_EXPERTS, config.get(_EXPERTS))
    return {_EXPERTS: beside, **said} if said and isinstance(beside, str) else said


@dataclass(frozen=True, slots=True)
class Exempt:
    """Modules that are not quantised.

    Attributes:
        names: of modules, or their last keys.
        pattern: of others' whole names, or None.
    """

    names: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def has(self, name: str) -> bool:
        """Whether an array lies in one of them."""
        if not (self.names or self.pattern):
            return False
        keys = split_name(name)[0].split(".")
        stops = range(1, len(keys) + 1)
        if any(".".join(keys[start:stop]) in self.names for stop in stops for start in range(stop)):
            return True
        return self.pattern is not None and any(self.pattern.match(".".join(keys[:stop])) for stop in stops)


def exempt_modules(said: Mapping[str, Any] | None) -> Exempt:
    """The modules that a `quantization_config` says are not quantised.

    Of regular expressions (`re:.*lm_head`) those that are globs as well; the others exempt nothing.
    """
    lists = [(said or {}).get(field) for field in _EXEMPT]
    entries = [each for one in lists if isinstance(one, list) for each in one if isinstance(each, str)]
    globs = [glob for each in entries if (glob := _glob(each)) and "*" in glob][:_MOST_PATTERNS]
    names = frozenset(each for each in entries if each and not each.startswith("re:"))
    return Exempt(names, re.compile("|".join(map(translate, globs))) if globs else None)


def _glob(entry: str) -> str:
    """An entry of such a list as a glob; empty where it is another regular expression."""
    if not entry.startswith("re:"):
        return entry
    pattern = entry.removeprefix("re:").removeprefix("^").removesuffix("$")
    glob = pattern.replace(".*", "*").replace("\\.", ".")
    return "" if set(glob) & set("\\[](){}|+?^$") else glob


def states(config: Mapping[str, Any] | None, dtype: DType) -> bool:
    """Whether a configuration states a dtype of its weights, at the top or in one of its parts."""
    return dtype.name in stated_dtypes(config)


def stated_dtypes(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The dtypes that a configuration states, at the top and in its parts."""
    parts = [part for name, part in (config or {}).items() if name.endswith(_PART) and name != FIELD]
    said = [place.get(field) for place in (config, *parts) if isinstance(place, Mapping) for field in _DTYPES]
    return tuple(dict.fromkeys(each.removeprefix("torch.") for each in said if isinstance(each, str)))


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what it and its parts say of how weights are quantised."""
    left = {field: each for field, each in config.items() if field not in (*_FIELDS, _EXPERTS)}
    parts = {field: each for field, each in left.items() if field.endswith(_PART) and isinstance(each, dict)}
    return left | {field: without_quantization(each) for field, each in parts.items()}


def scheme(said: Mapping[str, Any] | None) -> str:
    """A `quantization_config` in words: `fp8 in blocks of 128 x 128`; empty where there is none."""
    if not said:
        return ""
    groups = [_scheme_of_group(each) for each in _groups(said)]
    method = str(said.get("quant_method") or said.get("quant_algo") or "of no named method")
    parts = [method, *(str(said[key]) for key in ("quant_algo", "format", "fmt") if said.get(key))]
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
