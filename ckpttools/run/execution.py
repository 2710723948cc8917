"""Run the tasks of a plan in a few threads or processes, each with its own buffers."""

from __future__ import annotations

import gc
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ckpttools.array.scratch import add_counts
from ckpttools.array.tree import Path, keystr
from ckpttools.core.errors import MemoryBudgetError, with_all_damage
from ckpttools.core.process_memory import thread_count
from ckpttools.core.region import Shape
from ckpttools.formats.base import Extents
from ckpttools.formats.placement import ChunkFiles, Range
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.run.bindings import new_run_id
from ckpttools.run.events import Observer, TaskDone, Watch
from ckpttools.run.finished_tasks import FinishedTask
from ckpttools.run.source_copies import NO_SOURCE_COPY, SourceCopy
from ckpttools.run.task_runner import TaskRunner, ThreadRunner, ignore_output
from ckpttools.run.threads import JournaledThreads, RecordsTasks, WorkerThread, is_ending, start_threads
from ckpttools.stores.base import File, check_unchanged
from ckpttools.stores.publishing import Sink, SupportsForkedWriters

if TYPE_CHECKING:
    from ckpttools.run.worker_processes import ProcessRunner

# Number of files that are checked at each sync, which takes 4 ms. If a plan has more files, they are checked
# only at the end.
_MAX_CHECKED_FILES = 1000

# Minimum output of computed tasks. With processes, means of 46 MiB take 0.10 s instead of 0.09, of 152 MiB
# 0.21 s instead of 0.23, and of 304 MiB 0.35 s instead of 0.43.
_MIN_PROCESS_BYTES = 256 << 20
# Private memory of a process in addition to its buffers.
_PROCESS_BYTES = 24 << 20
# Private memory per task: updating reference counts copies the pages of the plan. With 100,000 tasks, two
# processes copied 190 MiB each, and four processes 170 MiB each.
_TASK_BYTES = 2 << 10

_Group: TypeAlias = tuple[int, Sequence[int]]
"""Index of a group, and the indexes of its tasks."""


class WorkerPool:
    """The worker processes of one run.

    Attributes:
        runners: One worker per process; empty if threads do the tasks.
        nbytes: Private memory of all processes, set after they have ended.
    """

    def __init__(self) -> None:
        self.runners: list[ProcessRunner] = []
        self.nbytes = 0

    def close(self) -> None:
        """End all processes together, since ending each one takes 20 ms."""
        for doer in self.runners:
            doer.dismiss()
        self.nbytes += sum(doer.close() for doer in self.runners)


@contextmanager
def worker_processes(plan: Plan, work: object, tasks: Iterable[Task]) -> Iterator[WorkerPool]:
    """Start one process per planned worker, or none if threads are better.

    Args:
        plan: The plan.
        work: The destination; see `ckpttools.stores.publishing.SupportsForkedWriters`.
        tasks: The tasks to run.
    """
    result = WorkerPool()
    try:
        if isinstance(work, SupportsForkedWriters) and _is_worth_it(plan, tasks) and _may_fork():
            from ckpttools.run.worker_processes import fork_workers

            # A fork copies memory that the garbage collector touches.
            gc.freeze()
            try:
                fork_workers(result, plan, lambda: work.files_of_fork(plan.layout.files))
            finally:
                gc.unfreeze()
        yield result
    finally:
        result.close()


def _may_fork() -> bool:
    """Return whether a fork is safe and permitted.

    No other thread may hold a lock, and `multiprocessing` does not let workers of its pools fork. Without
    /proc, as on macOS, where system libraries do not survive a fork, threads cannot be counted.
    """
    from multiprocessing import current_process

    return thread_count() == 1 and not current_process().daemon


def _is_worth_it(plan: Plan, tasks: Iterable[Task]) -> bool:
    """Return whether much output is computed from local sources and all locations are known in advance."""
    arrays = plan.tree.arrays
    return (
        plan.jobs > 1
        and sum(task.bytes_out for task in tasks if arrays[task.path].is_computed) >= _MIN_PROCESS_BYTES
        and plan.projected_peak + plan.jobs * (_PROCESS_BYTES + len(plan.tasks) * _TASK_BYTES) <= plan.memory
        and all(isinstance(source, File) and source.price == 1 for source in plan.sources)
        and all(
            placement.codec is None and not isinstance(placement.home, ChunkFiles)
            for placement in plan.layout.placements.values()
        )
    )


class TaskFiles(Protocol):
    """The methods of `DataFiles` that an execution needs."""

    def write_passes(self, group: int) -> Generator[Sink]: ...
    def extend(self, name: str, end: int) -> None: ...
    def sync(self) -> None: ...


class Execution:
    """The mutable state of one run: unfinished tasks, finished tasks and the first error."""

    def __init__(
        self,
        plan: Plan,
        files: TaskFiles,
        work: RecordsTasks,
        observe: Observer,
        watch: Watch = ignore_output,
        processes: Sequence[TaskRunner] = (),
        run: str = "",
        copy: SourceCopy = NO_SOURCE_COPY,
    ) -> None:
        self._plan = plan
        self._files = files
        self._observe = observe
        self._watch = watch
        self._processes = processes
        self._extents: dict[tuple[Path, Shape], Range] = {}
        self._counts: dict[str, dict[str, float]] = {}
        self._run = run or new_run_id()
        self._copy = copy
        # Network stores pin the version in each request, and checking would take a request per file.
        near = [source for source in plan.sources if isinstance(source, File) and source.price == 1]
        near = near if len(near) <= _MAX_CHECKED_FILES else []
        # Data of a changed source must not be recorded, even if this process is killed before the final
        # check.
        self._threads = JournaledThreads(files, work, partial(check_unchanged, near))

    def work(self, done: Collection[FinishedTask]) -> Extents:
        """Do all tasks except those in `done`. Raises the first error after all threads have ended.

        Returns:
            The locations of all encoded chunks, including those of `done`.
        """
        for entry in done:
            self._note(entry)
        finished = {entry.task for entry in done}
        groups = enumerate(self._plan.groups)
        todo = iter([(number, tasks) for number, tasks in groups if not finished.issuperset(tasks)])
        with self._threads.running_threads() as workers:
            try:
                runners = iter(self._processes)
                limit = len(self._processes) or self._plan.jobs
                start_threads(lambda: self._start(todo, next(runners, None)), limit, workers)
            except MemoryBudgetError as error:
                if not is_ending(error):
                    raise
                self._threads.run_guarded(lambda: self._worker(todo, ThreadRunner(self._plan, self._watch)))
        if self._threads.error is not None:
            raise with_all_damage(self._threads.error, self._plan.tree.arrays.values())
        return self._extents

    @property
    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return the counters of each array that has any, in the order of the tree."""
        paths = (keystr(path) for path in self._plan.tree.arrays)
        return {path: dict(self._counts[path]) for path in paths if path in self._counts}

    def _start(self, todo: Iterator[_Group], process: TaskRunner | None) -> WorkerThread:
        doer = process or ThreadRunner(self._plan, self._watch)
        return self._threads.thread(lambda: self._worker(todo, doer))

    def _worker(self, todo: Iterator[_Group], doer: TaskRunner) -> None:
        while not self._threads.stop.is_set():
            with self._threads.lock:
                group = next(todo, None)
            if group is None:
                return
            entries: list[FinishedTask] = []
            with closing(self._files.write_passes(group[0])) as sinks:
                for sink in sinks:
                    entries = list(self._entries(group, sink, doer))
                    if len(entries) < len(group[1]):
                        return
            with self._threads.lock:
                for entry in entries:
                    self._note(entry)
                self._threads.note(
                    entry.to_record(self._run, self._copy.identity, self._copy.process) for entry in entries
                )
                self._report_task(group[1][-1])

    def _entries(self, group: _Group, sink: Sink, doer: TaskRunner) -> Iterator[FinishedTask]:
        """Do the tasks of a group until another thread fails.

        The caller reports the last task, after it has recorded the group.
        """
        for number in group[1]:
            if self._threads.stop.is_set():
                return
            yield doer(number, sink)
            if not sink.is_dry_pass and number != group[1][-1]:
                with self._threads.lock:
                    self._report_task(number)

    def _report_task(self, number: int) -> None:
        task = self._plan.tasks[number]
        self._observe(TaskDone(task.bytes_in, task.bytes_out))

    def _note(self, entry: FinishedTask) -> None:
        path = self._plan.tasks[entry.task].path
        if entry.counts:
            add_counts(self._counts.setdefault(keystr(path), {}), entry.counts)
        self._extents.update({(path, index): location for index, location in entry.chunks.items()})
        for location in entry.chunks.values():
            self._files.extend(location.file, location.offset + location.nbytes)
