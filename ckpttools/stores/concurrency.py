"""How many reads of a store are under way at once: as many as bring more than fewer do, found by trying."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from ckpttools.stores.base import Store

# 8 MiB at 20 ms: 0.27 GB/s one at a time, 0.89 with 16 at once.
USUAL = 16
_LEAST, MOST = 4, 2 * USUAL
"""Reads under way at first, and at most unless the user asks for more."""
# How much more or fewer are tried at a step, and what makes that worth it.
_STEP, _BETTER, _AS_GOOD = 1.5, 1.08, 0.96
# What is measured at a time: seconds, and reads for each that may be under way.
_SECONDS, _READS_EACH = 0.25, 2
# How many measurements pass before something else is tried.
_REST = 20
# What a read is worth beside its bytes: short ones are many, and their number is what counts.
_WORTH = 128 << 10


_asked: list[int] = []


@contextmanager
def requesting(requests: int | None) -> Iterator[None]:
    """Has each store keep so many reads under way inside the `with`; None for as many as it finds good.

    It is said for the process: of two calls at once, the later one counts for both.
    """
    if requests is None:
        yield
        return
    _asked.append(requests)
    try:
        yield
    finally:
        _asked.remove(requests)


def asked_for() -> int | None:
    """The reads under way that the user asks for; None for as many as are good."""
    return _asked[-1] if _asked else None


class _Measured(NamedTuple):
    """What came with so many reads under way at most: bytes in a second, with what reads are worth."""

    limit: int
    rate: float


class Pace:
    """Lets reads begin; for many threads at once.

    Args:
        nbytes: of a long read. What is under way has at most as many bytes as `USUAL` of these, or as many as
            the user asks for.
    """

    def __init__(self, nbytes: int) -> None:
        self._long = nbytes
        self._changed = threading.Condition()
        self._limit = USUAL
        self._under_way = self._bytes_under_way = 0
        self._before: _Measured | None = None
        self._rest, self._is_next_more, self._is_settled = 0, True, False
        self._begin_measuring()

    @property
    def limit(self) -> int:
        """Reads that may be under way now."""
        return asked_for() or self._limit

    @property
    def nbytes(self) -> int:
        """Bytes of all that is under way at most."""
        return self._long * (asked_for() or USUAL)

    @contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """One read of so many bytes, which begins when there is room for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(nbytes))
            self._under_way += 1
            self._bytes_under_way += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._bytes_under_way -= nbytes
                self._count(nbytes)
                self._changed.notify_all()

    def slow_down(self) -> None:
        """A server has refused a request because there are too many: half as many for a while."""
        with self._changed:
            self._limit = max(1, self._limit // 2)
            self._before, self._rest, self._is_next_more = None, _REST, True
            self._begin_measuring()

    def _has_room(self, nbytes: int) -> bool:
        is_within = self._under_way < self.limit and self._bytes_under_way + nbytes <= self.nbytes
        has_room = is_within or not self._under_way
        self._is_full |= not has_room
        return has_room

    def _begin_measuring(self) -> None:
        self._began, self._reads, self._work, self._is_full = time.monotonic(), 0, 0, False

    def _count(self, nbytes: int) -> None:
        self._reads += 1
        self._work += nbytes + _WORTH
        seconds = time.monotonic() - self._began
        if seconds < _SECONDS or self._reads < _READS_EACH * self._limit:
            return
        # Where fewer were expected than allowed nothing is known of more; and a change takes time to tell.
        limit, is_settled = self._limit, self._is_settled
        if self._is_full and is_settled:
            self._measured(_Measured(limit, self._work / seconds))
        self._is_settled = self._is_full and limit == self._limit
        self._begin_measuring()

    def _measured(self, now: _Measured) -> None:
        """Goes on in a direction that was good, goes back from one that was not, and rests then."""
        before, self._before = self._before, now
        if self._rest:
            self._rest -= 1
            return
        if before is None or before.limit == now.limit:
            self._limit = _more(now.limit) if self._is_next_more else _fewer(now.limit)
            self._is_next_more = not self._is_next_more
        elif now.limit > before.limit and now.rate > _BETTER * before.rate:
            self._limit = _more(now.limit)
        elif now.limit < before.limit and now.rate > _AS_GOOD * before.rate:
            self._limit = _fewer(now.limit)
        else:
            self._limit, self._rest = before.limit, _REST
        if self._limit == now.limit:
            self._rest = _REST


def _more(limit: int) -> int:
    return min(MOST, round(limit * _STEP + 0.5))


def _fewer(limit: int) -> int:
    return max(min(_LEAST, limit), round(limit / _STEP))


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
