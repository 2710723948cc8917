"""Many small questions to one store, several at once where each takes its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ckpttools.stores.base import Store
from ckpttools.stores.pace import asked_for

_WRITES_AT_ONCE = 16

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def writes_at_once() -> int:
    """How many small objects are written, copied or deleted at a time."""
    return asked_for() or _WRITES_AT_ONCE


def at_once(store: Store, function: Callable[[_Item], _Answer], items: Iterable[_Item]) -> list[_Answer]:
    """What `map` gives: one after the other on a disk, in threads where a store says so (`Costs.requests`).

    The first error in the order of the items is raised, and what is not begun then is left out.
    """
    waiting = list(items)
    return in_threads(store.costs.requests or 1, function, waiting)


def in_threads(most: int, function: Callable[[_Item], _Answer], items: Collection[_Item]) -> list[_Answer]:
    """The same in so many threads at most; in this one where the system starts none."""
    threads = min(most, len(items))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool, suppress(_NoThreadError):
            _start_one(pool)
            return list(pool.map(function, items))
    return list(map(function, items))


class _NoThreadError(Exception):
    """A pool has not even one thread."""


def _start_one(pool: ThreadPoolExecutor) -> None:
    """Has a pool start the first of its threads."""
    try:
        pool.submit(int)
    except RuntimeError as error:
        raise _NoThreadError from error
