"""Network reads: long reads are split into concurrent parts, and late parts are requested again.

Each response is stored in its own buffer and copied to the caller's buffer while the caller waits, so that a
late response never overwrites a buffer that has been reused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from ckpttools.core.details import log_detail
from ckpttools.stores.concurrency import MAX_CONCURRENCY, Pace, requested_concurrency

if TYPE_CHECKING:
    from typing_extensions import Buffer

Fetch: TypeAlias = Callable[[int, int], "Buffer"]
"""Function that returns a number of bytes from an offset, in memory that does not change afterward."""

PART = 4 << 20
"""Size of a part of a long read in bytes."""
# A read is late after this multiple of the 95th percentile of recent reads of similar length, but not before
# this many seconds.
_VALID_FACTOR, _LATE_SECONDS = 4, 1.0
# With fewer reads to compare, a read is late after `_UNKNOWN_SECONDS`, because the connection may be slow.
_KNOWN, _REMEMBERED, _UNKNOWN_SECONDS = 3, 100, 5.0
# Attempts per part. The wait doubles with each attempt, because a repeated request can also stall.
_ATTEMPTS = 3
# Limits on repeated requests: a base number, which gives short transfers some; one more per this many reads;
# and this many at a time.
_BASE_REPEATS, _ONE_OF, _AGAIN_AT_ONCE = 8, 25, 4


class ReadPool:
    """A thread-safe pool of the reads of one store.

    Attributes:
        pace: Limits concurrent reads.
    """

    def __init__(self) -> None:
        self.pace = Pace(PART)
        self._threads = _Threads()
        self._lateness = _Lateness()

    @property
    def memory(self) -> int:
        """Return the maximum size of responses in memory, in bytes."""
        return self.pace.nbytes + _AGAIN_AT_ONCE * PART

    def read_into(self, start: int, out: memoryview, fetch: Fetch) -> None:
        """Fill `out` with the bytes from `start`; raises the first error from `fetch`."""
        changed = threading.Condition()
        parts = [
            _ReadPart(start + at, out[at : at + PART], fetch, changed) for at in range(0, len(out), PART)
        ]
        try:
            for part in parts:
                self._threads.run(partial(self._read_part, part))
            with changed:
                while not changed.wait_for(lambda: all(part.is_over for part in parts), _LATE_SECONDS / 4):
                    self._raise_first(parts)
                    for part in parts:
                        self._repeat_if_late(part)
                self._raise_first(parts)
        finally:
            with changed:
                for part in parts:
                    part.out = None

    def _raise_first(self, parts: list[_ReadPart]) -> None:
        for part in parts:
            if part.has_failed:
                raise part.errors[0]

    def _read_part(self, part: _ReadPart) -> None:
        if part.out is None:
            return
        with self.pace.read(part.length):
            self._lateness.note(part.length, part.attempt())

    def _repeat_if_late(self, part: _ReadPart) -> None:
        """Request a part again if it is late; the caller must hold the part's lock."""
        if part.is_over or part.attempts >= _ATTEMPTS or part.asked is None:
            return
        seconds = time.monotonic() - part.asked
        if self._lateness.may_retry(part.length, seconds / 2 ** (part.attempts - 1)):
            part.attempts += 1
            log_detail("no answer for %s bytes in %.1f s: requested again", part.length, seconds)
            part.asked = time.monotonic()
            threading.Thread(target=self._read_again, args=(part,), daemon=True).start()

    def _read_again(self, part: _ReadPart) -> None:
        try:
            self._lateness.note(part.length, part.attempt())
        finally:
            self._lateness.ended()


class _ReadPart:
    """A part of a long read.

    Args:
        start: Offset of the first byte.
        out: Destination of the bytes.
        fetch: Requests the bytes.
        changed: Guards the state, and is notified when the part has ended.

    Attributes:
        out: None once the caller's buffer must no longer be written to.
        length: Number of bytes.
        asked: Start of the latest attempt, by the monotonic clock; None before the first.
        attempts: Number of attempts.
        errors: Errors of the failed attempts.
    """

    def __init__(self, start: int, out: memoryview, fetch: Fetch, changed: threading.Condition) -> None:
        self._start, self._fetch, self._changed = start, fetch, changed
        self.out: memoryview | None = out
        self.length = len(out)
        self.asked: float | None = None
        self.attempts = 1
        self.errors: list[BaseException] = []

    @property
    def has_failed(self) -> bool:
        return len(self.errors) == self.attempts

    @property
    def is_over(self) -> bool:
        return self.out is None or self.has_failed

    def attempt(self) -> float | None:
        """Request the bytes; return the duration in seconds, or None if the response was not used."""
        started = time.monotonic()
        self.asked = self.asked or started
        try:
            content = memoryview(self._fetch(self._start, self.length))
        except BaseException as error:
            with self._changed:
                self.errors.append(error)
                self._changed.notify_all()
            return None
        with self._changed:
            if self.out is None:
                return None
            self.out[:] = content.cast("B")
            self.out = None
            self._changed.notify_all()
        return time.monotonic() - started


class _Lateness:
    """Statistics of read times, which decide when a read is late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, deque[float]] = {}
        self._reads = self._again = self._under_way = 0

    def note(self, length: int, seconds: float | None) -> None:
        """Record the length and duration of a read; None for an unusable duration."""
        with self._lock:
            self._reads += 1
            if seconds is not None:
                self._taken.setdefault(length.bit_length(), deque(maxlen=_REMEMBERED)).append(seconds)

    def may_retry(self, length: int, seconds: float) -> bool:
        """Return whether a read of this duration may be requested again, and count the new request if so."""
        if seconds < _LATE_SECONDS:
            return False
        with self._lock:
            taken = sorted(self._taken.get(length.bit_length(), ()))
            is_known = len(taken) >= _KNOWN
            usual = _VALID_FACTOR * taken[len(taken) * 95 // 100] if is_known else _UNKNOWN_SECONDS
            is_late = seconds > usual
            limit = _BASE_REPEATS + self._reads // _ONE_OF
            is_allowed = self._again < limit and self._under_way < _AGAIN_AT_ONCE
            if is_late and is_allowed:
                self._again += 1
                self._under_way += 1
            return is_late and is_allowed

    def ended(self) -> None:
        """Count the end of a repeated request."""
        with self._lock:
            self._under_way -= 1


class _Threads:
    """A pool of daemon threads that grows on demand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def run(self, task: Callable[[], None]) -> None:
        """Run a task in some thread; the task must not raise."""
        self._todo.put(task)
        with self._lock:
            if self._idle.acquire(blocking=False) or self._count >= max(
                MAX_CONCURRENCY, requested_concurrency() or 0
            ):
                return
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:
                # With fewer threads, tasks wait but still run.
                if not self._count:
                    raise
            else:
                self._count += 1

    def _work(self) -> None:
        while True:
            self._todo.get()()
            self._idle.release()
