"""Worker threads: as many as the system permits, interruptible, with a journal of finished work."""

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

# Memory that a thread needs to start, in addition to its stack.
_BEGINNING_BYTES = 8 << 20
_DEFAULT_STACK_BYTES = 8 << 20
# A thread whose start was interrupted counts as not started after this time. Starting takes a millisecond.
_BEGINS_SECONDS = 0.5


class WorkerThread(threading.Thread):
    """A thread whose `join` can be repeated after an interruption.

    If an exception such as that of Ctrl-C interrupts `Thread.join`, CPython 3.10 to 3.12 consider the thread
    ended, and a second `join` returns at once. Files and locks would then be closed while the thread still
    uses them.
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
        """Wait until the thread ends. Returns at once if it was not started.

        The call can be interrupted and repeated.
        """
        if self.ident is None and not self._begun.wait(_BEGINS_SECONDS):
            return
        self._over.wait(timeout)
        super().join(timeout)


def join_threads(started: Iterable[WorkerThread]) -> None:
    """Wait until all threads have ended, then raise the last interruption, such as `KeyboardInterrupt`.

    The threads have already been asked to stop and are finishing their current tasks. Until then, repeated
    Ctrl-C has no effect: their files, buffers and locks are closed next, and a running thread would write to
    another file that reuses the descriptor.
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


def start_threads(make: Callable[[], WorkerThread], limit: int, started: list[WorkerThread]) -> None:
    """Start threads until the limit is reached or the system has no memory for another one.

    Args:
        make: Creates a thread and allocates its memory.
        limit: Number of threads.
        started: Receives the threads, even if an error is raised.

    Raises:
        MemoryBudgetError: Not even one thread can be started.
    """
    for _ in range(limit):
        try:
            thread = make()
            _require_room()
            # Append the thread first, so that it is joined even if its start is interrupted.
            started.append(thread)
            thread.start()
        # CPython raises RuntimeError if pthread_create fails.
        except (MemoryError, OSError, RuntimeError) as error:
            started[:] = [item for item in started if item.ident is not None]
            if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN):
                raise
            if not started:
                raise MemoryBudgetError(
                    "the system has no memory for a worker thread",
                    got=error,
                    hint="raise the limit of the process (ulimit -v, a container's memory), or use less "
                    f"with {option('memory')} and {option('jobs', 1)}",
                ) from error
            return


def is_ending(error: MemoryBudgetError) -> bool:
    """Return whether a thread failed to start because the interpreter is shutting down."""
    # In Python 3.12 and later, the message is "can't create new thread at interpreter shutdown".
    return isinstance(error.__cause__, RuntimeError) and "shutdown" in str(error.__cause__)


def _require_room() -> None:
    """Raise OSError if there is not enough memory for a new thread.

    CPython's `Thread.start` waits forever for a thread that does not reach its first line.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    mmap.mmap(
        -1, (_DEFAULT_STACK_BYTES if stack == resource.RLIM_INFINITY else stack) + _BEGINNING_BYTES
    ).close()


# Interval between syncs: a kill loses at most the work of this time. Early syncs also keep the disk busy from
# the start instead of leaving everything to the end.
_SYNC_SECONDS = 0.5


class SyncsFiles(Protocol):
    """The method of `DataFiles` that a journal needs."""

    def sync(self) -> None: ...


class RecordsTasks(Protocol):
    """The method of `Work` that a journal needs."""

    def record(self, records: Iterable[Record]) -> None: ...


class JournaledThreads:
    """Threads that stop at the first error in any of them. Finished work is recorded even then.

    Attributes:
        lock: Guards shared state.
        stop: Set when the threads must end.
        error: The first error.
    """

    def __init__(
        self, files: SyncsFiles, work: RecordsTasks, check: Callable[[], object] = lambda: None
    ) -> None:
        """Record finished work in the journal of `work` after `files` are synced and `check` passes."""
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._files = files
        self._work = work
        self._check = check
        self._finished: list[Record] = []
        self._sync_failed = False

    def note(self, records: Iterable[Record]) -> None:
        """Add finished work. The caller holds the lock."""
        self._finished += records

    def thread(self, target: Callable[[], None]) -> WorkerThread:
        """Create a thread without starting it."""
        return WorkerThread(lambda: self.run_guarded(target))

    def run_guarded(self, target: Callable[[], None]) -> None:
        """Run a function. An error stops all threads."""
        try:
            target()
        except BaseException as error:
            with self.lock:
                self.error = self.error or error
            self.stop.set()

    @contextmanager
    def running_threads(self) -> Iterator[list[WorkerThread]]:
        """Yield a list for the started threads, and wait for them at the end.

        Afterwards, `error` is set if there was one.
        """
        workers: list[WorkerThread] = []
        syncer: list[WorkerThread] = []
        try:
            try:
                start_threads(lambda: self.thread(self._syncer), 1, syncer)
            except MemoryBudgetError as error:
                if not is_ending(error):
                    raise
            yield workers
            for worker in workers:
                worker.join()
        finally:
            self.stop.set()
            try:
                join_threads((*workers, *syncer))
            finally:
                # Record finished work even after an error or an interruption. But after a failed sync, the
                # system may report dropped bytes as durable (fsync(2)).
                if not self._sync_failed:
                    self.run_guarded(self._sync)

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
            self._work.record(finished)
            self._sync_failed = False
