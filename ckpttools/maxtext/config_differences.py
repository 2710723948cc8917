"""Differences between two `config.json` that change what a model computes from the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import matches_any
from ckpttools.families.registry import families
from ckpttools.families.silent import TEXT_PARTS, default_theta, silent_fields, without_alias
from ckpttools.formats.json_file import read_json
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.sizes import nested
from ckpttools.maxtext.config.facts import FULL_ATTENTION, LAYER_TYPES
from ckpttools.maxtext.model_files import companions_of
from ckpttools.stores.registry import parse

# Fields that say nothing of what a forward pass computes: names, versions, storage, training, generation, and
# how results are returned. All other fields count, so that an unknown one is never taken for harmless.
_HARMLESS = (
    "_*",
    "architectures",
    "auto_map",
    "*transformers_version",
    "*_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
    "*_token_id",
    "*_token_ids",
    "*_token_index",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "*dropout*",
    "*_pdrop",
    "*initializer*",
    "init_std",
    "*aux_loss*",
    "*z_loss*",
    "*loss_coef*",
    "output_*",
    "return_dict*",
    "use_cache",
    "use_return_dict",
    "attn_implementation",
    "gradient_checkpointing",
    "pretraining_tp",
    "ep_size",
    "torchscript",
    "id2label",
    "label2id",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "tokenizer_class",
    "name_or_path",
    "unsloth_*",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "max_length",
    "min_length",
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
)
_MISSING = "not stated"
_ROPES = ("rope_scaling", "rope_parameters")
_ROPE, _THETA = "rope_parameters", "rope_theta"
# Layers with a window may have a rotary embedding of their own. Before transformers 5 its base was a field of
# its own in Gemma 3, and that of all layers in OLMo 3.
_LOCAL, _LOCAL_THETA = "sliding_attention", "rope_local_base_freq"
_USUAL_LOCAL_THETA = 10000.0
# Of windows that are switched off nothing is used.
_WINDOWS, _WINDOW = "use_sliding_window", ("sliding_window", "max_window_layers")
_POSITIONS = "max_position_embeddings"
# Positions that the model was trained with count in these types only.
_PLAIN_ROPES = (None, "default", "linear", "llama3")


def config_of(tree: Tree) -> Mapping[str, Any] | None:
    """The configuration of a model: next to its weights, or carried along; None where there is none."""
    if tree.metadata.config is not None:
        return tree.metadata.config
    if not tree.metadata.place:
        return None
    file = companions_of(tree).files.get(CONFIG)
    try:
        return None if file is None else read_json(parse(file.path))
    except CheckpointError:
        return None


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A field that two configurations state differently.

    Attributes:
        name: of the field, with the parts that it is in.
        one, other: its values.
        is_known: whether the field is known to change what a model computes; a field that no family reads may
            change nothing.
    """

    name: str
    one: object
    other: object
    is_known: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.one} and {self.other}{'' if self.is_known else ' (unknown field)'}"


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the fields in which two models compute differently, or may do so.

    A field that is not stated has the value that transformers takes for it, where that is known.
    """
    one, other = dict(_fields(_stated(a), "")), dict(_fields(_stated(b), ""))
    names = sorted(one.keys() | other.keys())
    pairs = ((name, one.get(name, _MISSING), other.get(name, _MISSING)) for name in names)
    different = ((name, x, y) for name, x, y in pairs if x != y and not _is_usual(name, x, y))
    return [ConfigDifference(name, x, y, _is_known(name)) for name, x, y in different]


def _is_known(name: str) -> bool:
    return _ROPE in name.split(".") or name.rpartition(".")[2] in _read_fields()


@cache
def _read_fields() -> frozenset[str]:
    """Return the names of all fields that a family reads, without the parts that they are in."""
    found = {"model_type", "head_dim", LAYER_TYPES, *_WINDOW, _WINDOWS, _POSITIONS}
    for family in families().values():
        found |= {each for names in family.sizes.values() for each in names if isinstance(each, str)}
        found |= {each for rule in (*family.flags.values(), *family.others.values()) for each in rule.field}
        found |= {term.name for term in family.settings.terms() if term.kind == "field"}
    return frozenset(each.rpartition(".")[2] for each in found)


def _is_usual(name: str, x: object, y: object) -> bool:
    """Whether one side states what the other has without stating it: newer versions write more fields."""
    if _MISSING not in (x, y):
        return False
    stated = y if x == _MISSING else x
    if name.rpartition(".")[2] == LAYER_TYPES and isinstance(stated, list):
        return all(each == stated[0] == FULL_ATTENTION for each in stated)
    is_neutral = (type(stated) in (int, float) and stated == 0) or (type(stated) is float and stated == 1)
    return is_neutral or stated is False or stated in ([], "")


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what transformers takes for fields that it does not state."""
    made = _merged(silent_fields(config), config)
    place = next((name for name in TEXT_PARTS if isinstance(nested(config, name), Mapping)), "")
    text = nested(made, place) if place else made
    theta = default_theta(config)
    if theta is not None and text.get(_THETA) is None:
        text[_THETA] = theta
    return made


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name, value in merged.items():
        if isinstance(value, Mapping):
            under = below.get(name)
            merged[name] = _merged(under if isinstance(under, Mapping) else {}, value)
    return merged


def _fields(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The fields that count, by their full names; null is the same as not stated."""
    part = _with_one_rope(config)
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if part.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        part["head_dim"] = width // heads
    unused = {*(_WINDOW if part.get(_WINDOWS) is False else ())}
    kind = part.get(_ROPE, {}).get("rope_type")
    if kind in _PLAIN_ROPES:
        unused.add(_POSITIONS)
    for name, value in part.items():
        if value is None or name in unused or matches_any(name, _HARMLESS):
            continue
        if isinstance(value, Mapping):
            yield from (
                _fields(value, f"{prefix}{name}.")
                if name.endswith("_config")
                else _flat(value, f"{prefix}{name}.")
            )
        else:
            yield f"{prefix}{name}", without_alias(name, value)


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{prefix}{name}.")
        elif each is not None:
            yield f"{prefix}{name}", each


def _with_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with its rotary embedding as transformers 5 writes it, whichever version wrote it."""
    made = {name: value for name, value in config.items() if name not in (*_ROPES, _THETA, _LOCAL_THETA)}
    found: dict[str, Any] = {}
    for name in reversed(_ROPES):  # where a file has both, transformers takes the older one
        stated = config.get(name)
        found.update(stated if isinstance(stated, Mapping) else {})
    local = found.pop(_LOCAL, None)
    if isinstance(found.get(FULL_ATTENTION), Mapping):
        found = {**found.pop(FULL_ATTENTION), **found}
    if config.get(_THETA) is not None and not any(isinstance(each, Mapping) for each in found.values()):
        found.setdefault(_THETA, config[_THETA])
    if str(config.get("model_type")).startswith("gemma3"):
        local = local or {_THETA: config.get(_LOCAL_THETA) or _USUAL_LOCAL_THETA}
    elif config.get("model_type") == "olmo3":
        local = local or {_THETA: found.get(_THETA)}
    parts = _plain_rope(found), _plain_rope(local if isinstance(local, Mapping) else {})
    made |= {_ROPE: parts[0]} if parts[0] else {}
    return made | ({f"{_ROPE}.{_LOCAL}": parts[1]} if parts[1] else {})


def _plain_rope(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A rotary embedding by the newer name of its type, and without the type that is the default."""
    found = dict(stated)
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if found.get("rope_type") == "default":
        del found["rope_type"]
    return found
