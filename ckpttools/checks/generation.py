"""Report token IDs in `generation_config.json` that the model or its tokenizer does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.dataclass import dataclass
from ckpttools.formats.sidecar_files import CONFIG

TOKENIZER = "tokenizer.json"
_GENERATION, _SETTINGS = "generation_config.json", "tokenizer_config.json"
# Token files of a tokenizer without `tokenizer.json`.
_SLOW = ("vocab.json", "added_tokens.json")
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_REASON = "transformers, vLLM and others end a text at these tokens"


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a tokenizer: their IDs, the end-of-text token, and whether the list is complete."""

    ids: Mapping[str, int]
    end: str | None
    is_complete: bool

    @property
    def end_id(self) -> int | None:
        return None if self.end is None else self.ids.get(self.end)


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if _GENERATION not in model.files:
        yield from _check_config(model)
        return
    # Another check reports a file that cannot be parsed.
    settings = model.json(_GENERATION)
    if settings is None:
        return
    yield from _out_of_range_findings(model, settings)
    # Parsing a tokenizer of 33 MB takes a quarter of a second.
    tokens = _tokens(model) if model.is_examined else None
    if tokens is not None:
        yield from _mismatched_token_findings(model, settings, tokens)


def _check_config(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Check the end-of-text token of the configuration, which applies if there are no generation settings."""
    config = model.config or {}
    settings = config if _IDS[0] in config else model.text_config
    for name, token, rows in _ids_beyond(model, {_IDS[0]: settings.get(_IDS[0])}):
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.path(CONFIG),
            f"{name} {token}, and {CONFIG} has vocab_size {rows}",
            f"this token does not exist; without {_GENERATION}, {_REASON}",
            f"correct {name}",
            expected=f"ids below {rows}",
            got=str(token),
        )


def _out_of_range_findings(model: ModelDirectory, settings: Mapping[str, Any]) -> Iterator[ModelFinding]:
    for name, token, rows in _ids_beyond(model, settings):
        yield ModelFinding(
            "error",
            CHECK.name,
            model.path(_GENERATION),
            f"{name} {token}, and {CONFIG} has vocab_size {rows}",
            "this token does not exist",
            f"copy the {_GENERATION} of the model that was trained",
            expected=f"ids below {rows}",
            got=str(token),
        )


def _ids_beyond(model: ModelDirectory, settings: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield each setting with an ID beyond the vocabulary: name, ID and number of rows."""
    rows = model.text_config.get("vocab_size")
    for name in _IDS:
        out_of_range = [item for item in _ids(settings.get(name)) if type(rows) is int and item >= rows]
        if out_of_range and type(rows) is int:
            yield name, out_of_range[0], rows


def _ids(value: Any) -> list[int]:
    """Return the IDs of a setting with one ID or several."""
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def _mismatched_token_findings(
    model: ModelDirectory, settings: Mapping[str, Any], tokens: _Tokens
) -> Iterator[ModelFinding]:
    """Report end-of-text tokens that have another ID in the tokenizer or do not exist there."""
    ends, known = _ids(settings.get(_IDS[0])), {*tokens.ids.values()}
    unknown = [end for end in ends if end not in known] if tokens.is_complete else []
    if unknown:
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.path(_GENERATION),
            f"eos_token_id {unknown[0]}, and the tokenizer has no token of this id",
            _REASON,
            "correct eos_token_id, or copy the tokenizer that the model was trained with",
        )
    if ends and tokens.end_id is not None and tokens.end_id not in ends:
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.path(_GENERATION),
            f"eos_token_id {', '.join(map(str, ends))}, and the tokenizer's eos_token {tokens.end!r} is "
            f"{tokens.end_id}",
            f"texts do not end where the tokenizer's do; {_REASON}",
            f"add {tokens.end_id} to eos_token_id",
        )


def _tokens(model: ModelDirectory) -> _Tokens | None:
    """Read the tokenizer. Returns None if it does not exist or cannot be read, which another check reports.

    Without `tokenizer.json`, as for SentencePiece, not all tokens are known.
    """
    documents: dict[str, Mapping[str, Any]] = {}
    for name in (_SETTINGS, TOKENIZER, *_SLOW):
        result = model.json(name) if name in model.files else {}
        if result is None:
            return None
        documents[name] = result
    is_complete = TOKENIZER in model.files
    slow = (documents[name] for name in _SLOW)
    tokens = listed_tokens(documents[TOKENIZER]) if is_complete else _slow_tokens(documents[_SETTINGS], *slow)
    end = documents[_SETTINGS].get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    ids = dict(tokens)
    return _Tokens(ids, end if isinstance(end, str) else None, is_complete) if ids else None


def listed_tokens(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the text and ID of each token in a `tokenizer.json`, added tokens last.

    Skips malformed entries.
    """
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
        # Unigram models list their tokens in order, each with its score.
        yield from ((item[0] if isinstance(item, list) and item else "", k) for k, item in enumerate(vocab))


def _slow_tokens(settings: Mapping[str, Any], *documents: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the text and ID of the tokens listed by files of a tokenizer without `tokenizer.json`.

    Args:
        settings: Content of `tokenizer_config.json`, which has the added tokens.
        documents: Content of files that map texts to IDs.
    """
    added = settings.get("added_tokens_decoder")
    for number, item in (added if isinstance(added, Mapping) else {}).items():
        if number.isdecimal() and len(number) < 19 and isinstance(item, Mapping):
            yield str(item.get("content")), int(number)
    for document in documents:
        yield from ((text, number) for text, number in document.items() if type(number) is int)


def token_count(tokenizer: Mapping[str, Any]) -> int | None:
    """Return one more than the largest ID in a `tokenizer.json`; None if it lists no token."""
    return max((number + 1 for _, number in listed_tokens(tokenizer)), default=None)


CHECK = ModelCheck(
    "generation", f"ids in {_GENERATION} that the model or its tokenizer does not have", _check
)
