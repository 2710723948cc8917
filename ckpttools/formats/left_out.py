"""What is said of what a file holds and no tree does."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.tree import Path, dotted
from ckpttools.core.notes import Notes
from ckpttools.core.text import first_names

_MOST_NAMED = 5


def left_out(others: Mapping[Path, str]) -> Notes:
    """What is said of objects that are neither arrays nor numbers nor texts: path -> what it is."""
    if not others:
        return Notes()
    named = first_names([f"{dotted(path)} ({kind})" for path, kind in others.items()], _MOST_NAMED)
    return Notes(remarks=(f"left out, as they are neither tensors nor numbers: {named}",))
