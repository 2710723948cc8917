"""Report weight files under names that transformers does not look for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from shlex import quote

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.message_terms import call
from ckpttools.formats.sidecar_files import WEIGHTS_FIELD

# File names that transformers looks for, in order.
_EXPECTED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Another check reports shards without an index.
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SUFFIX, _ADAPTER = ".safetensors", "adapter_model"


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    names = sorted(
        name
        for name in model.files
        if name.endswith(_SUFFIX) and not name.startswith((".", _ADAPTER)) and not _SHARD.fullmatch(name)
    )
    config = model.config or {}
    is_of_transformers = "model_type" in config and "architectures" in config
    if (
        model.is_output
        or not names
        or not is_of_transformers
        or config.get(WEIGHTS_FIELD) is not None
        or any(map(model.files.__contains__, _EXPECTED))
    ):
        return
    folder = quote(model.location)
    rewriting = call("convert", model.location, "DST", format="safetensors")
    command = f"mv -n {folder}/{quote(names[0])} {folder}/{_EXPECTED[0]}" if len(names) == 1 else None
    yield ModelFinding(
        "warning",
        CHECK.name,
        model.location,
        f"transformers does not find the weights: {', '.join(names[:3])}{', …' * (len(names) > 3)}",
        f"it looks for {_EXPECTED[0]}, or for {_EXPECTED[1]}, which names the shards",
        f"rename the file: {command}"
        if command
        else f"fetch the index again, or rewrite the model: {rewriting}",
        command=command,
        expected=_EXPECTED[0],
        got=names[0],
    )


CHECK = ModelCheck("weight-names", "weights under names that transformers does not look for", _check)
