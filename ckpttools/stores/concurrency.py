"""Concurrency of requests: adaptive limits for reads, and parallel maps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from ckpttools.stores.base import Store

# With 8 MiB reads and 20 ms latency, throughput is 0.27 GB/s with one read at a time and 0.89 GB/s with 16.
DEFAULT_CONCURRENCY = 16
_MIN_CONCURRENCY, MAX_CONCURRENCY = 4, 2 * DEFAULT_CONCURRENCY
"""Initial and maximum number of concurrent reads, unless the user sets a number."""
# Factor between two steps, and the rate ratios that justify a step up or down.
_STEP, _BETTER, _AS_GOOD = 1.5, 1.08, 0.96
# Length of a measurement, in seconds and in reads per allowed concurrent read.
_SECONDS, _READS_EACH = 0.25, 2
# Number of measurements before another limit is tried.
_REST = 20
# Cost of a request in bytes, because short reads are limited by the number of requests.
_REQUEST_COST_BYTES = 128 << 10


_requested: list[int] = []


@contextmanager
def use_concurrency(requests: int | None) -> Iterator[None]:
    """Set the number of concurrent reads per store in a `with` block; None for the adaptive limit.

    The setting is process-wide. If two calls overlap, the later one wins.
    """
    if requests is None:
        yield
        return
    _requested.append(requests)
    try:
        yield
    finally:
        _requested.remove(requests)


def requested_concurrency() -> int | None:
    """Return the number of concurrent reads that the user set; None for the adaptive limit."""
    return _requested[-1] if _requested else None


class _Measurement(NamedTuple):
    """The rate measured with a limit: bytes per second, including the cost of requests."""

    limit: int
    rate: float


class Pace:
    """A thread-safe gate that adapts the number of concurrent reads to the measured rate.

    Args:
        nbytes: Size of a long read in bytes. Concurrent reads have at most the bytes of
            `DEFAULT_CONCURRENCY` long reads, or of as many as the user set.
    """

    def __init__(self, nbytes: int) -> None:
        self._long = nbytes
        self._changed = threading.Condition()
        self._limit = DEFAULT_CONCURRENCY
        self._under_way = self._bytes_under_way = 0
        self._before: _Measurement | None = None
        self._rest, self._is_next_more, self._is_settled = 0, True, False
        self._begin_measuring()

    @property
    def limit(self) -> int:
        """Return the current limit of concurrent reads."""
        return requested_concurrency() or self._limit

    @property
    def nbytes(self) -> int:
        """Return the maximum total size of concurrent reads in bytes."""
        return self._long * (requested_concurrency() or DEFAULT_CONCURRENCY)

    @contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """Wait until a read of this size may start, and count it in the `with` block."""
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
        """Halve the limit for a while, because a server responded that there are too many requests."""
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
        self._work += nbytes + _REQUEST_COST_BYTES
        seconds = time.monotonic() - self._began
        if seconds < _SECONDS or self._reads < _READS_EACH * self._limit:
            return
        # If the limit was not reached, the rate says nothing about a higher limit. A change needs time to
        # take effect.
        limit, is_settled = self._limit, self._is_settled
        if self._is_full and is_settled:
            self._adapt(_Measurement(limit, self._work / seconds))
        self._is_settled = self._is_full and limit == self._limit
        self._begin_measuring()

    def _adapt(self, measurement: _Measurement) -> None:
        """Take another step in a direction that improved the rate, or go back one step and pause."""
        before, self._before = self._before, measurement
        if self._rest:
            self._rest -= 1
            return
        if before is None or before.limit == measurement.limit:
            self._limit = (
                _raised_limit(measurement.limit) if self._is_next_more else _lowered_limit(measurement.limit)
            )
            self._is_next_more = not self._is_next_more
        elif measurement.limit > before.limit and measurement.rate > _BETTER * before.rate:
            self._limit = _raised_limit(measurement.limit)
        elif measurement.limit < before.limit and measurement.rate > _AS_GOOD * before.rate:
            self._limit = _lowered_limit(measurement.limit)
        else:
            self._limit, self._rest = before.limit, _REST
        if self._limit == measurement.limit:
            self._rest = _REST


def _raised_limit(limit: int) -> int:
    return min(MAX_CONCURRENCY, round(limit * _STEP + 0.5))


def _lowered_limit(limit: int) -> int:
    return max(min(_MIN_CONCURRENCY, limit), round(limit / _STEP))


_WRITE_CONCURRENCY = 16

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def write_concurrency() -> int:
    """Return how many small objects are written, copied or deleted at a time."""
    return requested_concurrency() or _WRITE_CONCURRENCY


def map_concurrently(
    store: Store, function: Callable[[_Item], _Answer], items: Iterable[_Item]
) -> list[_Answer]:
    """Map a function over items: sequentially on a disk, in threads for stores that have `Costs.requests`.

    Raises the error of the first item that fails; items that have not started by then are skipped.
    """
    waiting = list(items)
    return map_in_threads(store.costs.requests or 1, function, waiting)


def map_in_threads(
    limit: int, function: Callable[[_Item], _Answer], items: Collection[_Item]
) -> list[_Answer]:
    """Map a function over items in at most `limit` threads, including this one.

    Uses fewer threads if the system cannot start more. Raises the same errors as `map_concurrently`.
    """
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
