"""Compare the layers that have weights with the number of layers in `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckpttools.core.text import ranges
from ckpttools.diagnosis.base import ERROR, WARNING, Check, Finding, pasted
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.models import StoredModel, models_in
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.mtp import prediction_layers

_COUNT = "num_hidden_layers"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        declared, there = model.text.get(_COUNT), _numbers(model)
        if isinstance(declared, int) and there and model.is_whole:
            yield from _compared(model, declared, there)


def _numbers(model: StoredModel) -> set[int]:
    names = filter(None, map(model.of_decoder, model.arrays))
    words = (name.split(".")[1] for name in names if name.startswith("layers."))
    return {int(word) for word in words if word.isdecimal()}


def _compared(model: StoredModel, declared: int, there: set[int]) -> Iterator[Finding]:
    location = str(model.folder)
    missing = set(range(declared)) - there
    if missing:
        what = f"{_counted(declared)}, but there are no weights for {_listed(missing)}"
        why = "transformers initializes them randomly and warns; conversions to MaxText refuse the model"
        do, command = "fetch all shards", None
        # A model that was cut lacks the layers at its end.
        if there == set(range(len(there))):
            command = f"ckpt shrink {pasted(model.folder)} DST --layers {len(there)}"
            do += f"; if layers were removed on purpose, correct {_COUNT}: {command}"
        yield Finding(ERROR, location, what, why, do, command=command)
    extra = {number for number in there if number >= declared + prediction_layers(model.text)}
    if extra:
        what = f"{_counted(declared)}, but there are weights for {_listed(extra)}"
        why = "every loader ignores them, and the model computes as a smaller one"
        yield Finding(WARNING, location, what, why, f"fetch {CONFIG} again: it is of another model")


def _counted(layers: int) -> str:
    return f"{_COUNT} in {CONFIG} is {layers}"


def _listed(layers: Collection[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {ranges(sorted(layers))} (the first layer is 0)"


CHECK = Check("layers", f"weights for other layers than {CONFIG} declares", _look)
