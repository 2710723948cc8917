"""A vocabulary of another size than the tokenizer's, or than `config.json` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.doctor.base import ERROR, Check, Finding
from ckpttools.doctor.inventory import Inventory
from ckpttools.doctor.models import CONFIG, models_in

TOKENIZER = "tokenizer.json"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        rows, said = model.rows, model.text.get("vocab_size")
        if rows is None:
            continue
        if isinstance(said, int) and said != rows:
            what = f"the embedding has {rows} rows, and {CONFIG} says vocab_size {said}"
            why = "transformers refuses to load it, and conversions to MaxText as well"
            yield Finding(ERROR, str(model.folder), what, why, f"fetch {CONFIG} and the weights again")
        tokens = token_count(model.beside(TOKENIZER))
        if tokens is not None and tokens > rows:
            what = f"{TOKENIZER} has tokens up to {tokens - 1}, and the embedding {rows} rows"
            why = "a text with one of the last tokens reads beyond the embedding: an error, or nonsense"
            do = "take the tokenizer of this model, or add rows for its tokens and train them"
            yield Finding(ERROR, str(model.folder / TOKENIZER), what, why, do)


def token_count(tokenizer: Mapping[str, Any] | None) -> int | None:
    """One more than the largest token of a `tokenizer.json`; None where it lists none."""
    if tokenizer is None:
        return None
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    ids = [each for each in vocab.values() if isinstance(each, int)] if isinstance(vocab, Mapping) else []
    more = [each.get("id") for each in added if isinstance(each, Mapping)] if isinstance(added, list) else []
    ids += [each for each in more if isinstance(each, int)]
    # Unigram lists its tokens in their order.
    listed = len(vocab) if isinstance(vocab, list) else 0
    return max(listed, max(ids, default=-1) + 1) or None


CHECK = Check(
    "vocabulary", f"an embedding with fewer rows than {TOKENIZER} has tokens, or than is said", _look
)
