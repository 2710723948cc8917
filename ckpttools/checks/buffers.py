"""Buffers among the weights, which models compute from their configuration, and which some loaders refuse."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from ckpttools.array.tree import dotted
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.text import plural, some
from ckpttools.transforms.unwrapped import find_buffers


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    found = [dotted(path) for path in find_buffers(model.tree)] if model.tree is not None else []
    if not found:
        return
    # A source of these arrays is what a command has read, so its name is not known here.
    source = "SRC" if model.is_output else quote(model.location)
    command = f"ckpt convert to-safetensors {source} DST --names hub"
    yield ModelFinding(
        "info",
        CHECK.name,
        model.location,
        f"{plural(len(found), 'buffer')} among the weights: {some(found)}",
        "models compute these themselves, and loaders such as vLLM refuse names that they do not know",
        f"leave them out: {command}",
        command=command,
    )


CHECK = ModelCheck(
    "buffers",
    "buffers among the weights, such as `freqs_cis` or a causal mask",
    _check,
    consumer="vLLM",
)
