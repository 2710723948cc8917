"""Settings of a run beside those of a checkpoint: where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.infer_settings import MODEL_NAME, Values
from ckpttools.maxtext.config.report import Contradiction

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
        result = given.values.get(name)
        if result is None or agrees(name, result.value, setting.value):
            continue
        yield Contradiction(name, result.value, result.source, setting.value, setting.source)


def agrees(name: str, declared: Any, expected: Any) -> bool:
    """Whether a setting as a run has it does as well as one that a model has."""
    if name == MODEL_NAME:
        # Names that begin alike have the same code.
        return isinstance(declared, str) and declared.partition("-")[0] == str(expected).partition("-")[0]
    if name == _ATTENTION:
        # How it is computed: whatever MaxText takes gives the same.
        return declared in _KERNELS
    return same(declared, expected)


def same(declared: Any, expected: Any) -> bool:
    """Whether a setting as a run has it is one as a model has it; numbers may be written as text."""
    if isinstance(expected, bool) or not isinstance(expected, _NUMBERS):
        return bool(declared == expected)
    try:
        return float(declared) == float(expected)
    except (TypeError, ValueError):
        return False
