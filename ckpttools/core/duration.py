"""Lengths of time as users write them: 90, 4s, 30min, 6h, 7d."""

from __future__ import annotations

from math import isfinite

from ckpttools.core.errors import UsageError

_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(declared: float | str, name: str = "a duration") -> float:
    """Seconds: a number, or text with a unit.

    Args:
        declared: such as 90, "90", "1.5h".
        name: of what it is, for messages.

    Raises:
        UsageError: it is no length of time, or none above zero.
    """
    text = str(declared).strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        seconds = float(digits) * _UNITS[text[len(digits) :].strip() or "s"]
    except (ValueError, KeyError):
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise UsageError(f"{name} is no length of time", got=text, expected="such as 90, 4s, 30min, 6h or 7d")
    return seconds
