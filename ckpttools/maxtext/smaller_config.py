"""Build the `config.json` of a model with fewer layers, experts or tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import sample_names
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import nested_value
from ckpttools.maxtext.config.model_facts import BY_LAYER
from ckpttools.maxtext.model_config import PREDICTION_FIELDS, prediction_layers
from ckpttools.model_families.family import Family

# Maximum number of layer counts in a message.
_MAX_LISTED = 8
# Fields that state the number of decoder layers, by their last words.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
# Lists of layer indices.
_LAYER_NUMBER_LISTS = ("mlp_only_layers", "moe_layers")
# Lists that are unrelated to layers, whatever their length.
_UNRELATED_LISTS = ("architectures", "token_id", "token_ids")
_ROUTED_EXPERTS = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")
_GROUPS = {"n_group": 1, "topk_group": 1}
# Layers before this index are of another kind: they have full attention unless a list gives the kind of each
# layer (Qwen2), have no experts (DeepSeek), or select experts with a table (DeepSeek V4).
_LAYER_THRESHOLDS = ("max_window_layers", "first_k_dense_replace", "num_hash_layers")
# This many of the last layers reuse keys and values of an earlier layer (Gemma 4).
_SHARED_KV_LAYERS = "num_kv_shared_layers"
# Layer index, possibly with leading zeros -> the value that replaces it.
_PER_LAYER_CONFIG = "per_layer_config"
# Tokens that begin and end generation.
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class KeptParts:
    """The parts of a model that are kept.

    Attributes:
        layers: The layer indices in ascending order; None for all.
        experts: The number of leading experts to keep in each layer; None for all.
        vocab: The number of leading tokens to keep; None for all.
    """

    layers: Sequence[int] | None = None
    experts: int | None = None
    vocab: int | None = None


@dataclass(frozen=True)
class SmallerConfig:
    """A reduced configuration, and the changes in it.

    Attributes:
        config: The parsed `config.json`.
        layers: The index of each layer in the larger model.
        changes: The changes, one sentence each.
    """

    config: Mapping[str, Any]
    layers: Sequence[int]
    changes: tuple[str, ...]


def smaller_config(config: Mapping[str, Any], family: Family, parts: KeptParts) -> SmallerConfig:
    """Return the configuration of a part of a model.

    Raises:
        ConfigError: The configuration does not state a value to be changed, or it is unclear whether a list
            has one entry per layer.
        UsageError: A layer does not exist, or the model is smaller than the parts to keep.
    """
    result: dict[str, Any] = json.loads(json.dumps(config))
    count_field = _field(result, _layer_fields(family), "layers")
    count: int = nested_value(result, count_field)
    kept = list(range(count)) if parts.layers is None else list(parts.layers)
    _check_layers(kept, count)
    changes = []
    if parts.layers is not None:
        changes += [
            *_with_size(result, count_field, len(kept)),
            *_per_layer(result, count_field, count, kept),
        ]
    if parts.experts is not None:
        field = _field(result, family.sizes.get("expert", ()), "experts")
        _check_fewer(parts.experts, nested_value(result, field), "experts")
        changes += [*_with_size(result, field, parts.experts), *_with_routing(result, parts.experts)]
    if parts.vocab is not None:
        field = _field(result, family.sizes.get("vocab", ()), "vocab")
        _check_fewer(parts.vocab, nested_value(result, field), "vocab")
        changes += [*_with_size(result, field, parts.vocab), *_drop_padding_token(result, field, parts.vocab)]
        changes += _removed_token_changes(result, field, parts.vocab)
    return SmallerConfig(result, kept, tuple(changes))


def _layer_fields(family: Family) -> list[str]:
    """Return the fields with the number of text layers; towers have separate layers."""
    text = family.text_layers
    keys = [parse_key(group.right) for group in family.layers if group not in text]
    of_towers = {axis for key in keys for axis in key.axes}
    names = [name for axis, fields in family.sizes.items() if axis not in of_towers for name in fields]
    return [name for name in names if isinstance(name, str) and name.rpartition(".")[2] in _LAYERS]


def _field(config: Mapping[str, Any], names: Sequence[str | int], subject: str) -> str:
    """Return the first of these fields that a configuration has."""
    known = [name for name in names if isinstance(name, str)]
    result = next((name for name in known if isinstance(nested_value(config, name), int)), None)
    if result is None:
        raise ConfigError(
            f"{option(subject)} does not apply to this model",
            expected=" or ".join(dict.fromkeys(known)) or f"a model with {subject}",
            hint=f"leave {option(subject)} out",
        )
    return result


def _check_layers(kept: Sequence[int], count: int) -> None:
    if not kept or sorted(set(kept)) != kept or kept[0] < 0 or kept[-1] >= count:
        raise UsageError(
            "these layers cannot be kept",
            got=sample_names(list(map(str, kept)), _MAX_LISTED) or "none",
            expected=f"one or more of the model's {count}: 0 to {count - 1}, ascending",
        )


def _check_fewer(expected: int, available: int, subject: str) -> None:
    if not 1 <= expected <= available:
        raise UsageError("the model has fewer", got=option(subject, expected), expected=f"1 to {available}")


def _parts(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a configuration and its nested parts, with the prefixes of their fields."""
    yield "", config
    for name, part in config.items():
        if isinstance(part, dict) and name.endswith("_config"):
            yield from ((f"{name}.{prefix}", item) for prefix, item in _parts(part))


def _with_size(config: dict[str, Any], field: str, length: int) -> Iterator[str]:
    """Set a size wherever the configuration states it, and yield the changes."""
    before, last = nested_value(config, field), field.rpartition(".")[2]
    for prefix, part in _parts(config):
        of_whole = field.startswith(prefix) and part.get(last) == before
        if of_whole and part[last] != length:
            part[last] = length
            yield f"{prefix}{last} is {length}; it was {before}"


def _per_layer(config: dict[str, Any], field: str, count: int, kept: Sequence[int]) -> Iterator[str]:
    """Reduce lists that have one entry per layer or contain layer numbers, and yield the changes."""
    above = field.rpartition(".")[0]
    part = nested_value(config, above) if above else config
    predicting = prediction_layers(part)
    for name, value in list(part.items()):
        if name in _LAYER_NUMBER_LISTS and isinstance(value, list):
            part[name] = [kept.index(item) for item in value if item in kept]
        elif isinstance(value, list) and _is_per_layer(name, value, count, predicting):
            part[name] = [value[item] for item in kept]
        elif name in PREDICTION_FIELDS and value:
            part[name] = 0
        elif name in _LAYER_THRESHOLDS and isinstance(value, int):
            part[name] = sum(item < value for item in kept)
        elif name == _PER_LAYER_CONFIG and isinstance(value, dict):
            of_kept = {key: item for key, item in value.items() if key.isdecimal() and int(key) in kept}
            part[name] = {str(kept.index(int(k))).zfill(len(k)): item for k, item in of_kept.items()}
        elif name == _SHARED_KV_LAYERS and isinstance(value, int):
            part[name] = sum(item >= count - value for item in kept)
        if part[name] != value:
            yield f"{above}{'.' * bool(above)}{name} is {json.dumps(part[name])}"


def _drop_padding_token(config: dict[str, Any], field: str, vocab: int) -> Iterator[str]:
    """Remove a padding token that no longer exists, because torch rejects it."""
    for prefix, part in _parts(config):
        token = part.get("pad_token_id")
        if field.startswith(prefix) and isinstance(token, int) and token >= vocab:
            part["pad_token_id"] = None
            yield f"{prefix}pad_token_id is null; it was {token}"


def _removed_token_changes(config: dict[str, Any], field: str, vocab: int) -> Iterator[str]:
    """Yield named tokens that no longer exist; without them, no text can begin or end."""
    for prefix, part in _parts(config):
        for name in _SPECIAL_TOKENS if field.startswith(prefix) else ():
            declared = part.get(name)
            removed = [
                item
                for item in (declared if isinstance(declared, list) else [declared])
                if _is_removed(item, vocab)
            ]
            if removed:
                numbers = ", ".join(map(str, removed))
                yield (
                    f"{prefix}{name} is {numbers}, none of the {vocab} tokens: choose another token to "
                    f"generate"
                )


def _is_removed(token: object, vocab: int) -> bool:
    return isinstance(token, int) and token >= vocab


def _is_per_layer(name: str, value: list[Any], count: int, predicting: int) -> bool:
    """Return whether a list has one entry per layer.

    The list may be longer, with entries for MTP layers or for more layers than the model has, which
    transformers accepts.

    Raises:
        ConfigError: A list that must have one entry per layer is shorter, or an unknown list has this length.
    """
    is_known = name in BY_LAYER and bool(value)  # transformers replaces an empty list (Llama 4).
    is_enough = len(value) >= count if is_known else len(value) in (count, count + predicting)
    if name.endswith(_UNRELATED_LISTS) or is_known == is_enough:
        return is_known
    raise ConfigError(
        f"{name} must have one entry for each layer, but has a different length"
        if is_known
        else f"it is unknown whether {name} has one entry for each layer, or has this length by chance",
        got=f"{len(value)} entries",
        expected=f"{count} or more of {', '.join(BY_LAYER)}, and no other list of this length",
        hint=f"remove {name} from a copy of config.json, shrink that model, and add the list for the kept "
        f"layers",
    )


def _with_routing(config: dict[str, Any], experts: int) -> Iterator[str]:
    """Limit the number of chosen experts; keep choosing from groups only if the groups are equal."""
    for prefix, part in _parts(config):
        for name in _ROUTED_EXPERTS:
            if isinstance(part.get(name), int) and part[name] > experts:
                yield f"{prefix}{name} is {experts}; it was {part[name]}"
                part[name] = experts
        groups = part.get("n_group")
        if isinstance(groups, int) and groups > 1 and (experts % groups or experts < 2 * groups):
            yield f"{prefix}n_group and {prefix}topk_group are 1; they were {groups} and {part['topk_group']}"
            part.update(_GROUPS)
