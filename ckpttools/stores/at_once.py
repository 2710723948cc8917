"""Many small questions to one store, several at once where each takes its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckpttools.stores.base import Store
from ckpttools.stores.pace import asked_for

_WRITES_AT_ONCE = 16


def is_ending() -> bool:
    """Whether no thread can begin any more, as the interpreter ends and waits for those that are at work."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError as error:
        return "shutdown" in str(error)
    return False


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
    """The same in so many threads at most."""
    threads = min(most, len(items))
    if threads <= 1 or is_ending():
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
