"""The tokens that the files of a tokenizer list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any


def listed_tokens(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Text and id of each token, those that were added last; what is no token is left out."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    entries = (item for item in added if isinstance(item, Mapping)) if isinstance(added, list) else ()
    more = ((entry.get("content"), entry.get("id")) for entry in entries)
    for text, number in chain(_vocabulary(vocab), more):
        if type(number) is int and number >= 0:
            yield str(text), number


def _vocabulary(vocab: object) -> Iterator[tuple[object, object]]:
    if isinstance(vocab, Mapping):
        yield from vocab.items()
    elif isinstance(vocab, list):
        # Unigram lists its tokens in their order, each with its score.
        yield from ((item[0] if isinstance(item, list) and item else "", k) for k, item in enumerate(vocab))


def slow_tokens(settings: Mapping[str, Any], *documents: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Text and id of the tokens that files without a `tokenizer.json` list.

    Args:
        settings: the content of `tokenizer_config.json`, which has those that were added.
        documents: of files that map texts to ids.
    """
    added = settings.get("added_tokens_decoder")
    for number, item in (added if isinstance(added, Mapping) else {}).items():
        if number.isdecimal() and len(number) < 19 and isinstance(item, Mapping):
            yield str(item.get("content")), int(number)
    for document in documents:
        yield from ((text, number) for text, number in document.items() if type(number) is int)


def token_count(tokenizer: Mapping[str, Any]) -> int | None:
    """One more than the largest id; None where no token is listed."""
    return max((number + 1 for _, number in listed_tokens(tokenizer)), default=None)
