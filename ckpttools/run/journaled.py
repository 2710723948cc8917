"""Threads whose work is entered in a journal, so that whoever goes on later need not do it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ckpttools.core.errors import MemoryBudgetError
from ckpttools.run.threads import WorkerThread, is_ending, join_all, start_some
from ckpttools.stores.publishing import Record

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
