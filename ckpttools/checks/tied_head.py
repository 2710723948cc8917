"""Report a stored output head that the configuration ties to the embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action, call
from ckpttools.formats.adapters import has_adapter
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.stored_head import HeadDeviation, StoredHead, is_alias
from ckpttools.maxtext.tied_embeddings import FLAG, Head, right_head
from ckpttools.maxtext.view import view_of
from ckpttools.quantized.scale_checks import are_local

_FIELD = "tie_word_embeddings"
# Names for models of unknown families.
_DEFAULT_NAMES = Head("model.embed_tokens.weight", "lm_head.weight")
# Peak memory limit. Pieces have 8 MiB, so it limits only arrays in large chunks.
_MEMORY = 1 << 30
# Number of rows to compare if each read is a network request.
_SAMPLED_ROWS = 256


def stored_tied_head(model: ModelDirectory) -> StoredHead | None:
    """Find the output head that a model stores although its configuration ties it to the embedding.

    Args:
        model: The directory.

    Returns:
        The head and the embedding; None if the model is not tied or does not store both.
    """
    tree, config = model.tree, model.config
    if tree is None or config is None or has_adapter(tree) or view_of(tree).is_maxtext:
        return None
    tied = _tied_names(config, model.arrays)
    pair = None if tied is None else _stored_names(tied, model.arrays)
    if pair is None or is_alias(pair, model.arrays):
        return None
    return StoredHead(pair, model.arrays[pair.head], model.arrays[pair.embedding])


def _tied_names(config: Mapping[str, Any], arrays: Mapping[str, LazyArray]) -> Head | None:
    """Return the family's names of head and embedding; None if the configuration does not tie them."""
    try:
        family = family_for(config, ModelOptions(), CONFIG)
        names = right_head(family, family.spelling_of(arrays))
        is_tied = names is not None and family.flags[FLAG].read(config, CONFIG).value
    except CheckpointError:
        # The default depends on the family, so for unknown families only an explicit value counts.
        names, is_tied = _DEFAULT_NAMES, config.get(_FIELD) is True
    return names if is_tied else None


def _stored_names(names: Head, arrays: Mapping[str, LazyArray]) -> Head | None:
    """Return the stored names of the head and the embedding, which may have a prefix such as `module.`."""
    for name in arrays:
        prefix = name.removesuffix(names.head)
        if name == prefix + names.head and (not prefix or prefix.endswith(".")):
            embedding = prefix + names.embedding
            if embedding in arrays:
                return Head(embedding, name)
    return None


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    head = stored_tied_head(model)
    if head is None:
        return
    is_near = are_local((head.head, head.embedding))
    try:
        deviation = head.deviation(memory=_MEMORY, max_rows=None if is_near else _SAMPLED_ROWS)
    except CheckpointError as error:
        yield _not_compared(model, head.names, f"they cannot be compared: {error.raw.line}")
        return
    if deviation is not None:
        yield _differs(model, head.names, deviation)
    elif not is_near and head.head.shape[0] > _SAMPLED_ROWS:
        yield _not_compared(model, head.names, f"only {_SAMPLED_ROWS} rows were compared, which are equal")
    else:
        yield _repeats(model, head.names)


def _differs(model: ModelDirectory, names: Head, deviation: HeadDeviation) -> ModelFinding:
    command = None
    keep = f"to keep the head, set {_FIELD} to false in {CONFIG}"
    if (model.config or {}).get(_FIELD) is True and not model.is_output:
        path = quote(model.path(CONFIG))
        command = f"""sed -i.bak 's/"{_FIELD}": *true/"{_FIELD}": false/g' {path}"""
        keep = f"to keep the head: {command}"
    return ModelFinding(
        "error",
        CHECK.name,
        model.location,
        f"{names.head} differs from {names.embedding}, and {CONFIG} ties them: {deviation}",
        "transformers 5 keeps both arrays and warns; loaders such as vLLM ignore the head",
        f"{keep}; to remove it, run {action('select', model.location, 'DST', drop=[names.head])}",
        command=command,
        expected=f"the values of {names.embedding}",
        got=str(deviation),
    )


def _repeats(model: ModelDirectory, names: Head) -> ModelFinding:
    command = call("select", model.location, "DST", drop=[names.head])
    return ModelFinding(
        "info",
        CHECK.name,
        model.location,
        f"{names.head} has the values of {names.embedding}, and {CONFIG} ties them",
        "the array is stored twice, and conversions to MaxText need to know which copy counts",
        f"store it once: {command}",
        command=command,
    )


def _not_compared(model: ModelDirectory, names: Head, reason: str) -> ModelFinding:
    return ModelFinding(
        "warning",
        CHECK.name,
        model.location,
        f"{names.head} is stored, and {CONFIG} ties it to {names.embedding}; {reason}",
        "if they differ, loaders that tie them ignore the values of the head",
        f"copy the model to this machine with {action('copy')}, and run doctor on the copy",
    )


CHECK = ModelCheck(
    "tied-head",
    f"an output head that is stored although `{_FIELD}` is true, and how far it is from the embedding",
    _check,
    consumer="transformers and MaxText",
)
