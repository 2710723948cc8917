"""Report buffers among the weights. Models compute buffers from their configuration."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.array.tree import dotted
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.message_terms import call
from ckpttools.core.text import plural, sample_names
from ckpttools.transforms.strip_wrappers import find_buffers


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    buffers = [dotted(path) for path in find_buffers(model.tree)] if model.tree is not None else []
    if not buffers:
        return
    # The arrays of an output are read from another location.
    source = "SRC" if model.is_output else model.location
    command = call("convert", source, "DST", format="safetensors", names="hub")
    yield ModelFinding(
        "info",
        CHECK.name,
        model.location,
        f"{plural(len(buffers), 'buffer')} among the weights: {sample_names(buffers)}",
        "models compute these themselves, and loaders such as vLLM refuse unknown names",
        f"leave them out: {command}",
        command=command,
    )


CHECK = ModelCheck(
    "buffers",
    "buffers among the weights, such as `freqs_cis` or a causal mask",
    _check,
    consumer="vLLM",
)
