"""Report a tokenizer with more tokens than the embedding has rows."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import DECODERS, ModelCheck, ModelDirectory, ModelFinding
from ckpttools.checks.generation import TOKENIZER, token_count


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    # Parsing a tokenizer of 33 MB takes a quarter of a second.
    if not model.is_examined:
        return
    names = (f"{prefix}embed_tokens.weight" for prefix in DECODERS)
    tables = (model.arrays[name] for name in names if name in model.arrays)
    rows = next((array.shape[0] for array in tables if array.shape), None)
    tokens = None if rows is None else token_count(model.json(TOKENIZER) or {})
    if rows is None or tokens is None or tokens <= rows:
        return
    yield ModelFinding(
        "error",
        CHECK.name,
        model.path(TOKENIZER),
        f"{TOKENIZER} has tokens up to {tokens - 1}, and the embedding {rows} rows",
        "a text with one of the last tokens reads beyond the embedding: an error, or wrong output",
        "use the tokenizer of this model, or add rows for its tokens and train them",
    )


CHECK = ModelCheck(
    "vocabulary",
    f"an embedding with fewer rows than {TOKENIZER} has tokens",
    _check,
)
