"""Report Git LFS pointers in place of the files next to the weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import FormatError
from ckpttools.core.text import matches_any
from ckpttools.formats.disguises import MAX_POINTER_BYTES, is_pointer, refuse_disguise
from ckpttools.formats.sidecar import PATTERNS


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for name in sorted(model.files):
        if not matches_any(name, PATTERNS) or model.size(name) > MAX_POINTER_BYTES:
            continue
        head = model.read(name, MAX_POINTER_BYTES)
        if is_pointer(head):
            yield _pointer(model, name, head)


def _pointer(model: ModelDirectory, name: str, head: bytes) -> ModelFinding:
    try:
        refuse_disguise(head, model.path(name))
    except FormatError as error:
        return ModelFinding(
            "error",
            CHECK.name,
            model.path(name),
            f"{name} is a Git LFS pointer, not the file itself",
            "transformers cannot read it, and a copy of the model would contain the pointer",
            error.hint or "",
            command="git lfs pull",
            expected=error.wanted,
            got=error.got,
            blocks_writing=True,
        )
    raise AssertionError("a pointer is always refused")


CHECK = ModelCheck(
    "sidecar-files",
    "a Git LFS pointer in place of a tokenizer or configuration file",
    _check,
    consumer="transformers, tokenizers",
)
