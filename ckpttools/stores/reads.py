"""Reads over a network: long ones in parts at the same time, and what is late is asked for a second time.

Each answer is put into memory of its own, and copied to who waits for it as long as somebody does: one that
comes late can never be written into a buffer that is somebody else's by then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from ckpttools.stores.concurrency import MOST, Pace, asked_for

if TYPE_CHECKING:
    from typing_extensions import Buffer

Fetch: TypeAlias = Callable[[int, int], "Buffer"]
"""The bytes from an offset on, so many, in memory that nobody writes to afterwards."""

PART = 4 << 20
"""Bytes of a long read that come in one request."""
# A read is late after this many times the 95th percentile of the last reads of about its length, and after
# this many seconds at least.
_TIMES_AS_LONG, _LATE_SECONDS = 4, 1.0
# With fewer reads to compare, a read is late after `_UNKNOWN_SECONDS`, because the connection may be slow.
_KNOWN, _REMEMBERED, _UNKNOWN_SECONDS = 3, 100, 5.0
# Attempts per part. The wait doubles with each, because a repeated request can stall, too.
_ATTEMPTS = 3
# Limits on repeated requests: a base number, so that short transfers have some; one more per this many reads;
# and this many at the same time.
_BASE_REPEATS, _ONE_OF, _AGAIN_AT_ONCE = 8, 25, 4


class ReadPool:
    """The reads of one store; for many threads at once.

    Attributes:
        pace: lets them begin.
    """

    def __init__(self) -> None:
        self.pace = Pace(PART)
        self._threads = _Threads()
        self._lateness = _Lateness()

    @property
    def memory(self) -> int:
        """Bytes of answers that are in memory at most."""
        return self.pace.nbytes + _AGAIN_AT_ONCE * PART

    def read_into(self, start: int, out: memoryview, fetch: Fetch) -> None:
        """Fills `out` with the bytes from `start` on; raises what `fetch` raises of any part."""
        changed = threading.Condition()
        parts = [
            _ReadPart(start + at, out[at : at + PART], fetch, changed) for at in range(0, len(out), PART)
        ]
        try:
            for part in parts:
                self._threads.run(partial(self._answer, part))
            with changed:
                while not changed.wait_for(lambda: all(part.is_over for part in parts), _LATE_SECONDS / 4):
                    self._raise_first(parts)
                    for part in parts:
                        self._ask_again_if_late(part)
                self._raise_first(parts)
        finally:
            with changed:
                for part in parts:
                    part.out = None

    def _raise_first(self, parts: list[_ReadPart]) -> None:
        for part in parts:
            if part.has_failed:
                raise part.errors[0]

    def _answer(self, part: _ReadPart) -> None:
        if part.out is None:
            return
        with self.pace.read(part.length):
            self._lateness.note(part.length, part.attempt())

    def _ask_again_if_late(self, part: _ReadPart) -> None:
        """Called with the lock of `part` held."""
        if part.is_over or part.attempts >= _ATTEMPTS or part.asked is None:
            return
        seconds = time.monotonic() - part.asked
        if self._lateness.allows_another(part.length, seconds / 2 ** (part.attempts - 1)):
            part.attempts += 1
            part.asked = time.monotonic()
            threading.Thread(target=self._answer_again, args=(part,), daemon=True).start()

    def _answer_again(self, part: _ReadPart) -> None:
        try:
            self._lateness.note(part.length, part.attempt())
        finally:
            self._lateness.ended()


class _ReadPart:
    """A part of a read.

    Args:
        start: of the first byte expected.
        out: where they go.
        fetch: asks for them.
        changed: guards all that changes; notified when the part is over.

    Attributes:
        out: None once nothing may be written there any more.
        length: bytes expected.
        asked: start of the latest attempt, by the monotonic clock; None before the first.
        attempts: number of attempts.
        errors: of those that failed.
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
        """Asks for the bytes; returns the seconds that it took, or None if it was of no use."""
        began = time.monotonic()
        self.asked = self.asked or began
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
        return time.monotonic() - began


class _Lateness:
    """Knows how long reads take, and when one may be asked for again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, deque[float]] = {}
        self._reads = self._again = self._under_way = 0

    def note(self, length: int, seconds: float | None) -> None:
        """Takes note of a read of so many bytes that took so long; None if nothing is known by it."""
        with self._lock:
            self._reads += 1
            if seconds is not None:
                self._taken.setdefault(length.bit_length(), deque(maxlen=_REMEMBERED)).append(seconds)

    def allows_another(self, length: int, seconds: float) -> bool:
        """Whether what takes so long already is to be asked for again, which then has begun."""
        if seconds < _LATE_SECONDS:
            return False
        with self._lock:
            taken = sorted(self._taken.get(length.bit_length(), ()))
            is_known = len(taken) >= _KNOWN
            usual = _TIMES_AS_LONG * taken[len(taken) * 95 // 100] if is_known else _UNKNOWN_SECONDS
            is_late = seconds > usual
            limit = _BASE_REPEATS + self._reads // _ONE_OF
            is_allowed = self._again < limit and self._under_way < _AGAIN_AT_ONCE
            if is_late and is_allowed:
                self._again += 1
                self._under_way += 1
            return is_late and is_allowed

    def ended(self) -> None:
        """A second attempt has ended."""
        with self._lock:
            self._under_way -= 1


class _Threads:
    """Threads that do what is to be done, as many as are of use; no process waits for them when it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def run(self, task: Callable[[], None]) -> None:
        """Does something soon, which raises nothing."""
        self._todo.put(task)
        with self._lock:
            if self._idle.acquire(blocking=False) or self._count >= max(MOST, asked_for() or 0):
                return
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:
                # Fewer do the same work.
                if not self._count:
                    raise
            else:
                self._count += 1

    def _work(self) -> None:
        while True:
            self._todo.get()()
            self._idle.release()
