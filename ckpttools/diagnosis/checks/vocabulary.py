"""A tokenizer with more tokens than the embedding has rows."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.diagnosis.base import ERROR, Check, Finding
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.models import models_in
from ckpttools.diagnosis.tokenizers import token_count

TOKENIZER = "tokenizer.json"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        rows = model.embedding_rows
        if rows is None:
            continue
        tokens = token_count(model.sidecar(TOKENIZER) or {})
        if tokens is not None and tokens > rows:
            what = f"{TOKENIZER} has tokens up to {tokens - 1}, and the embedding {rows} rows"
            why = "a text with one of the last tokens reads beyond the embedding: an error, or nonsense"
            do = "take the tokenizer of this model, or add rows for its tokens and train them"
            yield Finding(ERROR, str(model.folder / TOKENIZER), what, why, do)


CHECK = Check("vocabulary", f"an embedding with fewer rows than {TOKENIZER} has tokens", _look)
