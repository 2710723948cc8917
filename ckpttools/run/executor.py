"""Doing what a plan says: a few threads, each with buffers of its own that it uses again and again."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from ckpttools.array.fingerprint import Identify, identity
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path, spelled
from ckpttools.core.errors import MemoryBudgetError, SourceChangedError, UsageError
from ckpttools.core.region import Region, Shape
from ckpttools.core.tally import add
from ckpttools.formats.base import Extents, Writer
from ckpttools.formats.placement import Range
from ckpttools.plan.plan import Plan
from ckpttools.quantized.errors import errors_of, without_errors
from ckpttools.run.apart import check_apart, check_unread
from ckpttools.run.entries import FinishedTask, kept, unfinished
from ckpttools.run.events import Observer, Publishing, Receipt, Started, TaskDone, Watch
from ckpttools.run.linking import link_files
from ckpttools.run.making import make
from ckpttools.run.memory import peak_bytes
from ckpttools.run.threads import is_ending, start_some
from ckpttools.stores.base import File
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import Purpose, Record, Sink, Staging, TellsPublished, Work, staging_of
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.traffic import counted
from ckpttools.stores.unchanged import check_unchanged

# How often finished tasks become durable: the most work that a kill can lose. Syncing early also keeps
# the disk busy from the start instead of leaving it all to the end.
_SYNC_SECONDS = 0.5
# Files that are looked at each time, in 4 ms; whether more have changed is asked at the end.
_MOST_LOOKED_AT = 1000


def execute(
    plan: Plan,
    writer: Writer,
    destination: Where,
    *,
    overwrite: bool = False,
    check_replaced: Callable[[Place], None] = lambda destination: None,
    observe: Observer = lambda event: None,
    watch: Watch = lambda path, region, values: None,
    conclude: Callable[[], None] = lambda: None,
    command: str = "",
    planned: str = "",
) -> Receipt:
    """Makes the checkpoint that the plan describes, or goes on where an earlier run stopped.

    Args:
        plan: what to do.
        writer: the one it was planned with.
        destination: final name; it appears only when everything is written.
        overwrite: whether what has that name, or an unfinished other conversion to it, may be replaced.
        check_replaced: called with the destination where something is there; raises `DestinationExistsError`
            if it may not be replaced by what will be written, whatever the user says.
        observe: called with every event, from several threads but never at once.
        watch: sees everything that is written; not what an earlier run wrote or what is only referenced.
        conclude: called when the checkpoint has its name, before the journal goes: what it raises leaves the
            same command something to go on with.
        command: the command line, for whoever finds the work unfinished; "" where there is none.
        planned: fingerprint under which others have done all the tasks, so that only the last steps are left;
            "" to do the tasks, too.

    Raises:
        UnfinishedError: `planned`, and tasks are missing.
        CheckpointError: of any kind; the destination is then as it was, and `<destination>.partial` keeps
            what was done.
    """
    started = time.monotonic()
    place = parse(destination)
    staging = staging_of(place, overwrite, partial(check_replaced, place))
    own = _checked(plan, writer, place, staging, planned)
    purpose = Purpose(own, source_of(plan), command, str(parse(".").absolute()) if command else "")
    with counted() as traffic, staging.opened(purpose, plan.layout.nbytes) as work:
        if work.is_complete:
            done, unlinked = _Done(len(plan.tasks), plan.bytes_out), 0
            observe(Started(plan, done.tasks, done.bytes_out))
        else:
            done, unlinked = _made(plan, writer, work, observe, watch, only_last_steps=bool(planned))
            work.publish()
        conclude()
        work.conclude()
        published = work.published if isinstance(work, TellsPublished) else None
    receipt = Receipt(
        destination=place,
        **plan.totals,
        tasks_resumed=done.tasks,
        bytes_resumed=done.bytes_out,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes(),
        bytes_referenced=plan.bytes_referenced,
        bytes_dead=plan.bytes_dead,
        bytes_unlinked=unlinked,
        source=purpose.source,
        counts=without_errors(done.counts),
        errors=errors_of(done.counts),
        traffic=traffic(),
        published=published,
    )
    observe(receipt)
    return receipt


def check(
    plan: Plan,
    writer: Writer,
    destination: Where,
    overwrite: bool,
    check_replaced: Callable[[Place], None],
    planned: str = "",
) -> None:
    """Raises what stops `execute` before it writes anything; arguments as there."""
    place = parse(destination)
    _checked(plan, writer, place, staging_of(place, overwrite, partial(check_replaced, place)), planned)


def _checked(plan: Plan, writer: Writer, destination: Place, staging: Staging, planned: str = "") -> str:
    """The fingerprint of a run that nothing stops before it writes anything."""
    own, source = planned or fingerprint(plan, writer), plan.tree.metadata.place
    if source:
        check_apart(source, destination)
    if destination.store.streams and plan.streams is None:
        raise UsageError(
            "the plan was made for a place where files are written at any offset",
            place=destination,
            wanted="a plan for this place",
            hint="also give the destination when the plan is made",
        )
    check_unread(plan.sources, staging.taken)
    staging.check(own, plan.layout.nbytes)
    return own


def source_of(plan: Plan) -> str:
    """What is converted, for messages: where it was opened, or where all its files lie."""
    if plan.tree.metadata.place:
        return str(parse(plan.tree.metadata.place).absolute())
    directories = {parse(source.path).absolute().parent for source in plan.sources}
    common = min(directories, default=None)
    while common is not None and not all(common in (each, *each.parents) for each in directories):
        common = None if common == common.parent else common.parent
    return "" if common is None else str(common)


@dataclass(frozen=True, slots=True)
class _Done:
    """What of a run was done before it: tasks and their bytes; and what was counted in all of it."""

    tasks: int
    bytes_out: int
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def fingerprint(
    plan: Plan,
    writer: Writer,
    identify: Identify = identity,
    said: Callable[[str], str] = lambda text: text,
) -> str:
    """The same for two runs that make the same files of the same sources by the same tasks.

    Args:
        plan, writer: the run.
        identify: says which file a source is.
        said: a text that may name places, as it is to count.
    """
    metadata = plan.tree.metadata
    leaves = [(path, leaf) for path, leaf in plan.tree.items() if path not in plan.tree.arrays]
    marks = sorted(map(repr, metadata.scalars)), metadata.key_impls
    rest = writer, leaves, metadata.step, metadata.item, marks
    return hashlib.sha256(f"{plan.fingerprint(identify)} {said(repr(rest))}".encode()).hexdigest()


def _made(
    plan: Plan, writer: Writer, work: Work, observe: Observer, watch: Watch, *, only_last_steps: bool
) -> tuple[_Done, int]:
    """Makes the content, all but its name.

    Returns:
        What an earlier run had done, and the bytes that were copied where links were refused.
    """
    done = kept(work.records, plan, work.content)
    if only_last_steps and len(done) < len(plan.tasks):
        missing = sorted({*range(len(plan.tasks))} - {entry.task for entry in done})
        raise unfinished(missing, len(plan.tasks), work.content)
    bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
    observe(Started(plan, len(done), bytes_done))
    unlinked = link_files(plan.layout, work.content)
    with closing(work.data_files(plan.layout.files, plan.layout.heads)) as files:
        run = Execution(plan, files, work, observe, watch)
        try:
            extents = run.work(done)
            observe(Publishing())
            check_unchanged(plan.sources)
            files.write_heads()
            writer.finish(work.content, plan.tree, plan.layout, extents)
        except SourceChangedError:
            # What was read, or is copied at the end, is not what was planned. One that is only away for now,
            # with the disk that it is on, may be the same when it comes back.
            work.discard()
            raise
    return _Done(len(done), bytes_done, run.counts), unlinked


_Group: TypeAlias = tuple[int, Sequence[int]]
"""The number of a group, and those of its tasks."""


def _see_nothing(path: Path, region: Region, values: np.ndarray) -> None:
    """Watches what is only rehearsed."""


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
        watch: Watch = lambda path, region, values: None,
    ) -> None:
        self._plan = plan
        self._files = files
        self._work = work
        self._observe = observe
        self._watch = watch
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

    def work(self, done: Iterable[FinishedTask]) -> Extents:
        """Does all tasks but those in `done`; raises the first error after every thread has ended.

        Returns:
            Where all encoded chunks went, those of `done` as well.
        """
        for entry in done:
            self._note(entry)
        finished = {entry.task for entry in done}
        groups = enumerate(self._plan.groups)
        todo = iter([(number, tasks) for number, tasks in groups if not finished.issuperset(tasks)])
        workers: list[threading.Thread] = []
        syncer: list[threading.Thread] = []
        try:
            try:
                start_some(lambda: self._thread(self._syncer), 1, syncer)
                start_some(lambda: self._start(todo), self._plan.jobs, workers)
            except MemoryBudgetError as error:
                if not is_ending(error):
                    raise
                self._work_here(todo)
            for worker in workers:
                worker.join()
        finally:
            self._stop.set()
            for thread in (*workers, *syncer):
                thread.join()
            # Also after an error or an interruption: what is done need not be done again.
            self._sync_last()
        self._raise()
        return self._extents

    @property
    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """What was counted, for each array of which something was, in the order of the tree."""
        paths = (spelled(path) for path in self._plan.tree.arrays)
        return {path: dict(self._counts[path]) for path in paths if path in self._counts}

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                self._fail(error)

        return threading.Thread(target=guarded)

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
            raise self._error

    def _start(self, todo: Iterator[_Group]) -> threading.Thread:
        scratch, buffer = Scratch(self._plan.scratch_bytes), Scratch(self._plan.buffer_bytes)
        return self._thread(lambda: self._worker(todo, scratch, buffer))

    def _work_here(self, todo: Iterator[_Group]) -> None:
        """Does all in this thread."""
        try:
            self._worker(todo, Scratch(self._plan.scratch_bytes), Scratch(self._plan.buffer_bytes))
        except BaseException as error:
            self._fail(error)

    def _worker(self, todo: Iterator[_Group], scratch: Scratch, buffer: Scratch) -> None:
        while not self._stop.is_set():
            with self._lock:
                group = next(todo, None)
            if group is None:
                return
            entries: list[FinishedTask] = []
            with closing(self._files.passes(group[0])) as sinks:
                for sink in sinks:
                    entries = list(self._entries(group, sink, scratch, buffer))
                    if len(entries) < len(group[1]):
                        return
            with self._lock:
                for entry in entries:
                    self._note(entry)
                self._finished += entries
                self._tell(group[1][-1])

    def _entries(
        self, group: _Group, sink: Sink, scratch: Scratch, buffer: Scratch
    ) -> Iterator[FinishedTask]:
        """Does the tasks of a group, as long as nothing has gone wrong elsewhere.

        What is told of the last is left to whoever notes that all are done.
        """
        for number in group[1]:
            if self._stop.is_set():
                return
            task = self._plan.tasks[number]
            watch = _see_nothing if sink.is_rehearsal else self._watch
            chunks = make(self._plan, task, sink, buffer, scratch, watch)
            yield FinishedTask(number, chunks, scratch.take_counts())
            if not sink.is_rehearsal and number != group[1][-1]:
                with self._lock:
                    self._tell(number)

    def _tell(self, number: int) -> None:
        task = self._plan.tasks[number]
        self._observe(TaskDone(task.bytes_in, task.bytes_out))

    def _note(self, entry: FinishedTask) -> None:
        path = self._plan.tasks[entry.task].path
        if entry.counts:
            add(self._counts.setdefault(spelled(path), {}), entry.counts)
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
