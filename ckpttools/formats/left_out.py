"""Remarks about objects in a file that a tree cannot contain."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.tree import Path, dotted
from ckpttools.core.notes import Notes
from ckpttools.core.text import first_names

_MOST_NAMED = 5


def left_out(others: Mapping[Path, str]) -> Notes:
    """Return a remark on objects that are not arrays, numbers or texts, from their kinds by path."""
    if not others:
        return Notes()
    named = first_names([f"{dotted(path)} ({kind})" for path, kind in others.items()], _MOST_NAMED)
    return Notes(remarks=(f"left out, as they are neither tensors nor numbers: {named}",))
