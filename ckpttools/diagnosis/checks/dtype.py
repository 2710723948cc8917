"""Weights in another dtype than `config.json` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from ckpttools.core.dtypes import parse_dtype
from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import INFO, Check, Finding, pasted
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.models import StoredModel, models_in
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.quantized.config import says_quantized
from ckpttools.quantized.weights import quantized

# transformers says `dtype` from version 5 on, `torch_dtype` before.
_FIELDS = ("dtype", "torch_dtype")


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        main = _main(model)
        for field in _FIELDS:
            declared = model.text.get(field, model.config.get(field))
            if main and isinstance(declared, str) and _name(declared) != main:
                what = f"{CONFIG} says {field} {declared}, and most weights are {main}"
                why = "transformers casts them to what is said, in which they may be rounded"
                command = f"ckpt convert to-safetensors {pasted(model.folder)} DST"
                do = f"write {main} there, as this does with all dtypes unchanged: {command}"
                yield Finding(INFO, str(model.folder / CONFIG), what, why, do, command=command)
                break


def _name(declared: str) -> str:
    try:
        return parse_dtype(declared).name
    except CheckpointError:
        return declared


def _main(model: StoredModel) -> str | None:
    """The dtype of most numbers; None of a quantised model, which computes in another."""
    if says_quantized(model.config) or quantized(dict(model.arrays), model.config):
        return None
    counts: Counter[str] = Counter()
    for array in model.arrays.values():
        if array.dtype.is_float:
            counts[array.dtype.name] += prod(array.shape)
    return counts.most_common(1)[0][0] if counts else None


CHECK = Check("dtype", f"weights in another dtype than {CONFIG} says", _look)
