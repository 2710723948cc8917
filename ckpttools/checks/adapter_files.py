"""Report adapter files next to a complete model, which transformers applies on top of the model."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.formats.adapters import ADAPTER, WEIGHTS_STEM, has_adapter
from ckpttools.formats.sidecar_files import CONFIG


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if ADAPTER not in model.files or CONFIG not in model.files:
        return
    if model.tree is None or has_adapter(model.tree):
        return
    weights = sorted(name for name in model.files if name.startswith(f"{WEIGHTS_STEM}."))
    names = ", ".join((ADAPTER, *weights))
    folder = quote(model.location)
    if weights:
        reason = "if it was merged into this model, transformers applies it a second time"
    else:
        reason = f"transformers looks for {WEIGHTS_STEM}.safetensors and cannot load the model"
    command = f"mkdir {folder}/adapter && mv {' '.join(f'{folder}/{name}' for name in (ADAPTER, *weights))} "
    command += f"{folder}/adapter/"
    yield ModelFinding(
        "warning" if weights else "error",
        CHECK.name,
        model.path(ADAPTER),
        f"adapter files next to a complete model: {names}",
        f"{reason}; conversions of this model leave them out",
        f"move them to a separate directory: {command}",
        command=command,
    )


CHECK = ModelCheck(
    "adapter-files",
    "adapter files next to a complete model",
    _check,
    consumer="transformers with PEFT",
)
