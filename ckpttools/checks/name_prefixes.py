"""Report array names whose prefix ckpt recognizes but transformers does not."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.array.tree import dotted
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.message_terms import call
from ckpttools.core.text import plural, sample_names
from ckpttools.maxtext.hub_names import with_family_names

# transformers adds or removes this prefix, for example between AutoModel and AutoModelForCausalLM.
_BACKBONE = "model."


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    if model.tree is None or model.is_output:
        return
    before = {dotted(path) for path in model.tree.arrays}
    after = {dotted(path) for path in with_family_names(model.tree).tree.arrays}
    unknown = sorted(name for name in before - after if f"{_BACKBONE}{name}" not in after)
    if not unknown:
        return
    command = call("hf_to_maxtext", model.location, "DST")
    yield ModelFinding(
        "warning",
        CHECK.name,
        model.location,
        f"{plural(len(unknown), 'array')} with a prefix that the model does not have: "
        f"{sample_names(unknown)}",
        "conversions to MaxText recognize them; transformers initializes the missing arrays randomly",
        f"convert the model, which corrects the names: {command}",
        command=command,
    )


CHECK = ModelCheck("name-prefixes", "array names with a prefix that transformers does not remove", _check)
