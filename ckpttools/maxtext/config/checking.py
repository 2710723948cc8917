"""Settings of a run beside those of a checkpoint: where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.report import Contradiction
from ckpttools.maxtext.config.telling import MODEL_NAME, Values

_ATTENTION, _KERNELS = "attention", ("dot_product", "flash")
_NUMBERS = (int, float)


def contradictions(given: Given, values: Values) -> Iterator[Contradiction]:
    """The settings of a run that are not the checkpoint's.

    What is not said counts as well, as MaxText's default, if a configuration file or a model is named.

    Args:
        given: what the run is told.
        values: those of the checkpoint.
    """
    for name, setting in values.items():
        found = given.values.get(name)
        if found is None or agrees(name, found.value, setting.value):
            continue
        yield Contradiction(name, found.value, found.source, setting.value, setting.source)


def agrees(name: str, said: Any, wanted: Any) -> bool:
    """Whether a setting as a run has it does as well as one that a model has."""
    if name == MODEL_NAME:
        # Names that begin alike have the same code.
        return isinstance(said, str) and said.partition("-")[0] == str(wanted).partition("-")[0]
    if name == _ATTENTION:
        # How it is computed: whatever MaxText takes gives the same.
        return said in _KERNELS
    return same(said, wanted)


def same(said: Any, wanted: Any) -> bool:
    """Whether a setting as a run has it is one as a model has it; numbers may be written as text."""
    if isinstance(wanted, bool) or not isinstance(wanted, _NUMBERS):
        return bool(said == wanted)
    try:
        return float(said) == float(wanted)
    except (TypeError, ValueError):
        return False
