"""What generates text must stop: ids in `generation_config.json` against the tokenizer beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import ERROR, WARNING, Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Directory, Inventory, json_or_error
from ckpttools.diagnosis.tokenizers import listed_tokens, slow_tokens
from ckpttools.formats.sidecar_files import CONFIG

_GENERATION = "generation_config.json"
_SETTINGS, _TOKENS = "tokenizer_config.json", "tokenizer.json"
# What lies beside a tokenizer that has no such file.
_SLOW = ("vocab.json", "added_tokens.json")
# The largest that are published have 33 MB; read they take some ten times that.
_LARGEST = 64 << 20
_WHY = "transformers, vLLM and others take what ends a text from it"


@dataclass(frozen=True)
class _Tokens:
    """What a tokenizer says: ids of tokens, the one that it ends texts with, and whether these are all."""

    ids: Mapping[str, int]
    end: str | None
    is_whole: bool

    @property
    def end_id(self) -> int | None:
        return None if self.end is None else self.ids.get(self.end)


def _look(inventory: Inventory) -> Iterator[Finding]:
    for directory in inventory.directories:
        if _GENERATION in directory.files:
            yield from _looked(directory)
        elif CONFIG in directory.files:
            yield from _looked_without(directory)


def _looked(directory: Directory) -> Iterator[Finding]:
    location = directory.path / _GENERATION
    declared = json_or_error(location)
    if isinstance(declared, CheckpointError):
        yield finding_of(declared, location, why=_WHY)
        return
    yield from (Finding(ERROR, str(location), *item) for item in _beyond(directory, declared))
    tokens = _tokens(directory)
    if tokens is not None:
        yield from (Finding(WARNING, str(location), *item) for item in _unlike(declared, tokens))


def _looked_without(directory: Directory) -> Iterator[Finding]:
    """What ends a text where the configuration alone says it."""
    location = directory.path / CONFIG
    config = json_or_error(location)
    if isinstance(config, CheckpointError):
        return  # the check that opens it says it
    text = config.get("text_config")
    declared = config if "eos_token_id" in config or not isinstance(text, dict) else text
    for what, why, _ in _beyond(directory, {"eos_token_id": declared.get("eos_token_id")}):
        yield Finding(
            WARNING, str(location), what, f"{why}; without a {_GENERATION} {_WHY}", "correct eos_token_id"
        )


def _ids(value: Any) -> list[int]:
    """One id, or several."""
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def _beyond(directory: Directory, declared: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Ids that the model has no row for."""
    config = json_or_error(directory.path / CONFIG) if CONFIG in directory.files else {}
    text = {} if isinstance(config, CheckpointError) else config.get("text_config", config)
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        wrong = [item for item in _ids(declared.get(name)) if type(rows) is int and item >= rows]
        if wrong:
            what = f"{name} {wrong[0]}, and {CONFIG} has vocab_size {rows}"
            yield what, "there is no such token", f"take the {_GENERATION} of the model that was trained"


def _unlike(declared: Mapping[str, Any], tokens: _Tokens) -> Iterator[tuple[str, str, str]]:
    """Ends of texts that the tokenizer has under another id, or not at all."""
    ends, known = _ids(declared.get("eos_token_id")), {*tokens.ids.values()}
    strange = [end for end in ends if end not in known] if tokens.is_whole else []
    if strange:
        do = "correct eos_token_id, or take the tokenizer that the model was trained with"
        yield f"eos_token_id {strange[0]}, and the tokenizer has no token of this id", _WHY, do
    if ends and tokens.end_id is not None and tokens.end_id not in ends:
        what = f"eos_token_id {', '.join(map(str, ends))}, and the tokenizer's eos_token {tokens.end!r} is "
        why = f"texts do not end where the tokenizer's do; {_WHY}"
        yield what + str(tokens.end_id), why, f"add {tokens.end_id} to eos_token_id"


def _tokens(directory: Directory) -> _Tokens | None:
    """What the tokenizer says; None where there is none, or one that is not read.

    Of one without `tokenizer.json`, such as of SentencePiece, not all tokens are known.
    """
    declared = {name: _document(directory, name) for name in (_SETTINGS, _TOKENS, *_SLOW)}
    settings, fast = declared[_SETTINGS], declared[_TOKENS]
    if any(item is None for item in declared.values()) or settings is None or fast is None:
        return None  # the check that opens these says it
    is_whole = _TOKENS in directory.files
    ids = dict(
        listed_tokens(fast) if is_whole else slow_tokens(settings, *(declared[name] or {} for name in _SLOW))
    )
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return _Tokens(ids, end if isinstance(end, str) else None, is_whole) if ids else None


def _document(directory: Directory, name: str) -> Mapping[str, Any] | None:
    """What a file says; nothing where it is not there, None where it is damaged or too large."""
    location = directory.path / name
    if name not in directory.files:
        return {}
    result = json_or_error(location) if location.stat().size <= _LARGEST else None
    return None if isinstance(result, CheckpointError) else result


CHECK = Check("generation", f"a {_GENERATION} whose ends of texts are not the tokenizer's", _look)
