"""Execute one part of a plan while other processes do the rest; see `ckpttools.stores.shares`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import SourceChangedError
from ckpttools.core.process_memory import peak_bytes
from ckpttools.core.text import plural
from ckpttools.plan.plan import Plan
from ckpttools.run.bindings import drop_voided_records, new_run_id, select_sound_records, void_run
from ckpttools.run.events import Observer, Started
from ckpttools.run.execution import Execution, worker_processes
from ckpttools.run.finished_tasks import FinishedTask, select_kept_tasks, unfinished_tasks
from ckpttools.run.source_copies import (
    NO_SOURCE_COPY,
    SourceCopy,
    SourceStates,
    repeat_if_touched,
    select_comparable,
)
from ckpttools.run.task_runner import TaskRunner
from ckpttools.stores.base import check_unchanged
from ckpttools.stores.costs import Traffic
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import DataFiles, JobInfo, Record, Sink, SupportsFileIdentity, staging_of
from ckpttools.stores.registry import count_traffic
from ckpttools.stores.shares import PartWork, Share, shared_staging


@dataclass(frozen=True, slots=True, repr=False)
class PartReceipt:
    """The result of one part of a plan.

    Attributes:
        part: Name of the part, such as "3/8".
        destination: The final location.
        tasks: Number of tasks in the part, including `tasks_resumed` of earlier runs.
        bytes_out: Output of the part in bytes, including `bytes_resumed` of earlier runs.
        seconds: Wall time, without reading the plan.
        peak_bytes: Peak resident memory; None if the system does not report it.
        traffic: Network requests by address.
        is_published: Whether the checkpoint was already published, so that nothing was checked.
    """

    part: str
    destination: Location
    tasks: int = 0
    tasks_resumed: int = 0
    bytes_out: int = 0
    bytes_resumed: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    is_published: bool = False

    def __repr__(self) -> str:
        before = f", {self.tasks_resumed} of them done before" if self.tasks_resumed else ""
        done = f"{plural(self.tasks, 'task')}, {self.bytes_out:,} bytes in {self.seconds:.2f} s{before}"
        state = "already published" if self.is_published else done
        return f"<PartReceipt {self.part} of {self.destination}: {state}>"


def execute_part(
    plan: Plan,
    first: int,
    share: Share,
    destination: Location,
    purpose: JobInfo,
    *,
    nbytes: int,
    overwrite: bool,
    sources: Callable[[], Iterable[object]],
    identify: Callable[[], SourceCopy] = lambda: NO_SOURCE_COPY,
    states: Callable[[], SourceStates] = dict,
    check_replaced: Callable[[], None] = lambda: None,
    observe: Observer = lambda event: None,
) -> PartReceipt:
    """Do the unfinished tasks of a part.

    Args:
        plan: The plan of this part's tasks.
        first: Index of the first of these tasks in the complete plan.
        share: The part.
        destination: Final location of the checkpoint.
        purpose: Description of the complete plan.
        nbytes: Bytes that all parts will write.
        overwrite: Whether an existing destination may be replaced at publication.
        sources: Returns the files that were read.
        identify: Identifies the copy of the source that this process reads.
        states: Reads the states of the source files; see `ckpttools.run.source_copies`.
        check_replaced: See `ckpttools.stores.publishing.staging_of`.
        observe: Called with every event, from several threads but one at a time.

    Raises:
        LockedError: A single run uses the destination, or another process has some of these tasks.
        PublishedError: The checkpoint is already published.
        SourceChangedError: A file has changed since the plan was made.
        CheckpointError: Any other failure. Finished work is kept, and running the same part resumes it.
    """
    started = time.monotonic()
    staging = staging_of(destination, overwrite, check_replaced)
    staging.check(purpose.plan, nbytes)
    with (
        count_traffic() as traffic,
        shared_staging(staging, destination).joined(purpose, nbytes, share) as work,
    ):
        # Records of other parts are checked, too, because this part recreates lost files at full length.
        records, has_voided = select_sound_records(work, lambda task: first <= task < first + len(plan.tasks))
        renumber = _RenumberedRecords(work, first, len(plan.tasks))
        copy = identify()
        kept_tasks = select_kept_tasks(renumber.renumber(records), plan, work.content)
        done: Sequence[FinishedTask] = select_comparable(kept_tasks, copy)
        bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
        with worker_processes(plan, work, unfinished_tasks(plan, done)) as processes:
            observe(Started(plan, len(done), bytes_done))
            if len(done) < len(plan.tasks):
                runs = _PartRuns(plan, work, renumber, observe, processes.runners, identify)
                done = _work(runs, done, copy, sources, states, has_voided=has_voided)
                bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
    return PartReceipt(
        share.name,
        destination,
        len(plan.tasks),
        len(done),
        sum(task.bytes_out for task in plan.tasks),
        bytes_done,
        time.monotonic() - started,
        peak_bytes(processes.nbytes),
        traffic(),
    )


@dataclass(frozen=True)
class _PartRuns:
    """Runs the unfinished tasks of a part. Other attributes are arguments of `execute_part`.

    Attributes:
        run_ids: ID of each run.
    """

    plan: Plan
    work: PartWork
    records: _RenumberedRecords
    observe: Observer
    processes: Sequence[TaskRunner]
    identify: Callable[[], SourceCopy]
    run_ids: list[str] = field(default_factory=list)

    def run(
        self, number: int, files: _OwnDataFiles, done: Sequence[FinishedTask], copy: SourceCopy
    ) -> Sequence[FinishedTask]:
        """Run all tasks except those in `done`, or all tasks if `number` is not 0.

        Returns the tasks not run.
        """
        if number:
            self.observe(Started(self.plan, 0, 0))
            done, copy = (), self.identify()
        self.run_ids.append(new_run_id())
        Execution(
            *(self.plan, files, self.records, self.observe),
            processes=self.processes,
            run=self.run_ids[-1],
            copy=copy,
        ).work(done)
        return done


def _work(
    runs: _PartRuns,
    done: Sequence[FinishedTask],
    copy: SourceCopy,
    sources: Callable[[], Iterable[object]],
    states: Callable[[], SourceStates],
    *,
    has_voided: bool,
) -> Sequence[FinishedTask]:
    """Do the unfinished tasks of a part; see `execute_part`.

    Returns:
        The tasks that an earlier run finished and this run did not repeat.
    """
    layout, work = runs.plan.layout, runs.work
    with closing(work.data_files(layout.files, layout.heads)) as files:
        own = _OwnDataFiles(files, work.token)
        try:
            done = repeat_if_touched(lambda number: runs.run(number, own, done, copy), states)
            check_unchanged(sources())
        except SourceChangedError:
            # The data may mix two states of the source. Records voided by this process must stay void.
            if has_voided:
                work.record(map(void_run, runs.run_ids))
            else:
                work.discard()
            raise
    return done


class _RenumberedRecords:
    """Renumbers the records of a part from 0."""

    def __init__(self, work: PartWork, first: int, count: int) -> None:
        self._work, self._first, self._count = work, first, count

    def renumber(self, records: Iterable[Record]) -> Iterator[Record]:
        """Iterate over the records of the part, renumbered from 0."""
        for number, *rest in records:
            if isinstance(number, int) and 0 <= number - self._first < self._count:
                yield [number - self._first, *rest]

    def record(self, records: Iterable[Record]) -> None:
        self._work.record([[self._first + int(str(number)), *rest] for number, *rest in records])


class _OwnDataFiles:
    """Data files in which this process appends only to its own files."""

    def __init__(self, files: DataFiles, token: str) -> None:
        self._files, self._token = files, token

    def write_passes(self, group: int) -> Generator[Sink]:
        with closing(self._files.write_passes(group)) as sinks:
            for sink in sinks:
                yield _OwnSink(sink, self._token)

    def extend(self, name: str, end: int) -> None:
        """Do nothing: other processes append to other files."""

    def sync(self) -> None:
        self._files.sync()


class _OwnSink:
    def __init__(self, sink: Sink, token: str) -> None:
        self._sink, self._token = sink, token
        self.write, self.write_whole = sink.write, sink.write_whole
        self.is_dry_pass = sink.is_dry_pass
        if isinstance(sink, SupportsFileIdentity):
            self.identity = sink.identity

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        return self._sink.append(f"{name}-{self._token}", limit, data)


def finished_tasks(records: Iterable[Record], count: int) -> set[int]:
    """Return the task indexes in the records that are below `count`."""
    heads: Iterable[Sequence[object]] = drop_voided_records(records)
    return {head[0] for head in heads if head and isinstance(head[0], int) and 0 <= head[0] < count}
