"""Lists in the configuration with one entry for each layer, which must have as many entries as layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.config.facts import BY_LAYER
from ckpttools.maxtext.model_config import STRICT_LISTS, config_parts
from ckpttools.maxtext.prediction import prediction_layers

_COUNT = "num_hidden_layers"
# Lists of layer numbers.
_NUMBERS = ("mlp_only_layers", "moe_layers")


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for prefix, part in config_parts(model.config or {}):
        count = part.get(_COUNT)
        if type(count) is int:
            yield from _lengths(model, prefix, part, count)
            yield from _numbers(model, prefix, part, count)


def _lengths(
    model: ModelDirectory, prefix: str, part: Mapping[str, Any], count: int
) -> Iterator[ModelFinding]:
    """Lists that are too short, or longer than transformers accepts."""
    allowed = (count, count + prediction_layers(part))
    for name in BY_LAYER:
        entries = part.get(name)
        if not isinstance(entries, list) or not entries:  # transformers fills in an empty list
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


def _numbers(
    model: ModelDirectory, prefix: str, part: Mapping[str, Any], count: int
) -> Iterator[ModelFinding]:
    """Lists of layer numbers that name layers that do not exist."""
    for name in _NUMBERS:
        entries = part.get(name)
        numbers = entries if isinstance(entries, list) else []
        beyond = [each for each in numbers if type(each) is int and each >= count]
        if beyond:
            yield ModelFinding(
                "warning",
                CHECK.name,
                model.path(CONFIG),
                f"{prefix}{name} names layer {beyond[0]}, and {prefix}{_COUNT} is {count}",
                "the list belongs to a model with more layers",
                f"correct {prefix}{name} in {CONFIG}",
                expected=f"layers 0 to {count - 1}",
                got=f"layer {beyond[0]}",
            )


CHECK = ModelCheck(
    "layer-lists", "lists such as `layer_types` with fewer or more entries than there are layers", _check
)
