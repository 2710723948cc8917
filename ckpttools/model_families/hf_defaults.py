"""transformers' defaults for fields that a `config.json` does not state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.mapping.documents import pairs
from ckpttools.mapping.sizes import nested_value, states_field
from ckpttools.model_families.transformers_defaults import COMPARED_DEFAULTS, DEFAULTS

# If a rotary embedding is stated, only its base has a default here.
THETA = "rope.theta"
_USUAL_THETA = 10000.0
# Fields of multimodal configurations that contain the text model.
TEXT_PARTS = ("thinker_config.text_config", "text_config")
# Fields that transformers reads from the top level of a configuration, not from its text part.
_TOP_LEVEL_FIELDS = ("tie_word_embeddings",)
# Model types whose text model has the output head, and therefore the field for it.
_HEAD_IN_TEXT = ("llama4",)
_THINKER = "thinker_config"
# Fields that have an older name.
_OLDER = {"num_local_experts": "num_experts"}
_THETA = "rope_theta"
_ROPES = ("rope_parameters", "rope_scaling")
# Names of activation functions in transformers -> another name of the same function.
_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
_ByType = Mapping[str, Mapping[str, Any]]
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function")


def without_alias(name: str, value: Any) -> Any:
    """Return the value of a field, with activation functions under one canonical name.

    Args:
        name: Name of the field, with or without its parent parts.
        value: Value in the configuration.
    """
    is_activation = name.rpartition(".")[2] in _ACTIVATION_FIELDS and isinstance(value, str)
    return _ACTIVATIONS.get(value, value) if is_activation else value


def default_theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of the rotary embedding that transformers uses by default; None for unknown types.

    Returns:
        The base; None if the model type is unknown.
    """
    defaults = default_values(config)
    return float(defaults.get(THETA, _USUAL_THETA)) if defaults else None


def default_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Map fields to transformers' defaults for this model type; empty for unknown types.

    The fields are those of the text model, and those of towers below `vision_config` and `audio_config`.
    """
    return _values(config, _by_type())


def _values(config: Mapping[str, Any], by_type: _ByType) -> Mapping[str, Any]:
    whole = _of_type(config.get("model_type"), by_type)
    part = _text_part(config)
    text = _of_type(nested_value(config, f"{part}.model_type"), by_type) if part else {}
    return {**whole, **text, **{name: whole[name] for name in _top_level_values(config) if name in whole}}


def _top_level_values(config: Mapping[str, Any]) -> tuple[str, ...]:
    return () if config.get("model_type") in _HEAD_IN_TEXT else _TOP_LEVEL_FIELDS


def default_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults for unstated fields, nested as in a configuration.

    A null field counts as stated. A tower without any stated field gets no defaults.
    """
    return _filled(config, default_values(config))


def compared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `default_fields` and the known defaults of all other fields that may affect the computation."""
    return _filled(config, _values(config, _compared_by_type()))


def defaults_by_type() -> Mapping[str, Mapping[str, Any]]:
    """Return all known defaults by `model_type`; `layer_types` is the type of all layers without windows."""
    return _compared_by_type()


def compared_names() -> frozenset[str]:
    """Return the names of fields with a known default, without their parent parts."""
    return frozenset(name.rpartition(".")[2] for fields in _compared_by_type().values() for name in fields)


def _filled(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    part, of_the_whole = _text_part(config), _top_level_values(config)
    around = _THINKER if isinstance(config.get(_THINKER), Mapping) else ""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        location = around if "." in name or name in of_the_whole else part
        full = f"{location}.{name}" if location else name
        parent = full.rpartition(".")[0]
        is_there = not parent or isinstance(nested_value(config, parent), Mapping)
        if is_there and not name.startswith("rope.") and not _is_stated(config, full):
            _set_default(filled, full, value)
    return filled


def contradicted_defaults(text: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a text part that a separate configuration must state explicitly.

    Args:
        text: The text part as a separate model with its own type.
        whole: The configuration that contains the text part.

    Returns:
        The unstated fields whose defaults differ between the two model types.
    """
    own_defaults, whole_defaults = default_values(text), default_values(whole)
    fields = {
        name: value
        for name, value in whole_defaults.items()
        if "." not in name and name not in _TOP_LEVEL_FIELDS
    }
    differing = {
        name: value
        for name, value in fields.items()
        if not _is_stated(text, name) and own_defaults.get(name, value) != value
    }
    ropes = [text, *(part for name in _ROPES if isinstance(part := text.get(name), Mapping))]
    if whole_defaults.get(THETA) != own_defaults.get(THETA) and not any(_THETA in rope for rope in ropes):
        differing[_THETA] = whole_defaults.get(THETA, _USUAL_THETA)
    return differing


def _is_stated(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a configuration states a field under any of its names."""
    parent, dot, last = name.rpartition(".")
    return states_field(config, name) or (
        last in _OLDER and states_field(config, f"{parent}{dot}{_OLDER[last]}")
    )


def _set_default(config: dict[str, Any], name: str, value: Any) -> None:
    first, _, remainder = name.partition(".")
    if remainder:
        _set_default(config.setdefault(first, {}), remainder, value)
    else:
        config[first] = value


def _text_part(config: Mapping[str, Any]) -> str:
    """Return the field that contains the text model, with dots for nested fields; "" for the top level."""
    return next((name for name in TEXT_PARTS if isinstance(nested_value(config, name), Mapping)), "")


def _of_type(model_type: object, by_type: _ByType) -> Mapping[str, Any]:
    return by_type.get(model_type, {}) if isinstance(model_type, str) else {}


@cache
def _by_type() -> _ByType:
    return _parsed(DEFAULTS)


@cache
def _compared_by_type() -> _ByType:
    return _parsed(DEFAULTS + COMPARED_DEFAULTS)


def _parsed(table: str) -> _ByType:
    result: dict[str, dict[str, Any]] = {}
    for names, line in _entries(table):
        for name in names:
            result.setdefault(name, {}).update(pairs(line))
    return result


def _entries(table: str) -> Iterator[tuple[list[str], str]]:
    names: list[str] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            yield names, line
        else:
            names = line.split()
