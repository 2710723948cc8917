"""A vocabulary of another size than the tokenizer's, or than `config.json` says."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.doctor.base import ERROR, Check, Finding
from ckpttools.doctor.inventory import Inventory
from ckpttools.doctor.models import models_in
from ckpttools.doctor.tokenizers import token_count
from ckpttools.formats.sidecar_files import CONFIG

TOKENIZER = "tokenizer.json"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        rows, said = model.embedding_rows, model.text.get("vocab_size")
        if rows is None:
            continue
        if isinstance(said, int) and said != rows:
            what = f"the embedding has {rows} rows, and {CONFIG} says vocab_size {said}"
            why = "transformers refuses to load it, and conversions to MaxText as well"
            yield Finding(ERROR, str(model.folder), what, why, f"fetch {CONFIG} and the weights again")
        tokens = token_count(model.sidecar(TOKENIZER) or {})
        if tokens is not None and tokens > rows:
            what = f"{TOKENIZER} has tokens up to {tokens - 1}, and the embedding {rows} rows"
            why = "a text with one of the last tokens reads beyond the embedding: an error, or nonsense"
            do = "take the tokenizer of this model, or add rows for its tokens and train them"
            yield Finding(ERROR, str(model.folder / TOKENIZER), what, why, do)


CHECK = Check(
    "vocabulary", f"an embedding with fewer rows than {TOKENIZER} has tokens, or than is said", _look
)
