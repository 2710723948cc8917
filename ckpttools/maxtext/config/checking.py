"""Settings of a run beside those of a checkpoint: where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpttools.maxtext.config.given import given
from ckpttools.maxtext.config.report import Contradiction
from ckpttools.maxtext.config.telling import MODEL_NAME, Values

_NUMBERS = (int, float)


def contradictions(words: Sequence[str], values: Values) -> Iterator[Contradiction]:
    """The settings of a run that are not the checkpoint's.

    What is not said counts as well, as MaxText's default, if a configuration file or a model is named.

    Args:
        words: as they are given to MaxText: a configuration file, then `NAME=VALUE`.
        values: those of the checkpoint.

    Raises:
        UsageError: nothing is said, or a word is no setting.
        StorageError, FormatError, ConfigError: a file is not there, or no configuration.
    """
    said = given(words).values
    for name, setting in values.items():
        found = said.get(name)
        if found is None or _agrees(name, found.value, setting.value):
            continue
        yield Contradiction(name, found.value, found.source, setting.value, setting.source)


def _agrees(name: str, said: Any, wanted: Any) -> bool:
    if name == MODEL_NAME:
        # Names that begin alike have the same code.
        return isinstance(said, str) and said.partition("-")[0] == str(wanted).partition("-")[0]
    return same(said, wanted)


def same(said: Any, wanted: Any) -> bool:
    """Whether a setting as a run has it is one as a model has it; numbers may be written as text."""
    if isinstance(wanted, bool) or not isinstance(wanted, _NUMBERS):
        return bool(said == wanted)
    try:
        return float(said) == float(wanted)
    except (TypeError, ValueError):
        return False
