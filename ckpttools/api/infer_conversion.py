"""Infer which conversion a model needs from its location."""

from __future__ import annotations

from typing import Literal, NamedTuple, Unpack

from ckpttools.api.sources import Opening, opened, read_options
from ckpttools.core.errors import ChosenItemWarning, UsageError, suppress_step_warnings
from ckpttools.core.message_terms import action
from ckpttools.maxtext.source_checks import conversion_of
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import LocationLike


class InferredConversion(NamedTuple):
    """The conversion that a model needs.

    Attributes:
        function: Name of the function of `ckpttools`.
        what: Description of the model, such as "a Hugging Face model (safetensors)".
        target: Result of the function, such as "MaxText".
    """

    function: Literal["hf_to_maxtext", "maxtext_to_hf"]
    what: str
    target: str


def infer_conversion(source: LocationLike, **opening: Unpack[Opening]) -> InferredConversion:
    """Return the conversion that a model needs. Reads headers and indexes, but no arrays.

    Raises:
        UsageError: The checkpoint can be converted in neither or in both directions.
        CheckpointError: The path does not exist, is not a single checkpoint, or cannot be read.
    """
    with suppress_step_warnings(ChosenItemWarning):
        tree = opened(source, read_options(opening))
    function, view, location = conversion_of(tree), view_of(tree), str(source)
    if function is None:
        names = [action(name, location, "DST") for name in ("hf_to_maxtext", "maxtext_to_hf")]
        raise UsageError(
            "this checkpoint does not show in which direction to convert it",
            location=location,
            got=f"{tree.metadata.format}, with names of neither Hugging Face nor MaxText, or of both",
            expected="a Hugging Face model or a MaxText checkpoint",
            hint=f"name the direction: {names[0]} or {names[1]}; "
            f"{action('inspect', location)} lists the names",
        )
    if function == "hf_to_maxtext":
        return InferredConversion(function, f"a Hugging Face model ({tree.metadata.format})", "MaxText")
    kind = view.kind or tree.metadata.format
    return InferredConversion(function, f"a MaxText checkpoint ({kind})", "Hugging Face")
