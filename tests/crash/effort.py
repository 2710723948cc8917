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
    return items if ALL else sample(items, count, seed)


def some_and_last(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """The same, half of them from the last fifth: there a checkpoint gets its name."""
    return items if ALL else sample_and_last(items, count, seed)


def sample(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """So many of the items, or all if there are no more; the same each time."""
    return items if len(items) <= count else random.Random(seed).sample(items, count)


def sample_and_last(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """The same, half of them from the last fifth."""
    late = -(-len(items) // 5)
    return (*sample(items[:-late], count // 2, seed), *sample(items[-late:], count - count // 2, seed))
