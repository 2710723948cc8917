"""Report weights whose dtype differs from the one in `config.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from math import prod

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.dtypes import parse_dtype
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import call
from ckpttools.formats.sidecar_files import CONFIG

# transformers writes `dtype` since version 5, and wrote `torch_dtype` before.
_FIELDS = ("dtype", "torch_dtype")


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if model.config is None or not model.is_complete_model:
        return
    values = [
        (field, value)
        for field in _FIELDS
        if isinstance(value := model.text_config.get(field, model.config.get(field)), str)
    ]
    main = _main_dtype(model) if values else None
    differing = [item for item in values if main is not None and _dtype_name(item[1]) != main]
    # The weights of a quantized model have another dtype than the computation.
    if not differing or model.quantized.declared or model.quantized.candidates:
        return
    field, value = differing[0]
    if not _is_dtype(value):
        yield ModelFinding(
            "error",
            CHECK.name,
            model.path(CONFIG),
            f"{field} in {CONFIG} is {value}, which is not a dtype",
            "transformers refuses it",
            f"write {main} into {CONFIG}",
            expected=main,
            got=value,
        )
        return
    command = None
    hint = f"write {main} into {CONFIG}"
    if not model.is_output:
        command = call("convert", model.location, "DST", format="safetensors")
        hint = f"write {main} there, as this command does without changing any weight: {command}"
    yield ModelFinding(
        "info",
        CHECK.name,
        model.path(CONFIG),
        f"{field} in {CONFIG} is {value}, and most weights are {main}",
        f"transformers casts the weights to {value}, which may round them",
        hint,
        command=command,
        expected=main,
        got=value,
    )


def _dtype_name(name: str) -> str:
    return parse_dtype(name).name if _is_dtype(name) else name


def _is_dtype(name: str) -> bool:
    # transformers uses the dtype of the weights for "auto".
    with suppress(CheckpointError):
        return bool(parse_dtype(name))
    return name == "auto"


def _main_dtype(model: ModelDirectory) -> str | None:
    """Return the dtype of most values; None if there are no floating-point arrays."""
    counts: Counter[str] = Counter()
    for array in model.arrays.values():
        if array.dtype.is_float:
            counts[array.dtype.name] += prod(array.shape)
    return counts.most_common(1)[0][0] if counts else None


CHECK = ModelCheck("dtype", f"weights whose dtype differs from {CONFIG}", _check)
