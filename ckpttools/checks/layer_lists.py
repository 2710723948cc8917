"""Check configuration lists that have one entry per layer, or layer indexes as entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.config.model_facts import BY_LAYER
from ckpttools.maxtext.model_config import STRICT_LISTS, config_parts, prediction_layers

_COUNT = "num_hidden_layers"
# Configuration fields with lists of layer indexes.
_INDEX_LISTS = ("mlp_only_layers", "moe_layers")


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in config_parts(model.config or {}):
        count = part.get(_COUNT)
        if type(count) is int:
            yield from _check_lengths(model, prefix, part, count)
            yield from _check_indexes(model, prefix, part, count)


def _check_lengths(
    model: ModelDirectory, prefix: str, part: Mapping[str, Any], count: int
) -> Iterator[ModelFinding]:
    """Report lists that are too short, or longer than transformers accepts."""
    allowed = (count, count + prediction_layers(part))
    for name in BY_LAYER:
        entries = part.get(name)
        if not isinstance(entries, list) or not entries:  # transformers fills in an empty list.
            continue
        length = len(entries)
        if length in allowed or not (length < count or name in STRICT_LISTS):
            continue
        yield ModelFinding(
            "error",
            CHECK.name,
            model.path(CONFIG),
            f"{prefix}{name} has {length} entries, and {prefix}{_COUNT} is {count}",
            "transformers refuses the configuration",
            f"correct {prefix}{name} in {CONFIG}, with one entry for each layer",
            expected=f"{count} entries",
            got=f"{length}",
            blocks_writing=model.is_output and model.tree is not None,
        )


def _check_indexes(
    model: ModelDirectory, prefix: str, part: Mapping[str, Any], count: int
) -> Iterator[ModelFinding]:
    """Report lists with indexes of layers that do not exist."""
    for name in _INDEX_LISTS:
        entries = part.get(name)
        indexes = [entry for entry in entries if type(entry) is int] if isinstance(entries, list) else []
        if (largest := max(indexes, default=-1)) >= count:
            yield ModelFinding(
                "warning",
                CHECK.name,
                model.path(CONFIG),
                f"{prefix}{name} names layer {largest}, and {prefix}{_COUNT} is {count}",
                "the list belongs to a model with more layers",
                f"correct {prefix}{name} in {CONFIG}",
                expected=f"layers 0 to {count - 1}",
                got=f"layer {largest}",
            )


CHECK = ModelCheck(
    "layer-lists", "lists such as `layer_types` whose length differs from the number of layers", _check
)
