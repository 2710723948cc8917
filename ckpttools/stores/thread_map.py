"""Many small questions to one store, several at once where each takes its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TypeVar

from ckpttools.stores.base import Store
from ckpttools.stores.concurrency import asked_for

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


def in_threads(limit: int, function: Callable[[_Item], _Answer], items: Collection[_Item]) -> list[_Answer]:
    """The same in so many threads at most, this one among them; in fewer where the system starts no more."""
    if min(limit, len(items)) <= 1:
        return [function(item) for item in items]
    todo, lock = iter(enumerate(items)), threading.Lock()
    answers: dict[int, _Answer] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while not errors:
            with lock:
                taken = next(todo, None)
            if taken is None:
                return
            number, item = taken
            try:
                answers[number] = function(item)
            except BaseException as error:
                errors[number] = error

    others = [threading.Thread(target=work) for _ in range(min(limit, len(items)) - 1)]
    try:
        with suppress(RuntimeError):
            for other in others:
                other.start()
        work()
    finally:
        for other in others:
            if other.ident is not None:
                other.join()
    if errors:
        raise errors[min(errors)]
    return [answers[number] for number in range(len(items))]
