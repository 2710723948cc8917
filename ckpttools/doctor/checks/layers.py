"""Weights of other layers than `config.json` says."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.text import plural, ranges
from ckpttools.doctor.base import ERROR, WARNING, Check, Finding, pasted
from ckpttools.doctor.inventory import Inventory
from ckpttools.doctor.models import StoredModel, models_in
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.prediction import prediction_layers

_COUNT = "num_hidden_layers"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        said, there = model.text.get(_COUNT), _numbers(model)
        if isinstance(said, int) and there and model.is_whole:
            yield from _compared(model, said, there)


def _numbers(model: StoredModel) -> set[int]:
    names = filter(None, map(model.of_decoder, model.arrays))
    words = (name.split(".")[1] for name in names if name.startswith("layers."))
    return {int(word) for word in words if word.isdecimal()}


def _compared(model: StoredModel, said: int, there: set[int]) -> Iterator[Finding]:
    place = str(model.folder)
    missing = set(range(said)) - there
    if missing:
        what = f"{CONFIG} says {plural(said, 'layer')}, and there are no weights of {ranges(sorted(missing))}"
        why = "transformers begins them at random, with a warning; conversions to MaxText refuse the model"
        do, command = "fetch all of its shards", None
        # A model that was cut lacks the layers at its end.
        if there == set(range(len(there))):
            command = f"ckpt shrink {pasted(model.folder)} DST --layers {len(there)}"
            do += f"; or, if it was cut, write {_COUNT} as it is: {command}"
        yield Finding(ERROR, place, what, why, do, command=command)
    surplus = {number for number in there if number >= said + prediction_layers(model.text)}
    if surplus:
        what = f"{CONFIG} says {plural(said, 'layer')}, and there are weights of {ranges(sorted(surplus))}"
        why = "whatever loads the model leaves them out, and computes as a smaller one"
        yield Finding(WARNING, place, what, why, f"fetch {CONFIG} again: it is of another model")


CHECK = Check("layers", f"weights of other layers than {CONFIG} says", _look)
