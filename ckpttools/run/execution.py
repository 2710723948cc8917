"""Doing the tasks of a plan: a few threads, each with buffers of its own, or a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol, TypeAlias

from ckpttools.array.tree import Path, keystr
from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.region import Shape
from ckpttools.core.tally import add
from ckpttools.formats.base import Extents
from ckpttools.formats.placement import Range
from ckpttools.plan.plan import Plan
from ckpttools.quantized.damaged_scales import naming_all
from ckpttools.run.doing import DoesTasks, InThread, see_nothing
from ckpttools.run.entries import FinishedTask
from ckpttools.run.events import Observer, TaskDone, Watch
from ckpttools.run.threads import WorkerThread, is_ending, join_all, start_some
from ckpttools.stores.base import File
from ckpttools.stores.publishing import Record, Sink
from ckpttools.stores.unchanged import check_unchanged

# How often finished tasks become durable: the most work that a kill can lose. Syncing early also keeps
# the disk busy from the start instead of leaving it all to the end.
_SYNC_SECONDS = 0.5
# Files that are looked at each time, in 4 ms; whether more have changed is asked at the end.
_MOST_LOOKED_AT = 1000

_Group: TypeAlias = tuple[int, Sequence[int]]
"""The number of a group, and those of its tasks."""


class TaskFiles(Protocol):
    """What of `DataFiles` doing tasks takes."""

    def passes(self, group: int) -> Generator[Sink]: ...
    def extend(self, name: str, end: int) -> None: ...
    def sync(self) -> None: ...


class Enters(Protocol):
    """What of `Work` doing tasks takes."""

    def enter(self, records: Iterable[Record]) -> None: ...


class Execution:
    """The moving state of one run: the tasks still to be taken, those finished, the first error."""

    def __init__(
        self,
        plan: Plan,
        files: TaskFiles,
        work: Enters,
        observe: Observer,
        watch: Watch = see_nothing,
        processes: Sequence[DoesTasks] = (),
    ) -> None:
        self._plan = plan
        self._files = files
        self._work = work
        self._observe = observe
        self._watch = watch
        self._processes = processes
        self._lock = threading.Lock()
        self._finished: list[FinishedTask] = []
        self._extents: dict[tuple[Path, Shape], Range] = {}
        self._counts: dict[str, dict[str, float]] = {}
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._sync_failed = False
        # Elsewhere every answer says of which state it is, and looking takes a request for each file.
        near = [each for each in plan.sources if isinstance(each, File) and each.price == 1]
        self._near = near if len(near) <= _MOST_LOOKED_AT else []

    def work(self, done: Collection[FinishedTask]) -> Extents:
        """Does all tasks but those in `done`; raises the first error after every thread has ended.

        Returns:
            Where all encoded chunks went, those of `done` as well.
        """
        for entry in done:
            self._note(entry)
        finished = {entry.task for entry in done}
        groups = enumerate(self._plan.groups)
        todo = iter([(number, tasks) for number, tasks in groups if not finished.issuperset(tasks)])
        workers: list[WorkerThread] = []
        syncer: list[WorkerThread] = []
        try:
            try:
                start_some(lambda: self._thread(self._syncer), 1, syncer)
                doers = iter(self._processes)
                most = len(self._processes) or self._plan.jobs
                start_some(lambda: self._start(todo, next(doers, None)), most, workers)
            except MemoryBudgetError as error:
                if not is_ending(error):
                    raise
                self._work_here(todo)
            for worker in workers:
                worker.join()
        finally:
            self._stop.set()
            try:
                join_all((*workers, *syncer))
            finally:
                # Also after an error or an interruption: what is done need not be done again.
                self._sync_last()
        self._raise()
        return self._extents

    @property
    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """What was counted, for each array of which something was, in the order of the tree."""
        paths = (keystr(path) for path in self._plan.tree.arrays)
        return {path: dict(self._counts[path]) for path in paths if path in self._counts}

    def _thread(self, target: Callable[[], None]) -> WorkerThread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                self._fail(error)

        return WorkerThread(guarded)

    def _sync_last(self) -> None:
        # After a sync that failed the system may call bytes durable that it has dropped (fsync(2)).
        if not self._sync_failed:
            try:
                self._sync()
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise naming_all(self._error, self._plan.tree.arrays.values())

    def _start(self, todo: Iterator[_Group], process: DoesTasks | None) -> WorkerThread:
        doer = process or InThread(self._plan, self._watch)
        return self._thread(lambda: self._worker(todo, doer))

    def _work_here(self, todo: Iterator[_Group]) -> None:
        """Does all in this thread."""
        try:
            self._worker(todo, InThread(self._plan, self._watch))
        except BaseException as error:
            self._fail(error)

    def _worker(self, todo: Iterator[_Group], doer: DoesTasks) -> None:
        while not self._stop.is_set():
            with self._lock:
                group = next(todo, None)
            if group is None:
                return
            entries: list[FinishedTask] = []
            with closing(self._files.passes(group[0])) as sinks:
                for sink in sinks:
                    entries = list(self._entries(group, sink, doer))
                    if len(entries) < len(group[1]):
                        return
            with self._lock:
                for entry in entries:
                    self._note(entry)
                self._finished += entries
                self._tell(group[1][-1])

    def _entries(self, group: _Group, sink: Sink, doer: DoesTasks) -> Iterator[FinishedTask]:
        """Does the tasks of a group, as long as nothing has gone wrong elsewhere.

        What is told of the last is left to whoever notes that all are done.
        """
        for number in group[1]:
            if self._stop.is_set():
                return
            yield doer(number, sink)
            if not sink.is_rehearsal and number != group[1][-1]:
                with self._lock:
                    self._tell(number)

    def _tell(self, number: int) -> None:
        task = self._plan.tasks[number]
        self._observe(TaskDone(task.bytes_in, task.bytes_out))

    def _note(self, entry: FinishedTask) -> None:
        path = self._plan.tasks[entry.task].path
        if entry.counts:
            add(self._counts.setdefault(keystr(path), {}), entry.counts)
        self._extents.update({(path, index): place for index, place in entry.chunks.items()})
        for place in entry.chunks.values():
            self._files.extend(place.file, place.offset + place.nbytes)

    def _syncer(self) -> None:
        while not self._stop.wait(_SYNC_SECONDS):
            self._sync()

    def _sync(self) -> None:
        """Makes the finished tasks durable and enters them in the journal."""
        with self._lock:
            finished, self._finished = self._finished, []
        if finished:
            self._sync_failed = True
            self._files.sync()
            # What was read of another state may not count if this process is killed before all is read.
            check_unchanged(self._near)
            self._work.enter([entry.to_record() for entry in finished])
            self._sync_failed = False
