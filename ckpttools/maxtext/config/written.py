"""A `config.json` put together from what is known of a model of text: lengths of axes, and fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.model_families.family import Family

MODEL_TYPE = "config.model_type"
_CONFIG, _ROPE, _LOCAL = "config.", "rope.", "rope.local_"
_TEXT = "_text"
# Beside the fields of the rotary embedding itself, the older way, which all versions of transformers read.
_ROPE_FIELDS = {
    "rope.theta": "rope_theta",
    "rope.local_theta": "rope_local_base_freq",
    "rope.partial_rotary_factor": "partial_rotary_factor",
}
_KINDS = {"full_attention": _ROPE, "sliding_attention": _LOCAL}
# Fields that transformers wants as floating-point numbers, of which settings say 30 for 30.0.
_FRACTIONS = frozenset(
    (
        "attn_logit_softcapping",
        "beta_fast",
        "beta_slow",
        "factor",
        "final_logit_softcapping",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_local_base_freq",
        "rope_theta",
        "routed_scaling_factor",
        "swiglu_limit",
    )
)
# Classes that are not called as the type is.
_ARCHITECTURES = {
    "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def text_types(family: Family) -> tuple[str, ...]:
    """The values of `model_type` of the family's models of text alone.

    None where it has no such, or where that is a model of another family, as Qwen3 is of Qwen3-VL.
    """
    if any(spelling.architecture for spelling in family.spellings):
        return ()
    plain = [kind for kind in family.model_types if kind.endswith(_TEXT)] or family.model_types
    is_flat = any(isinstance(name, str) and "." not in name for name in family.sizes.get("embed", ()))
    return tuple(plain) if is_flat else ()


def architecture_of(model_type: str) -> str:
    """The class of transformers for a `model_type` of text."""
    words = model_type.removesuffix(_TEXT).split("_")
    return _ARCHITECTURES.get(model_type, "".join(word.capitalize() for word in words) + "ForCausalLM")


def written(family: Family, lengths: Mapping[str, int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model.

    Args:
        family: what it is of.
        lengths: of axes; those that no field is of are left out.
        fields: as rules call them, such as `config.rms_norm_eps` and `rope.theta`.
    """
    config: dict[str, Any] = {"architectures": [architecture_of(fields[MODEL_TYPE])]}
    for axis, names in family.sizes.items():
        flat = next((name for name in names if isinstance(name, str) and "." not in name), None)
        if flat is not None and axis in lengths:
            config[flat] = lengths[axis]
    config |= {
        name.removeprefix(_CONFIG): value for name, value in fields.items() if name.startswith(_CONFIG)
    }
    built: dict[str, Any] = _in_fractions(config | _rope(family, fields))
    return built


def _in_fractions(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _in_fractions(item, key) for key, item in value.items()}
    return float(value) if name in _FRACTIONS and type(value) is int else value


def _rope(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = {name: value for name, value in fields.items() if name.startswith(_ROPE)}
    # Of two kinds, where the family speaks of the type of each: transformers has it since 5 only.
    if any(limit.expected.left.name == "rope.local_type" for limit in family.settings.limits):
        return {"rope_parameters": {kind: _of_kind(rope, prefix) for kind, prefix in _KINDS.items()}}
    result = {name: rope[field] for field, name in _ROPE_FIELDS.items() if field in rope}
    kind = rope.get("rope.type", "default")
    if kind == "default":
        return result
    inner = {name.removeprefix(_ROPE): item for name, item in rope.items() if name not in _ROPE_FIELDS}
    del inner["type"]
    return {**result, "rope_scaling": {"rope_type": kind, **inner}}


def _of_kind(rope: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    own = {
        name.removeprefix(prefix): value
        for name, value in rope.items()
        if name.startswith(prefix) and (prefix == _LOCAL or not name.startswith(_LOCAL))
    }
    names = {"type": "rope_type", "theta": "rope_theta"}
    return {"rope_type": "default", **{names.get(name, name): value for name, value in own.items()}}
