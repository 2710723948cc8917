"""Worker processes: each does tasks with an interpreter of its own.

numpy releases the interpreter lock within each call, so threads work side by side; but they hand it over at
every call, and a thread that has to wait for it sleeps. The mean of two models of 2.47 GB took 3.7 s on two
cores with one thread, 3.4 s with two and 4.4 s with four, 2.4 s with two processes and 2.9 s with four. Where
bytes only move, calls are few and long, and threads are as fast.

A process is forked while it has one thread: no lock of another can be held then. It inherits the plan and
what is open, writes to its places in the data files, and answers which tasks are done; what is synced,
entered, told and raised stays with the process that forked it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from ckpttools.core.errors import OtherProcessError
from ckpttools.core.message_terms import retry_term
from ckpttools.core.process_exit import end_process
from ckpttools.core.process_memory import private_bytes, thread_count
from ckpttools.formats.placement import ChunkFiles
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.run.entries import FinishedTask
from ckpttools.run.task_runner import InThread
from ckpttools.stores.base import File
from ckpttools.stores.publishing import ForksWriters, Sink

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Of numbers that are made. Means of 46 MiB take 0.10 s instead of 0.09, of 152 MiB 0.21 instead of 0.23, of
# 304 MiB 0.35 instead of 0.43.
_LEAST_BYTES = 256 << 20
# What a process has for itself beside its buffers.
_PROCESS_BYTES = 24 << 20
# And of each task: counting references writes to the pages that what is planned lies in, and copies them. Of
# 100,000 tasks two processes copied 190 MiB each, four 170.
_TASK_BYTES = 2 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Of mallopt(3): the most that may be free at the end of the heap, and what gets a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 32 << 20


class WorkerProcesses:
    """Those of one run.

    Attributes:
        doers: one for each process; none where threads have to do.
        nbytes: what all of them had for themselves, once they have ended.
    """

    def __init__(self) -> None:
        self.doers: list[InProcess] = []
        self.nbytes = 0

    def close(self) -> None:
        """Ends them, all at a time: each takes 20 ms to."""
        for doer in self.doers:
            doer.dismiss()
        self.nbytes += sum(doer.close() for doer in self.doers)


@contextmanager
def worker_processes(plan: Plan, work: object, tasks: Iterable[Task]) -> Iterator[WorkerProcesses]:
    """Processes that do tasks of a plan, as many as workers are planned; none where threads are better.

    Args:
        plan: what to do.
        work: where; see `ckpttools.stores.publishing.ForksWriters`.
        tasks: those that they would do.
    """
    result = WorkerProcesses()
    try:
        if isinstance(work, ForksWriters) and _is_worth_it(plan, tasks) and _may_fork():
            # What the collector of cycles touches in another process is copied for it.
            gc.freeze()
            try:
                _fork(result, plan, lambda: work.files_of_fork(plan.layout.files))
            finally:
                gc.unfreeze()
        yield result
    finally:
        result.close()


def _may_fork() -> bool:
    """Whether no lock of another thread would be copied, and `multiprocessing` permits it: the workers of its
    pools may have no processes.
    """
    from multiprocessing import current_process

    return thread_count() == 1 and not current_process().daemon


def _fork(result: WorkerProcesses, plan: Plan, sink: Callable[[], Sink]) -> None:
    # A signal before they have handlers of their own would have those of this process, and one that is
    # raised between two lines would leave a process that nobody ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for _ in range(plan.jobs):
            result.doers.append(InProcess(plan, sink, result.doers))
    except OSError:
        # The system gives no more: threads take less.
        result.close()
        result.doers = []
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_worth_it(plan: Plan, tasks: Iterable[Task]) -> bool:
    """Whether many numbers are made, of sources that are near, and every byte has its place before."""
    arrays = plan.tree.arrays
    return (
        plan.jobs > 1
        and sum(task.bytes_out for task in tasks if arrays[task.path].computed) >= _LEAST_BYTES
        and plan.projected_peak + plan.jobs * (_PROCESS_BYTES + len(plan.tasks) * _TASK_BYTES) <= plan.memory
        and all(isinstance(source, File) and source.price == 1 for source in plan.sources)
        and all(
            placement.codec is None and not isinstance(placement.home, ChunkFiles)
            for placement in plan.layout.placements.values()
        )
    )


_Response: TypeAlias = tuple[Mapping[str, float], tuple[str, ...], str]
"""A process's response: counts, bindings and digest of a `FinishedTask`."""


class InProcess:
    """Does tasks in a process that is forked for it."""

    def __init__(self, plan: Plan, sink: Callable[[], Sink], others: Sequence[InProcess]) -> None:
        """Forks it.

        Args:
            plan: the one the tasks are of.
            sink: opens what takes their bytes, in the process.
            others: what was forked before.

        Raises:
            OSError: the system refuses.
        """
        from multiprocessing import get_context

        self._plan = plan
        self._here: InThread | None = None
        self._nbytes = 0
        self._is_dismissed = False
        context = get_context("fork")
        self._pipe, far = context.Pipe()
        # Who waits for an answer finds out that there will be none only if nobody else has that end.
        inherited = [self._pipe, *(other._pipe for other in others)]
        arguments = plan, sink, far, inherited, os.getpid()
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            self._process.start()
        except OSError:
            self._pipe.close()
            raise
        finally:
            far.close()

    def __call__(self, number: int, sink: Sink) -> FinishedTask:
        """As `InThread`."""
        if self._here is None:
            response = self._request(number)
            if response is not None:
                return FinishedTask(number, {}, *response)
            # Once more in this process, in the room of that one: an error is raised where it is understood.
            self.close()
            self._here = InThread(self._plan)
        return self._here(number, sink)

    def _request(self, number: int) -> _Response | None:
        """Have the process do a task. Returns None if the task failed."""
        try:
            self._pipe.send(number)
            response: _Response | None = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        return response

    def _ended(self) -> OtherProcessError:
        self._process.join()
        code = self._process.exitcode
        return OtherProcessError(
            "a worker process was ended from outside",
            got=_described(code),
            hint="the system does that where memory runs out, and its log says so (dmesg); "
            f"what is done is kept: {retry_term()}",
        )

    def dismiss(self) -> None:
        """Tells the process to end, and does not wait for it."""
        if not (self._pipe.closed or self._is_dismissed):
            self._is_dismissed = True
            with suppress(OSError):
                self._pipe.send(None)

    def close(self) -> int:
        """Ends the process; returns the bytes of memory that it alone had, 0 where it was ended before."""
        self.dismiss()
        if not self._pipe.closed:
            with suppress(EOFError, OSError):
                self._nbytes = self._pipe.recv() or 0
            self._pipe.close()
            self._process.join()
        return self._nbytes


def _described(code: int | None) -> str:
    """How a process ended; None where somebody else, or the system, has taken its exit code."""
    if code is None:
        return "no exit code is known"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(
    plan: Plan, sink: Callable[[], Sink], pipe: Connection, inherited: Sequence[Connection], parent: int
) -> None:
    """What a worker process does until it is told to end, or whoever forked it has ended."""
    for item in _SIGNALS:
        signal.signal(item, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _end_with(parent)
    _keep_memory()
    for end in inherited:
        end.close()
    doer: InThread | None = None
    files: Sink | None = None
    with suppress(EOFError, OSError):
        while (number := pipe.recv()) is not None:
            try:
                files = files or sink()
                doer = doer or InThread(plan)
                entry = doer(number, files)
            except BaseException:
                pipe.send(None)
            else:
                pipe.send((dict(entry.counts), entry.bindings, entry.digest))
        pipe.send(private_bytes())
    # All bytes are with the system then, and what else an interpreter does at its end took 20 ms.
    end_process(0)  # shows what a plug-in printed


def _end_with(parent: int) -> None:
    """Has the system end this process when its parent has ended, however that did."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep_memory() -> None:
    """Has the C library keep what is freed, for the next array of numpy's: new pages cost more than the work.

    MXFP4 that becomes bfloat16 takes 2.3 ns of a core for each number, and 4.2 with 1.2 page faults for every
    thousand of them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)
