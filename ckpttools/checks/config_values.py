"""Report configuration values that transformers refuses regardless of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
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


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if model.config is None:
        return
    yield from _integers(model)
    yield from _layer_types(model)
    yield from _model_type(model)


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


def _layer_types(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in config_parts(model.config or {}):
        for name, known in _LAYER_TYPES.items():
            entries = part.get(name)
            listed = entries if isinstance(entries, list) else []
            unknown = {str(entry) for entry in listed} - known
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
    """Report an unknown model type if the arrays have the names of a known family."""
    config = model.config or {}
    kind = config.get("model_type")
    if model.tree is None or config.get("auto_map") or not isinstance(kind, str) or is_known(kind):
        return
    names = families_with_names_of(model.tree)
    if names:
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.path(CONFIG),
            f"model_type {kind!r} is unknown, and the arrays have the names of {' or '.join(names)}",
            "transformers and conversions to MaxText refuse unknown types",
            f"correct model_type in {CONFIG}, or name the family: {option('family', names[0])}",
            got=kind,
        )


CHECK = ModelCheck(
    "config-values",
    "sizes and layer types that transformers refuses, and an unknown `model_type`",
    _check,
)
