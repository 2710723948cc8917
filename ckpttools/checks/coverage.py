"""Compare arrays with the rows of the model's family, as a conversion to MaxText does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttools.array.tree import Tree
from ckpttools.checks.base import Level, ModelCheck, ModelDirectory, ModelFinding
from ckpttools.checks.tied_head import stored_tied_head
from ckpttools.core.errors import CheckpointError, ConfigError, CoverageError, MappingError, ShapeError
from ckpttools.formats.adapters import has_adapter
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.hub_names import patterns_outside_model
from ckpttools.maxtext.recognition import HEAD_NAME, backbone_hint, owned_name_test
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.view import view_of


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    tree, config = model.tree, model.config
    if tree is None or config is None:
        return
    if has_adapter(tree) or view_of(tree).is_maxtext:
        return
    error = _conversion_error(tree)
    if error is None or _is_only_tied_head(error, model):
        return
    if owned_name_test(config) is None:
        # A model with another kind of head may differ only in the head.
        if config.get("auto_map") or not isinstance(error, NotCoveredError):
            return
        hint = backbone_hint(config, error.coverage, is_without_prefix=False)
        if hint is not None:
            yield _backbone(model, error, hint)
            return
        missing = {
            name: shape for name, shape in error.coverage.missing.items() if not name.endswith(HEAD_NAME)
        }
        if not missing and not error.coverage.misshapen:
            return
        coverage = replace(error.coverage, missing=missing, extra=())
        error = NotCoveredError(error.raw.message, coverage, location="", hint="")
    summary = error.coverage.summary() if isinstance(error, NotCoveredError) else ""
    level = _level(error, tree)
    is_unsupported = isinstance(error, NotCoveredError) and error.is_unsupported
    against = "MaxText's layers" if is_unsupported else "config.json"
    yield ModelFinding(
        level,
        CHECK.name,
        model.location,
        CheckpointError(f"the arrays do not match {against}:{summary}").raw.line
        if summary
        else error.raw.line,
        "conversions to MaxText refuse the model" + (_effect(error) if level == "error" else ""),
        error.raw.hint or "check that config.json belongs to these weights",
        expected=error.raw.expected,
        got=error.raw.got,
    )


def _effect(error: CheckpointError) -> str:
    """Describe how transformers handles the model."""
    if not isinstance(error, NotCoveredError) or error.coverage.missing or error.coverage.misshapen:
        return ", and transformers fails or initializes missing arrays randomly"
    return ", and transformers skips the arrays that it does not expect"


def _backbone(model: ModelDirectory, error: NotCoveredError, hint: str) -> ModelFinding:
    """Report a model that is complete for its own class but not supported by MaxText."""
    architecture = ", ".join(map(str, (model.config or {}).get("architectures") or ()))
    (head,) = error.coverage.missing
    return ModelFinding(
        "info",
        CHECK.name,
        model.location,
        f"a model without a language model's output head: {architecture}, without {head}",
        "transformers loads it in its own class; conversions to MaxText do not support it",
        hint,
    )


def _is_only_tied_head(error: CheckpointError, model: ModelDirectory) -> bool:
    """Return whether the only defect is a stored output head, which the check `tied-head` reports."""
    if not isinstance(error, NotCoveredError) or error.coverage.missing or error.coverage.misshapen:
        return False
    head = stored_tied_head(model)
    return (
        head is not None and len(error.coverage.extra) == 1 and head.names.head.endswith(error.coverage.extra)
    )


def _level(error: CheckpointError, tree: Tree) -> Level:
    """Return the level of a conversion error. User choices and arrays of trainers are not damage."""
    if isinstance(error, NotCoveredError) and error.is_unsupported:
        return "info"
    if isinstance(error, NotCoveredError | MappingError):
        return "info" if patterns_outside_model(tree) else "error"
    return "warning" if isinstance(error, ConfigError | ShapeError) else "info"


def _conversion_error(tree: Tree) -> CheckpointError | None:
    """Return the error that a conversion would raise, or None."""
    refusal = _conversion_error_with(tree, ToMaxText())
    # If MaxText cannot scan the layers, the model itself is not at fault unless the layers differ.
    if refusal is None or isinstance(refusal, CoverageError):
        return refusal
    unscanned = _conversion_error_with(tree, ToMaxText(scan=False))
    return refusal if unscanned is None and isinstance(refusal, ShapeError) else unscanned


def _conversion_error_with(tree: Tree, options: ToMaxText) -> CheckpointError | None:
    try:
        to_maxtext(tree, options)
    except CheckpointError as error:
        return error
    return None


CHECK = ModelCheck(
    "coverage",
    "arrays that are missing, unexpected, or of a different shape than `config.json` implies",
    _check,
    consumer="MaxText and transformers",
)
