"""What MaxText wants of settings about checkpoints taken together (`configs/types.py` of MaxText 0.2.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.maxtext.loading.settings import LOCAL_TIERS

_LOCAL, _PERIOD = "local_checkpoint_directory", "local_checkpoint_period"
_BACKUP = "multi_tier_checkpointing_backup_interval_"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_TRUE = ("true", "t", "yes", "y", "on", "1")


def refusals(settings: Mapping[str, Any]) -> Iterator[str]:
    """Why MaxText would refuse settings of which each alone is one; nothing where it takes them.

    Args:
        settings: name -> value, as text or as what it stands for; those that are absent have MaxText's
            defaults.
    """

    def said(name: str) -> Any:
        value = settings.get(name)
        return None if value is None or str(value).lower() in ("", "none", "null") else value

    def is_set(name: str, default: bool = False) -> bool:
        value = said(name)
        return default if value is None else str(value).lower() in _TRUE

    def number(name: str) -> int | None:
        value = said(name)
        return int(value) if value is not None and _WHOLE.fullmatch(str(value)) else None

    for name in (_PERIOD, f"{_BACKUP}minutes", f"{_BACKUP}steps"):
        if said(name) is not None and number(name) is None:
            yield f"{name} wants a whole number, and {said(name)} is none"
    if said("load_parameters_path") and said("load_full_state_path"):
        yield "load_parameters_path and load_full_state_path exclude each other"
    if said("load_full_state_path") and not is_set("enable_checkpointing", default=True):
        yield "load_full_state_path needs enable_checkpointing=true"
    for tier in filter(is_set, LOCAL_TIERS):
        if not said(_LOCAL):
            yield f"{tier} needs {_LOCAL}"
        if (number(_PERIOD) or 0) <= 0:
            yield f"{tier} needs {_PERIOD} above 0"
    if is_set(LOCAL_TIERS[0]):
        minutes, steps = number(f"{_BACKUP}minutes"), number(f"{_BACKUP}steps")
        if (minutes is None) == (steps is None):
            yield f"{LOCAL_TIERS[0]} needs one of {_BACKUP}minutes and {_BACKUP}steps, not both"
        if steps is not None and steps < (number(_PERIOD) or 0):
            yield f"{_BACKUP}steps must not be less than {_PERIOD}"
