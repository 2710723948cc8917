"""Find differences between two configurations that change what a model computes, or how it converts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ckpttools.array.fingerprint import Describer
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import matches_any
from ckpttools.formats.adapters import ADAPTER, BASE_NAME, is_adapter
from ckpttools.formats.json_file import read_json
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.sizes import Size, nested_value
from ckpttools.mapping.table import Table
from ckpttools.maxtext.config.model_facts import FULL_ATTENTION, LAYER_TYPES
from ckpttools.maxtext.model_files import sidecars_of
from ckpttools.maxtext.versions import VOCAB
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import (
    TEXT_PARTS,
    compared_fields,
    compared_names,
    default_theta,
    resolve_alias,
)
from ckpttools.model_families.registry import families, family_named, family_of, names_a_file
from ckpttools.quantized.config import FIELD, declared_quantization
from ckpttools.stores.registry import parse

# Fields that do not affect a forward pass: names, versions, storage, training, generation, and the form of
# results. All other fields are compared, so that unknown ones are never ignored.
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
_HARMLESS_OF_ADAPTERS = frozenset(
    (
        "auto_mapping",
        BASE_NAME,
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
_MISSING = "not stated"
_ROPES = ("rope_scaling", "rope_parameters")
_ROPE, _THETA = "rope_parameters", "rope_theta"
_TYPE, _DEFAULT_TYPE = "rope_type", "default"
# The two embeddings of DeepSeek V4.
_V4_ROPES = ("main", "compress")
# Layers with a window may have their own rotary embedding. Before transformers 5, Gemma 3 had a separate
# field for its base, and OLMo 3 used the base of all layers.
_LOCAL, _LOCAL_THETA = "sliding_attention", "rope_local_base_freq"
_DEFAULT_LOCAL_THETA = 10000.0
# A field that turns windows off -> the fields that then have no effect.
_WINDOWS, _WINDOW = "use_sliding_window", ("sliding_window", "max_window_layers")
_POSITIONS = "max_position_embeddings"
# Types of rotary embeddings that ignore the number of trained positions.
_PLAIN_ROPES = (None, _DEFAULT_TYPE, "linear", "llama3")


def config_of(tree: Tree) -> Mapping[str, Any] | None:
    """Return the configuration next to a model's weights or inside its checkpoint, or None."""
    if tree.metadata.config is not None:
        return tree.metadata.config
    if not tree.metadata.location:
        return None
    file = sidecars_of(tree).files.get(CONFIG)
    try:
        return None if file is None else read_json(parse(file.path))
    except CheckpointError:
        return None


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A field whose value differs between two configurations.

    Attributes:
        name: The name of the field, with its parent parts.
        one, other: The two values.
        is_known: Whether the field is known to affect the computation. A field that no family reads may have
            no effect.
    """

    name: str
    one: object
    other: object
    is_known: bool

    def __str__(self) -> str:
        about = "" if self.is_known else " (unknown field)"
        if self.is_known and _MISSING in (self.one, self.other):
            about = " (no known default)"
        return f"{self.name}: {self.one} and {self.other}{about}"


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the fields in which two configurations describe, or may describe, different computations.

    An absent field has transformers' default for the type of the model. If the default is unknown, an absent
    field differs from every stated value.
    """
    one, other = dict(_fields(_with_defaults(a), "")), dict(_fields(_with_defaults(b), ""))
    names = sorted(one.keys() | other.keys())
    pairs = ((name, one.get(name, _MISSING), other.get(name, _MISSING)) for name in names)
    different = ((name, x, y) for name, x, y in pairs if x != y)
    return [
        ConfigDifference(name, _format_value(name, x), _format_value(name, y), _is_known(name))
        for name, x, y in different
    ]


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that change the results of a model with the same arrays."""
    names = [item.name for item in config_differences(a, b)]
    quantized = declared_quantization(a), declared_quantization(b)
    return [*names, FIELD] if None not in quantized and quantized[0] != quantized[1] else names


def differing_adapter_fields(a: Tree, b: Tree) -> list[str]:
    """Return the names of fields that change the effect of equal factors, if both trees are PEFT's adapters.

    Raises:
        CheckpointError: A configuration cannot be read.
    """
    one, other = _adapter_config(a), _adapter_config(b)
    if one is None or other is None:
        return []
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _adapter_config(tree: Tree) -> dict[str, Any] | None:
    """Return the fields with an effect; the order of lists has none.

    Each release of PEFT adds fields, with defaults that have no effect: None, False or empty.
    """
    file = parse(tree.metadata.location).folder() / ADAPTER if tree.metadata.location else None
    if file is None or not is_adapter(tree) or not file.is_file():
        return None
    return {
        name: sorted(value, key=str) if isinstance(value, list) else value
        for name, value in read_json(file).items()
        if name not in _HARMLESS_OF_ADAPTERS and not (value is None or value is False or value in ({}, []))
    }


def _format_value(name: str, value: object) -> object:
    """Return a value as shown in messages; the default rotary embedding type is compared as absent."""
    return _DEFAULT_TYPE if value == _MISSING and name.endswith(f".{_TYPE}") else value


def _is_known(name: str) -> bool:
    return _ROPE in name.split(".") or name.rpartition(".")[2] in _read_fields()


@cache
def _read_fields() -> frozenset[str]:
    """Return the names of all fields that any family reads, without their parent parts."""
    fields = {"model_type", "head_dim", LAYER_TYPES, *_WINDOW, _WINDOWS, _POSITIONS, *compared_names()}
    for family in families().values():
        fields |= {name for names in family.sizes.values() for name in names if isinstance(name, str)}
        fields |= {name for rule in (*family.flags.values(), *family.others.values()) for name in rule.field}
        fields |= {term.name for term in family.settings.terms() if term.kind == "field"}
    return frozenset(name.rpartition(".")[2] for name in fields)


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in transformers' defaults for absent fields of a configuration."""
    result = _merge(compared_fields(config), config)
    location = next((name for name in TEXT_PARTS if isinstance(nested_value(config, name), Mapping)), "")
    text = nested_value(result, location) if location else result
    theta = default_theta(config)
    if theta is not None and text.get(_THETA) is None:
        text[_THETA] = theta
    return result


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name, value in merged.items():
        if isinstance(value, Mapping):
            under = below.get(name)
            merged[name] = _merge(under if isinstance(under, Mapping) else {}, value)
    return merged


def _fields(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the relevant fields by full name; a null field counts as absent."""
    part = _with_one_rope(config)
    heads, width = part.get("num_attention_heads"), part.get("hidden_size")
    if part.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        part["head_dim"] = width // heads
    unused = {*((*_WINDOW, _WINDOWS) if part.get(_WINDOWS) is False else ())}
    layers = part.get(LAYER_TYPES)
    if part.get(_WINDOWS) and layers == FULL_ATTENTION:
        unused.add(LAYER_TYPES)  # Where windows are used, the default differs.
    elif isinstance(layers, list) and layers and all(layer == FULL_ATTENTION for layer in layers):
        part[LAYER_TYPES] = FULL_ATTENTION
    kind = part.get(_ROPE, {}).get(_TYPE)
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
            yield f"{prefix}{name}", resolve_alias(name, value)


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
        elif item is not None:
            yield f"{prefix}{name}", item


def _with_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the rotary embedding of a configuration to the form of transformers 5."""
    built = {name: value for name, value in config.items() if name not in (*_ROPES, _THETA)}
    scaling, stated = (
        dict(section) if isinstance(section := config.get(name), Mapping) else {} for name in _ROPES
    )
    kind, base = str(config.get("model_type")), config.get(_THETA)
    has_local = kind.startswith("gemma3") or kind == "olmo3"
    if has_local and _LOCAL not in stated and FULL_ATTENTION not in stated:
        stated = {}  # transformers ignores parameters that are not grouped by layer type.
    # In other cases, the older name replaces the newer one.
    result = {**stated, **scaling} if has_local else scaling or stated
    if kind == "deepseek_v4" and not all(isinstance(result.get(name), Mapping) for name in _V4_ROPES):
        # The parameters are for compressed layers, and the base is a separate field.
        result = {name: value for name, value in result.items() if name not in (*_V4_ROPES, _THETA)}
    local = result.pop(_LOCAL, None)
    if isinstance(result.get(FULL_ATTENTION), Mapping):
        result = {**result.pop(FULL_ATTENTION), **result}
    if base is not None and not any(isinstance(section, Mapping) for section in result.values()):
        result.setdefault(_THETA, base)
    if kind.startswith("gemma3"):
        local_base = built.pop(_LOCAL_THETA, None) or _DEFAULT_LOCAL_THETA
        local = {_THETA: local_base, **(local if isinstance(local, Mapping) else {})}
    elif kind == "olmo3":
        local = local or {_THETA: result.get(_THETA)}
    parts = _plain_rope(result), _plain_rope(local if isinstance(local, Mapping) else {})
    built |= {_ROPE: parts[0]} if parts[0] else {}
    return built | ({f"{_ROPE}.{_LOCAL}": parts[1]} if parts[1] else {})


def _plain_rope(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding with the newer name for its type, omitting a default type."""
    result = dict(stated)
    if "type" in result:
        result.setdefault(_TYPE, result.pop("type"))
    if result.get(_TYPE) == _DEFAULT_TYPE:
        del result[_TYPE]
    return result


# Flag -> its description, and the option that sets it.
_FLAG_CHOICES = {
    "interleaved": ("the order of rotary pairs", "rope_layout", "halves", " or interleaved"),
    "tied": ("how the output head is handled", "tied", "keep", ", drop or materialize"),
}


def require_same_family(
    family: Family, config: Mapping[str, Any], location: str, carried: Mapping[str, Any]
) -> None:
    """Raise an error if a configuration belongs to another family than the one in the checkpoint.

    Args:
        family: The family of `config`.
        config: The configuration that is used.
        location: The location of `config`.
        carried: The configuration in the checkpoint.

    Raises:
        ConfigError: The configuration in the checkpoint belongs to another or an unknown family.
    """
    try:
        name = family_of(carried, location).name
    except ConfigError:
        name = None
    if name != family.name:
        raise _contradiction_error(
            location,
            f"{_model_type_text(config)} (family {family.name})",
            f"{_model_type_text(carried)} ({f'family {name}' if name else 'of no known family'})",
            f"leave {option('like')} out, or choose the family with {option('family', 'NAME')}",
        )


def require_own_rows(
    named: str | None,
    config: Mapping[str, Any],
    location: str,
    convert: Callable[[Family], Mapping[str, LazyArray]],
) -> None:
    """Raise an error if the user's family gives other values than the configuration's own family.

    Family files are always accepted, and so are families that list the model's type. If the rows of the
    configuration's own family do not match the arrays, any family is accepted.

    Args:
        named: The family that the user names, or None.
        config: The configuration of the checkpoint.
        location: The location of the configuration.
        convert: Converts the arrays with a family; raises CheckpointError if the family does not match.

    Raises:
        ConfigError: The configuration's family also matches the arrays, and converts them to different
            values.
    """
    if named is None or names_a_file(named):
        return
    family = family_named(named)
    if config.get("model_type") in family.model_types:
        return
    try:
        own = family_of(config, location)
        expected = _describe_arrays(convert(own))
    except CheckpointError:
        return
    if _describe_arrays(convert(family)) != expected:
        file = option("family", "FILE.toml")
        raise ConfigError(
            "the rows of this family would give the arrays other values than the model's own family",
            location=location,
            got=option("family", named),
            expected=f"{_model_type_text(config)} (family {own.name}), whose rows match these arrays as well",
            hint=f"leave {option('family')} out; if {CONFIG} is wrong, correct its model_type; to use these "
            f"rows on purpose, {action('families.toml', named)} writes a file of them for {file}",
        )


def require_same_values(
    own_table: Table, carried: Table, arrays: Mapping[str, LazyArray], location: str
) -> None:
    """Raise an error if a configuration gives other values than the one in the checkpoint.

    Args:
        own_table: The rows bound to the configuration that is used.
        carried: The same family's rows bound to the configuration in the checkpoint.
        arrays: MaxText arrays that match `own_table`.
        location: The location of the configuration that is used.

    Raises:
        ConfigError: The configurations differ in a flag, or in a size that affects values.
    """
    for name, flag in own_table.flags.items():
        other = carried.flags.get(name)
        if other is not None and other.value != flag.value:
            raise _contradiction_error(
                location, _flag_text(name, flag), _flag_text(name, other), _flag_hint(name)
            )
    # Vocabulary rows may be cut off, depending on their content.
    differing = [
        axis
        for axis, size in own_table.sizes.items()
        if axis != VOCAB and axis in carried.sizes and carried.sizes[axis].length != size.length
    ]
    if differing and not _has_same_arrays(own_table, carried, arrays):
        got, expected = (_sizes_text(table.sizes, differing) for table in (own_table, carried))
        raise _contradiction_error(location, got, expected, _flag_hint(""))


def _has_same_arrays(table: Table, carried: Table, arrays: Mapping[str, LazyArray]) -> bool:
    """Return whether both tables give the same arrays, or the checkpoint's configuration does not match."""
    sizes = {**carried.sizes, **{axis: size for axis, size in table.sizes.items() if axis == VOCAB}}
    try:
        other = replace(carried, sizes=sizes).to_right(arrays, (VOCAB,))
    except CheckpointError:
        return True
    return _describe_arrays(table.to_right(arrays, (VOCAB,)).arrays) == _describe_arrays(other.arrays)


def _describe_arrays(arrays: Mapping[str, LazyArray]) -> list[object]:
    describer = Describer()
    return [(key, list(describer.lines(array))) for key, array in sorted(arrays.items())]


def _flag_hint(flag: str) -> str:
    """Return the hint for a contradicted flag, or a general hint."""
    leave = f"leave {option('like')} out, or"
    if flag not in _FLAG_CHOICES:
        return f"{leave} use the model that this checkpoint came from"
    choice, name, first, others = _FLAG_CHOICES[flag]
    return f"{leave} set {choice} with {option(name, first)}{others}"


def _contradiction_error(location: str, got: str, expected: str, hint: str) -> ConfigError:
    return ConfigError(
        "this configuration would give the arrays other values than the one in the checkpoint",
        location=location,
        got=got,
        expected=f"{expected}, as stored in the checkpoint",
        hint=hint,
    )


def _model_type_text(config: Mapping[str, Any]) -> str:
    return f"model_type {json.dumps(config.get('model_type'))}"


def _flag_text(name: str, flag: Flag) -> str:
    return f"{name} is {'set' if flag.value else 'not set'} ({flag.source})"


def _sizes_text(sizes: Mapping[str, Size], axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {sizes[axis].length} ({sizes[axis].source})" for axis in axes)
