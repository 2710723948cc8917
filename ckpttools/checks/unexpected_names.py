"""Arrays in an output that the family of its configuration does not have."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.text import plural, some
from ckpttools.core.wording import several
from ckpttools.formats.adapters import has_adapter
from ckpttools.maxtext.recognition import rows_named
from ckpttools.maxtext.structural_names import names_of_no_row
from ckpttools.maxtext.view import view_of


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    # `coverage` reports those of a model that exists, with their shapes and the arrays that are missing.
    if not model.is_output or model.tree is None or rows_named(model.config or {}) is None:
        return
    if has_adapter(model.tree) or view_of(model.tree).is_maxtext:
        return
    unknown = names_of_no_row(model.tree, model.config or {})
    if unknown:
        kind = (model.config or {}).get("model_type")
        yield ModelFinding(
            "warning",
            CHECK.name,
            model.location,
            f"{plural(len(unknown), 'array')} that no {kind} model has by its configuration: {some(unknown)}",
            "transformers ignores them, and loaders such as vLLM refuse names that they do not know",
            f"leave them out if the model does not need them: {several('drop', unknown[:1])}",
        )


CHECK = ModelCheck(
    "unexpected-names", "arrays in an output that the family of its configuration does not have", _check
)
