"""Starting threads where the system may refuse to: fewer do the same work."""

from __future__ import annotations

import errno
import mmap
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.message_terms import option
from ckpttools.stores.publishing import Record

# What a thread takes before it can say that it has begun, beside its stack.
_BEGINNING_BYTES = 8 << 20
_USUAL_STACK = 8 << 20
# After which a thread whose start was interrupted is taken for one that never was; it takes a millisecond.
_BEGINS_SECONDS = 0.5


class WorkerThread(threading.Thread):
    """A thread that is waited for until it has ended.

    Where an exception interrupts `Thread.join`, as that of Ctrl-C does, CPython 3.10 to 3.12 take the thread
    for ended, and who waits once more does not wait: what it used was closed, locks as well.
    """

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target)
        self._begun = threading.Event()
        self._over = threading.Event()

    def run(self) -> None:
        self._begun.set()
        try:
            super().run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """As that of a thread, and may be interrupted and called again; returns where there is no thread."""
        if self.ident is None and not self._begun.wait(_BEGINS_SECONDS):
            return
        self._over.wait(timeout)
        super().join(timeout)


def join_all(started: Iterable[WorkerThread]) -> None:
    """Waits until all have ended, and then raises what interrupted that last, such as `KeyboardInterrupt`.

    They have been told to stop, and end with the task in hand. Until then Ctrl-C waits, however often: what
    they use (files, buffers, a lock) is closed next, and a thread that goes on would write into another file
    that has got the same descriptor.
    """
    interruption: BaseException | None = None
    for thread in started:
        while True:
            try:
                thread.join()
                break
            except BaseException as error:
                if isinstance(error, Exception):
                    raise
                interruption = error
    if interruption is not None:
        raise interruption


def start_some(make: Callable[[], WorkerThread], limit: int, started: list[WorkerThread]) -> None:
    """Starts threads until there are so many, or the system gives no memory for another one.

    Args:
        make: allocates what one needs.
        limit: how many are expected.
        started: gets them, also where something is raised.

    Raises:
        MemoryBudgetError: there is not even one.
    """
    for _ in range(limit):
        try:
            thread = make()
            _require_room()
            # First, so that whoever is interrupted while it begins waits for it, too.
            started.append(thread)
            thread.start()
        # What CPython raises where pthread_create fails is a RuntimeError.
        except (MemoryError, OSError, RuntimeError) as error:
            started[:] = [item for item in started if item.ident is not None]
            if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN):
                raise
            if not started:
                raise MemoryBudgetError(
                    "the system gives no memory to work in",
                    got=error,
                    hint="raise the limit of the process (ulimit -v, a container's memory), or ask for less "
                    f"with {option('memory')} and {option('jobs', 1)}",
                ) from error
            return


def is_ending(error: MemoryBudgetError) -> bool:
    """Whether no thread began as the interpreter is ending, and waits for those that are at work."""
    # Of Python 3.12 and later: "can't create new thread at interpreter shutdown".
    return isinstance(error.__cause__, RuntimeError) and "shutdown" in str(error.__cause__)


def _require_room() -> None:
    """Raises OSError where a thread would find no memory: one that does not get to its first line is waited
    for without end (CPython's `Thread.start`)."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    mmap.mmap(-1, (_USUAL_STACK if stack == resource.RLIM_INFINITY else stack) + _BEGINNING_BYTES).close()


# How often finished work becomes durable: the most that a kill can lose. Syncing early also keeps the disk
# busy from the start instead of leaving it all to the end.
_SYNC_SECONDS = 0.5


class Syncs(Protocol):
    """What of `DataFiles` a journal takes."""

    def sync(self) -> None: ...


class Enters(Protocol):
    """What of `Work` a journal takes."""

    def enter(self, records: Iterable[Record]) -> None: ...


class JournaledThreads:
    """Threads that end at the first error of any of them; what they have finished by then is entered, too.

    Attributes:
        lock: for what they share.
        stop: set where they are to end.
        error: the first.
    """

    def __init__(self, files: Syncs, work: Enters, check: Callable[[], object] = lambda: None) -> None:
        """What is finished is durable once `files` are synced, counts if `check` raises nothing, and is then
        entered in the journal of `work`."""
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._files = files
        self._work = work
        self._check = check
        self._finished: list[Record] = []
        self._sync_failed = False

    def note(self, records: Iterable[Record]) -> None:
        """What is finished; called with the lock."""
        self._finished += records

    def thread(self, target: Callable[[], None]) -> WorkerThread:
        """One that is not started yet."""
        return WorkerThread(lambda: self.guarded(target))

    def guarded(self, target: Callable[[], None]) -> None:
        """Does it; an error ends all threads."""
        try:
            target()
        except BaseException as error:
            with self.lock:
                self.error = self.error or error
            self.stop.set()

    @contextmanager
    def working(self) -> Iterator[list[WorkerThread]]:
        """Gives the list for the threads that are started within it, and waits for them at its end.

        `error` is set then, where there was one.
        """
        workers: list[WorkerThread] = []
        syncer: list[WorkerThread] = []
        try:
            try:
                start_some(lambda: self.thread(self._syncer), 1, syncer)
            except MemoryBudgetError as error:
                if not is_ending(error):
                    raise
            yield workers
            for worker in workers:
                worker.join()
        finally:
            self.stop.set()
            try:
                join_all((*workers, *syncer))
            finally:
                # Also after an error or an interruption: what is done need not be done again. But after a
                # sync that failed the system may call bytes durable that it has dropped (fsync(2)).
                if not self._sync_failed:
                    self.guarded(self._sync)

    def _syncer(self) -> None:
        while not self.stop.wait(_SYNC_SECONDS):
            self._sync()

    def _sync(self) -> None:
        with self.lock:
            finished, self._finished = self._finished, []
        if finished:
            self._sync_failed = True
            self._files.sync()
            self._check()
            self._work.enter(finished)
            self._sync_failed = False
