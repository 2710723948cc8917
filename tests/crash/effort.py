"""How much is tried: a sample, or with CKPTTOOLS_CRASH=all (`make crash`) everything there is."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

ALL = os.environ.get("CKPTTOOLS_CRASH") == "all"
_T = TypeVar("_T")


def some(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """All items, or so many of them, the same each time."""
    return items if ALL or len(items) <= count else random.Random(seed).sample(items, count)


def some_and_last(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """The same, half of them from the last fifth: there a checkpoint gets its name."""
    late = -(-len(items) // 5)
    return (*some(items[:-late], count // 2, seed), *some(items[-late:], count - count // 2, seed))
