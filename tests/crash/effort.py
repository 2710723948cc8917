"""Sizes of samples; CKPTTOOLS_CRASH=all (`make crash`) tests everything."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

ALL = os.environ.get("CKPTTOOLS_CRASH") == "all"
_T = TypeVar("_T")


def some(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """Return all items, or a reproducible sample of them."""
    return items if ALL else sample(items, count, seed)


def some_and_last(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """Return all items, or a sample with half of it from the last fifth, where a checkpoint gets its name."""
    return items if ALL else sample_and_last(items, count, seed)


def sample(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """Return a reproducible sample of at most `count` items."""
    return items if len(items) <= count else random.Random(seed).sample(items, count)


def sample_and_last(items: Sequence[_T], count: int, seed: str) -> Sequence[_T]:
    """Return a reproducible sample, half of it from the last fifth."""
    late = -(-len(items) // 5)
    return (*sample(items[:-late], count // 2, seed), *sample(items[-late:], count - count // 2, seed))
