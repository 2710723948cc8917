"""Report Git LFS pointers in place of files next to the weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.text import matches_any
from ckpttools.formats.lookalikes import MAX_POINTER_BYTES, is_pointer, missing_content
from ckpttools.formats.sidecar import PATTERNS

# Binary tokenizers. Another check parses JSON files.
_BINARY = ("*.model", "*.model.v*", "*.tiktoken")


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for name in sorted(model.files):
        is_binary = matches_any(name, _BINARY)
        if not matches_any(name, PATTERNS) or (model.size(name) > MAX_POINTER_BYTES and not is_binary):
            continue
        head = model.read(name, MAX_POINTER_BYTES)
        result = missing_content(head)
        if is_binary and not head:
            result = ("empty", "fetch the file again")
        # A web page may look like a template. For JSON files, `sidecar-json` reports it.
        if result and (is_binary or is_pointer(head)):
            yield _finding(model, name, *result, is_lfs=is_pointer(head))


def _finding(model: ModelDirectory, name: str, problem: str, hint: str, *, is_lfs: bool) -> ModelFinding:
    return ModelFinding(
        "error",
        CHECK.name,
        model.path(name),
        f"{name} is {problem}" + ("" if problem == "empty" else ", not the file itself"),
        "transformers cannot read it, and a copy of the model would contain the same",
        hint,
        command="git lfs pull" if is_lfs else None,
        got="an empty file" if problem == "empty" else f"the content of {problem}",
        blocks_writing=True,
    )


CHECK = ModelCheck(
    "sidecar-files",
    "a Git LFS pointer or a web page in place of a tokenizer, or a pointer in place of a configuration",
    _check,
    consumer="transformers, tokenizers",
)
