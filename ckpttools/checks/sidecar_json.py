"""Report JSON files next to the weights that cannot be parsed, such as those of an interrupted download."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import matches_any
from ckpttools.formats.json_file import json_object
from ckpttools.formats.lookalikes import is_pointer
from ckpttools.formats.sidecar import PATTERNS
from ckpttools.formats.sidecar_files import CONFIG

# Parsing a tokenizer of 33 MB takes a quarter of a second, so only the ends of larger files are checked.
_MAX_PARSED_BYTES = 1 << 20
_END_BYTES = 64


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for name in sorted(model.files):
        if not name.endswith(".json") or not matches_any(name, PATTERNS) or name == CONFIG:
            continue
        content = model.read(name)
        if is_pointer(content) or _is_object(content):
            continue
        yield ModelFinding(
            "error",
            CHECK.name,
            model.path(name),
            f"{name} is not a JSON object",
            "transformers cannot read it, so the tokenizer or the generation settings do not load",
            "fetch the file again, or delete it if the model does not need it",
            expected="one complete JSON object",
            got=f"{len(content):,} bytes that cannot be parsed" if content else "an empty file",
            blocks_writing=model.is_output and model.tree is not None,
        )


def _is_object(content: bytes) -> bool:
    if len(content) > _MAX_PARSED_BYTES:
        return content[:_END_BYTES].lstrip()[:1] == b"{" and content[-_END_BYTES:].rstrip()[-1:] == b"}"
    try:
        json_object(content, "", CheckpointError, "", make=None)
    except CheckpointError:
        return False
    return True


CHECK = ModelCheck(
    "sidecar-json",
    "a tokenizer or generation file that is not a JSON object",
    _check,
    consumer="transformers, tokenizers",
)
