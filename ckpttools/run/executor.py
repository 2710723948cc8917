"""Doing what a plan says: a few threads, each with buffers of its own that it uses again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from ckpttools.formats.base import Writer
from ckpttools.ir.scratch import Scratch
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.run.data_files import DataFiles
from ckpttools.run.events import Observer, Publishing, Receipt, Started, TaskDone
from ckpttools.run.journal import Journal
from ckpttools.run.memory import peak_bytes
from ckpttools.run.staging import Staging, write_error

# How often finished tasks become durable: the most work that a kill can lose. Syncing early also keeps
# the disk busy from the start instead of leaving it all to the end.
_SYNC_SECONDS = 0.5


def execute(
    plan: Plan,
    writer: Writer,
    destination: Path,
    *,
    overwrite: bool = False,
    observe: Observer = lambda event: None,
) -> Receipt:
    """Makes the checkpoint that the plan describes, or goes on where an earlier run stopped.

    Args:
        plan: what to do.
        writer: the one it was planned with.
        destination: final name; it appears only when everything is written.
        overwrite: whether what has that name, or an unfinished other conversion to it, may be replaced.
        observe: called with every event, from several threads but never at once.

    Raises:
        CheckpointError: of any kind; the destination is then as it was, and `<destination>.partial` keeps
            what was done.
    """
    started = time.monotonic()
    staging = Staging(destination, overwrite)
    staging.check(sum(plan.layout.files.values()))
    staging.create()
    with ExitStack() as stack:
        journal = _journal(staging, plan.fingerprint())
        stack.callback(journal.close)
        done = frozenset(journal.done)
        bytes_done = sum(plan.tasks[number].bytes_out for number in done)
        observe(Started(plan, len(done), bytes_done))
        files = stack.enter_context(closing(DataFiles(staging.directory, plan.layout.files)))
        _Run(plan, files, journal, observe).work(done)
        observe(Publishing())
        _finish(plan, writer, staging, journal)
    receipt = Receipt(
        destination=destination,
        arrays=len(plan.tree.arrays),
        tasks=len(plan.tasks),
        tasks_resumed=len(done),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        bytes_resumed=bytes_done,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes(),
    )
    observe(receipt)
    return receipt


def _journal(staging: Staging, fingerprint: str) -> Journal:
    """The journal of this plan; that of another one is discarded where overwriting is allowed."""
    from ckpttools.errors import UsageError

    try:
        return Journal(staging.directory, fingerprint)
    except UsageError:
        if not staging.overwrite:
            raise
        staging.discard()
        staging.create()
        return Journal(staging.directory, fingerprint)


def _finish(plan: Plan, writer: Writer, staging: Staging, journal: Journal) -> None:
    try:
        writer.finish(staging.directory, plan.tree, plan.layout)
        journal.remove()
    except OSError as error:
        raise write_error(staging.directory, error) from error
    staging.publish()


class _Run:
    """The moving state of one run: the tasks still to be taken, those finished, the first error."""

    def __init__(self, plan: Plan, files: DataFiles, journal: Journal, observe: Observer) -> None:
        self._plan = plan
        self._files = files
        self._journal = journal
        self._observe = observe
        self._lock = threading.Lock()
        self._finished: list[int] = []
        self._error: BaseException | None = None
        self._stop = threading.Event()

    def work(self, done: frozenset[int]) -> None:
        """Does all tasks but those in `done`; raises the first error after every thread has ended."""
        todo = iter([number for number in range(len(self._plan.tasks)) if number not in done])
        workers = [self._thread(lambda: self._worker(todo)) for _ in range(self._plan.jobs)]
        syncer = self._thread(self._syncer)
        try:
            for worker in workers:
                worker.join()
        finally:
            self._stop.set()
            for thread in (*workers, syncer):
                thread.join()
            # Also after an error: what is done need not be done again.
            self._sync()
        self._raise()

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                self._fail(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _worker(self, todo: Iterator[int]) -> None:
        scratch = Scratch(self._plan.scratch_bytes)
        buffer = Scratch(self._plan.buffer_bytes)
        while not self._stop.is_set():
            with self._lock:
                number = next(todo, None)
            if number is None:
                return
            task = self._plan.tasks[number]
            self._do(task, buffer, scratch)
            with self._lock:
                self._finished.append(number)
                self._observe(TaskDone(task.bytes_in, task.bytes_out))

    def _do(self, task: Task, buffer: Scratch, scratch: Scratch) -> None:
        array = self._plan.tree.arrays[task.path]
        placement = self._plan.layout.placements[task.path]
        ordered = [task.region.shape[axis] for axis in placement.order]
        with buffer.take(ordered, array.dtype.carrier) as memory:
            array.read_into(task.region, memory.transpose(np.argsort(placement.order)), scratch)
            data = memory.reshape(-1).view(np.uint8).data
            address = memory.ctypes.data
            for run in placement.runs(task.region):
                part = data[run.position : run.position + run.nbytes]
                self._files.write(placement.file, run.offset, part, address + run.position)

    def _syncer(self) -> None:
        while not self._stop.wait(_SYNC_SECONDS):
            self._sync()

    def _sync(self) -> None:
        """Makes the finished tasks durable and enters them in the journal."""
        with self._lock:
            finished, self._finished = self._finished, []
        if finished:
            self._files.sync()
            self._journal.enter(finished)
