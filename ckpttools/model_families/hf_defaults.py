"""What transformers takes where a `config.json` is silent: published files state little of some models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ckpttools.mapping.documents import pairs
from ckpttools.mapping.sizes import nested_value, states_field
from ckpttools.model_families.transformers_defaults import COMPARED_DEFAULTS, DEFAULTS

# Where a rotary embedding is stated, this alone of it counts.
THETA = "rope.theta"
_USUAL_THETA = 10000.0
# Where a multimodal configuration has its text model.
TEXT_PARTS = ("thinker_config.text_config", "text_config")
# The fields that transformers reads from the configuration of the whole model, not from its text part.
_TOP_LEVEL_FIELDS = ("tie_word_embeddings",)
# Types whose text model has the output head, and therefore its field.
_HEAD_IN_TEXT = ("llama4",)
_THINKER = "thinker_config"
# Fields with an older name.
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
    """Return the value of a field, and of an activation function the one name that stands for all its names.

    Args:
        name: of the field, with or without the parts that it is in.
        value: as the configuration states it.
    """
    is_activation = name.rpartition(".")[2] in _ACTIVATION_FIELDS and isinstance(value, str)
    return _ACTIVATIONS.get(value, value) if is_activation else value


def default_theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of the rotary embedding that transformers takes if none is stated.

    Returns:
        None if the type of the model is unknown.
    """
    result = default_values(config)
    return float(result.get(THETA, _USUAL_THETA)) if result else None


def default_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Field -> what transformers takes where a model of this type says nothing; none of unknown types.

    Fields are the text model's, and those of towers below `vision_config` and `audio_config`.
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
    """What transformers takes for the fields that a configuration does not state, as it would state them.

    A field that is null is stated. Of a tower of which nothing is said at all, nothing is taken.
    """
    return _filled(config, default_values(config))


def compared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `default_fields` with the known defaults of all other fields that may affect the computation."""
    return _filled(config, _values(config, _compared_by_type()))


def defaults_by_type() -> Mapping[str, Mapping[str, Any]]:
    """Return all known defaults by `model_type`; `layer_types` is the type of all layers without windows."""
    return _compared_by_type()


def compared_names() -> frozenset[str]:
    """Return the names of fields with a known default, without the parts that contain them."""
    return frozenset(name.rpartition(".")[2] for fields in _compared_by_type().values() for name in fields)


def _filled(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    part, of_the_whole = _text_part(config), _top_level_values(config)
    around = _THINKER if isinstance(config.get(_THINKER), Mapping) else ""
    built: dict[str, Any] = {}
    for name, value in values.items():
        location = around if "." in name or name in of_the_whole else part
        full = f"{location}.{name}" if location else name
        parent = full.rpartition(".")[0]
        is_there = not parent or isinstance(nested_value(config, parent), Mapping)
        if is_there and not name.startswith("rope.") and not _is_stated(config, full):
            _set_default(built, full, value)
    return built


def contradicted_defaults(text: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """What the text part of a whole configuration means and a configuration of its own must say.

    Args:
        text: the text part as a model of a type of its own.
        whole: the configuration that it is a part of.

    Returns:
        Fields of which both say nothing, and by which the two types mean different things.
    """
    own, theirs = default_values(text), default_values(whole)
    fields = {
        name: value for name, value in theirs.items() if "." not in name and name not in _TOP_LEVEL_FIELDS
    }
    declared = {
        name: value
        for name, value in fields.items()
        if not _is_stated(text, name) and own.get(name, value) != value
    }
    ropes = [text, *(part for name in _ROPES if isinstance(part := text.get(name), Mapping))]
    if theirs.get(THETA) != own.get(THETA) and not any(_THETA in rope for rope in ropes):
        declared[_THETA] = theirs.get(THETA, _USUAL_THETA)
    return declared


def _is_stated(config: Mapping[str, Any], name: str) -> bool:
    """Whether a configuration states a field, by whichever of its names."""
    parent, dot, last = name.rpartition(".")
    return states_field(config, name) or (
        last in _OLDER and states_field(config, f"{parent}{dot}{_OLDER[last]}")
    )


def _set_default(config: dict[str, Any], name: str, value: Any) -> None:
    first, _, rest = name.partition(".")
    if rest:
        _set_default(config.setdefault(first, {}), rest, value)
    else:
        config[first] = value


def _text_part(config: Mapping[str, Any]) -> str:
    """Where a configuration has its text model, dots for nested ones; "" at the top."""
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
