"""Report configuration values that transformers rejects or cannot compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import similar_names
from ckpttools.core.message_terms import option
from ckpttools.core.text import sample_names
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.model_config import config_parts
from ckpttools.maxtext.recognition import families_with_names_of, is_known

_INTEGERS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


# Entries that transformers 5.23 accepts in lists with one entry per layer.
_LAYER_TYPES = {
    "layer_types": {
        "chunked_attention",
        "compressed_sparse_attention",
        "conv",
        "full_attention",
        "heavily_compressed_attention",
        "hybrid",
        "hybrid_sliding",
        "indexed_attention",
        "linear_attention",
        "minimax_m3_sparse",
        "moe",
        "reference_sliding_attention",
        "sliding_attention",
        "window_attention",
    },
    "mlp_layer_types": {"dense", "sparse"},
}


# Numbers that transformers computes with, and whether they must be greater than 0. A missing or null rotary
# embedding base has a default.
_NUMBERS = {
    "layer_norm_eps": False,
    "norm_eps": False,
    "rms_norm_eps": False,
    "rope_local_base_freq": True,
    "rope_theta": True,
}
_MAY_BE_NULL = ("rope_local_base_freq", "rope_theta")
# Parts of the configuration with a rotary embedding base, possibly one for each layer type.
_ROPE_PARTS = ("rope_parameters", "rope_scaling")
# Rotary embedding types in transformers 5.23, including earlier names, with the fields that each needs.
_ROPE_FIELDS: Mapping[str, Sequence[str]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
    "mrope": (),
    "proportional": (),
    "su": ("short_factor", "long_factor"),
    "yarn": ("factor",),
}
_ACTIVATIONS = ("hidden_act", "hidden_activation")
# Names in ACT2FN of transformers 5.23.
_KNOWN_ACTIVATIONS = frozenset(
    (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu"),
        *("relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    )
)
# Fields that create biases, with the module that has them and the models that read the field, in transformers
# 5.23.
_BIASES = {
    "attention_bias": (
        ".self_attn.",
        frozenset(
            (
                *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text"),
                *("gemma4_text", "llama", "llama4", "llama4_text", "olmo2", "olmo3", "qwen3", "qwen3_moe"),
                *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            )
        ),
    ),
    "mlp_bias": (".mlp.", frozenset(("deepseek_v2", "deepseek_v4", "llama"))),
}


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if model.config is None:
        return
    yield from _integers(model)
    yield from _invalid_number_findings(model)
    yield from _rope_types(model)
    yield from _activations(model)
    yield from _layer_types(model)
    yield from _model_type(model)
    yield from _missing_biases(model)


def _missing_biases(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Report biases that the configuration declares and no layer has."""
    for field, (module, model_types) in _BIASES.items():
        if model.text_config.get(field) is not True or model.text_config.get("model_type") not in model_types:
            continue
        names = [name for name in model.arrays if module in name]
        if names and not any(name.endswith(".bias") for name in names):
            yield ModelFinding(
                "warning",
                CHECK.name,
                model.path(CONFIG),
                f"{field} is true, but no array below {module.strip('.')} is a bias",
                "transformers creates the biases, warns, and sets them to zero",
                f"set {field} to false in {CONFIG}, or fetch the weights again",
                expected="biases, or false",
                got="no biases",
            )


def _integers(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in config_parts(model.config or {}):
        for name in _INTEGERS:
            value = part.get(name)
            if value is None or isinstance(value, list) or (type(value) is int and value > 0):
                continue
            yield ModelFinding(
                "error",
                CHECK.name,
                model.path(CONFIG),
                f"{prefix}{name} is {value!r}",
                "transformers refuses the configuration, or fails to create the model",
                f"correct {prefix}{name} in {CONFIG}",
                expected="a positive integer",
                got=repr(value),
            )


def _invalid_number_findings(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in _numeric_parts(model.config or {}):
        for name, is_positive in _NUMBERS.items():
            if name not in part or (part[name] is None and name in _MAY_BE_NULL):
                continue
            value = part[name]
            is_number = type(value) is int or (type(value) is float and isfinite(value))
            if is_number and (value > 0 or (value == 0 and not is_positive)):
                continue
            yield ModelFinding(
                "error",
                CHECK.name,
                model.path(CONFIG),
                f"{prefix}{name} is {value!r}",
                "transformers and MaxText fail, or compute other values",
                f"correct {prefix}{name} in {CONFIG}",
                expected="a positive number" if is_positive else "a number of at least 0",
                got=repr(value),
            )


def _numeric_parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a configuration with their prefixes, including those of the rotary embedding."""
    for prefix, part in config_parts(config):
        yield prefix, part
        for name in _ROPE_PARTS:
            rope = part.get(name)
            if isinstance(rope, Mapping):
                yield f"{prefix}{name}.", rope
                inner = ((key, value) for key, value in rope.items() if isinstance(value, Mapping))
                yield from ((f"{prefix}{name}.{key}.", value) for key, value in inner)


def _rope_types(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Report unknown rotary embedding types, and known types that lack a field."""
    if (model.config or {}).get("auto_map"):
        return
    for prefix, part in _numeric_parts(model.config or {}):
        kind = part.get("rope_type", part.get("type"))
        if not any(f"{name}." in prefix for name in _ROPE_PARTS) or not isinstance(kind, str):
            continue
        missing = [name for name in _ROPE_FIELDS.get(kind, ()) if part.get(name) is None]
        # Models have their own types, such as "axial", so only a misspelled name is reported.
        if not missing and (kind in _ROPE_FIELDS or not similar_names(kind, _ROPE_FIELDS, 1)):
            continue
        is_known_kind = kind in _ROPE_FIELDS
        yield ModelFinding(
            "error" if is_known_kind else "warning",
            CHECK.name,
            model.path(CONFIG),
            f"{prefix}rope_type {kind!r} lacks {sample_names(missing, len(missing))}"
            if is_known_kind
            else f"{prefix}rope_type is {kind!r}, which transformers does not know",
            "transformers fails to create the model"
            + ("" if is_known_kind else ", unless a later version knows it"),
            f"correct {prefix.removesuffix('.')} in {CONFIG}",
            expected=None if is_known_kind else sample_names(sorted(_ROPE_FIELDS), len(_ROPE_FIELDS)),
            got=repr(kind),
        )


def _activations(model: ModelDirectory) -> Iterator[ModelFinding]:
    if (model.config or {}).get("auto_map"):
        return
    for prefix, part in config_parts(model.config or {}):
        for name in _ACTIVATIONS:
            value = part.get(name)
            if value is None or (isinstance(value, str) and value in _KNOWN_ACTIVATIONS):
                continue
            yield ModelFinding(
                "warning",
                CHECK.name,
                model.path(CONFIG),
                f"{prefix}{name} is {value!r}, which transformers does not know",
                "transformers fails to create the model, unless a later version knows it",
                f"correct {prefix}{name} in {CONFIG}",
                expected=f"a name such as {sample_names(['silu', 'gelu_pytorch_tanh'])}",
                got=repr(value),
            )


def _layer_types(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in config_parts(model.config or {}):
        for name, known in _LAYER_TYPES.items():
            entries = part.get(name)
            layer_types = entries if isinstance(entries, list) else []
            unknown = {str(entry) for entry in layer_types} - known
            if unknown and not (model.config or {}).get("auto_map"):
                yield ModelFinding(
                    "warning",
                    CHECK.name,
                    model.path(CONFIG),
                    f"{prefix}{name} has entries that transformers does not know: "
                    f"{sample_names(sorted(unknown))}",
                    "transformers refuses the configuration, unless a later version knows them",
                    f"correct {prefix}{name} in {CONFIG}",
                    expected=sample_names(sorted(known), len(known)),
                    got=sample_names(sorted(unknown)),
                )


def _model_type(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Report a missing model type, or an unknown one if the arrays have the names of a known family."""
    config = model.config or {}
    kind = config.get("model_type")
    if model.tree is None or config.get("auto_map") or (isinstance(kind, str) and is_known(kind)):
        return
    names = families_with_names_of(model.tree)
    if not isinstance(kind, str):
        # Configurations of other libraries have neither a model type nor architectures.
        if names or config.get("architectures"):
            problem = "no model_type" if kind is None else f"model_type is {kind!r}"
            named = f", or {_family_hint(names)}" if names else ""
            yield ModelFinding(
                "error",
                CHECK.name,
                model.path(CONFIG),
                problem,
                "transformers and conversions to MaxText do not know which model it is",
                f"write model_type into {CONFIG}{named}",
                expected="a string such as llama",
                got=repr(kind),
            )
    elif names:
        yield ModelFinding(
            "error",
            CHECK.name,
            model.path(CONFIG),
            f"model_type {kind!r} is unknown, and the arrays have the names of {' or '.join(names)}",
            "transformers and conversions to MaxText refuse unknown types",
            f"correct model_type in {CONFIG}, or {_family_hint(names)}",
            got=kind,
        )


def _family_hint(names: Sequence[str]) -> str:
    """Advise the user to name the family, since several families convert the same names differently."""
    if len(names) == 1:
        return f"name the family: {option('family', names[0])}"
    return f"name the family with {option('family')} ({', '.join(names)} convert these arrays differently)"


CHECK = ModelCheck(
    "config-values",
    "values that transformers refuses or cannot compute with, a missing or unknown `model_type`, and biases "
    "that are declared and missing",
    _check,
)
