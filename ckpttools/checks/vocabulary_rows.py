"""Report an embedding or output head with more or fewer rows than `vocab_size`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.message_terms import action
from ckpttools.formats.sidecar_files import CONFIG

_FIELD = "vocab_size"
# Name suffixes of arrays with one row per token.
_TABLES = ("embed_tokens.weight", "lm_head.weight")
# Name prefixes of a text model's arrays.
_PREFIXES = (
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "thinker.model.",
)
_NAMES = {f"{prefix}{table}" for prefix in _PREFIXES for table in _TABLES}


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    stated = model.text_config.get(_FIELD)
    if type(stated) is not int or stated < 1:
        return
    rows = {name: array.shape[0] for name, array in model.arrays.items() if name in _NAMES and array.shape}
    if any(count != stated for count in rows.values()):
        yield _finding(model, rows, stated)


def _finding(model: ModelDirectory, rows: Mapping[str, int], stated: int) -> ModelFinding:
    name, count = next((name, count) for name, count in rows.items() if count != stated)
    hint, command = f"fetch {CONFIG} and the weights again: they belong to different models", None
    if len({*rows.values()}) == 1 and count > stated and not model.is_output:
        config = quote(model.path(CONFIG))
        command = f"""sed -i.bak 's/"{_FIELD}": *{stated}/"{_FIELD}": {count}/' {config}"""
        hint = (
            f"keep the {count - stated} extra rows: {command}; to trim them, run "
            f"{action('shrink', model.location, 'DST', vocab=stated)} after that"
        )
    return ModelFinding(
        "error",
        CHECK.name,
        model.path(CONFIG),
        f"{name} has {count} rows, but {CONFIG} has {_FIELD} {stated}",
        "transformers refuses to load the model, and conversions to MaxText refuse it as well",
        hint,
        command=command,
        expected=f"{stated} rows",
        got=f"{count} rows",
    )


CHECK = ModelCheck(
    "vocabulary-rows", f"an embedding or output head whose row count differs from `{_FIELD}`", _check
)
