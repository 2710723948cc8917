"""Compare the layers in the weights with the number of layers in `config.json`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from ckpttools.checks.base import DECODERS, ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.message_terms import call
from ckpttools.core.text import format_ranges
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.model_config import prediction_layers

_COUNT = "num_hidden_layers"
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, DECODERS))})layers\.(\d+)\.")


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    count = model.text_config.get(_COUNT)
    if type(count) is not int or not model.is_complete_model:
        return
    present = _layers_in(model)
    if not present:
        return
    missing = _gaps(present, count)
    if missing:
        yield _missing_layers_finding(model, count, present, missing)
    extra = {number for number in present if number >= count + prediction_layers(model.text_config)}
    if extra:
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.location,
            f"{_COUNT} in {CONFIG} is {count}, but there are weights for "
            f"{_format_layers(format_ranges(extra), len(extra))}",
            "every loader ignores them, and the model computes as a smaller one",
            f"fetch {CONFIG} again: it belongs to another model",
        )


def _layers_in(model: ModelDirectory) -> set[int]:
    return {int(result[1]) for result in map(_LAYER.match, model.arrays) if result}


def _gaps(present: Collection[int], count: int) -> list[tuple[int, int]]:
    """Return the first and last layer of each run of missing layers, as a wrong count may be huge."""
    edges = [-1, *sorted(number for number in present if number < count), count]
    return [(below + 1, above - 1) for below, above in pairwise(edges) if above - below > 1]


def _missing_layers_finding(
    model: ModelDirectory, count: int, present: Collection[int], missing: Sequence[tuple[int, int]]
) -> ModelFinding:
    hint, command = "fetch all shards", None
    # A model whose last layers were removed lacks layers only at the end.
    if not model.is_output and present == set(range(len(present))):
        command = call("shrink", model.location, "DST", layers=len(present))
        hint += f"; if layers were removed on purpose, correct {_COUNT}: {command}"
    text = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in missing)
    listed = _format_layers(text, sum(last - first + 1 for first, last in missing))
    return ModelFinding(
        "error",
        CHECK.name,
        model.location,
        f"{_COUNT} in {CONFIG} is {count}, but there are no weights for {listed}",
        "transformers initializes them randomly and warns; conversions to MaxText refuse the model",
        hint,
        command=command,
    )


def _format_layers(layers: str, count: int) -> str:
    return f"{'layer' if count == 1 else 'layers'} {layers} (the first layer is 0)"


CHECK = ModelCheck("layers", f"weights for layers not declared in {CONFIG}", _check)
