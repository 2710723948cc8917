"""Worker processes, which do tasks without sharing an interpreter lock.

numpy releases the interpreter lock within each call, so threads run in parallel. But every call hands the
lock over, and a thread that waits for the lock sleeps. On two cores, the mean of two models of 2.47 GB took
3.7 s with one thread, 3.4 s with two and 4.4 s with four; it took 2.4 s with two processes and 2.9 s with
four. If bytes are only moved, calls are few and long, and threads are as fast.

A process is forked while the parent has one thread, so no other thread can hold a lock. It inherits the plan
and the open files, writes to the data files, and reports the finished tasks. The parent does the syncs,
records, events and errors.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from ckpttools.core.errors import OtherProcessError
from ckpttools.core.message_terms import retry_term
from ckpttools.core.process_exit import end_process
from ckpttools.core.process_memory import private_bytes
from ckpttools.plan.plan import Plan
from ckpttools.run.execution import WorkerPool
from ckpttools.run.finished_tasks import FinishedTask
from ckpttools.run.task_runner import ThreadRunner
from ckpttools.stores.publishing import Sink

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Parameters of mallopt(3): maximum free memory at the end of the heap, and the threshold for separate
# mappings.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 32 << 20


def fork_workers(result: WorkerPool, plan: Plan, sink: Callable[[], Sink]) -> None:
    """Fork one process per worker of the plan, and add them to the pool."""
    # Until the fork installs its own handlers, it has those of this process, and an exception between
    # two lines would leak the process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for _ in range(plan.jobs):
            result.runners.append(ProcessRunner(plan, sink, result.runners))
    except OSError:
        # The system has no resources for more processes. Threads need less.
        result.close()
        result.runners = []
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_Response: TypeAlias = tuple[Mapping[str, float], tuple[str, ...], str]
"""A process's response: counts, bindings and digest of a `FinishedTask`."""


class ProcessRunner:
    """Does tasks in a forked process."""

    def __init__(self, plan: Plan, sink: Callable[[], Sink], others: Sequence[ProcessRunner]) -> None:
        """Fork a process that runs tasks of the plan.

        Args:
            plan: The plan of the tasks.
            sink: Opens the output files in the fork.
            others: Processes that were forked before.

        Raises:
            OSError: The system refuses.
        """
        from multiprocessing import get_context

        self._plan = plan
        self._here: ThreadRunner | None = None
        self._nbytes = 0
        self._is_dismissed = False
        context = get_context("fork")
        self._pipe, far = context.Pipe()
        # The parent notices the death of a fork only if no other process has the same end of the pipe.
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
        """See `ThreadRunner`."""
        if self._here is None:
            response = self._request(number)
            if response is not None:
                return FinishedTask(number, {}, *response)
            # Repeat the task in this process with the memory of the fork, so that its error can be handled
            # here.
            self.close()
            self._here = ThreadRunner(self._plan)
        return self._here(number, sink)

    def _request(self, number: int) -> _Response | None:
        """Have the process do a task. Returns None if the task failed."""
        try:
            self._pipe.send(number)
            response: _Response | None = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended_error() from None
        return response

    def _ended_error(self) -> OtherProcessError:
        self._process.join()
        code = self._process.exitcode
        return OtherProcessError(
            "a worker process was killed",
            got=_describe_exit(code),
            hint="the system kills processes when memory runs out (see dmesg); "
            f"finished work is kept: {retry_term()}",
        )

    def dismiss(self) -> None:
        """Tell the process to end without waiting for it."""
        if not (self._pipe.closed or self._is_dismissed):
            self._is_dismissed = True
            with suppress(OSError):
                self._pipe.send(None)

    def close(self) -> int:
        """End the process.

        Returns:
            Its private memory in bytes; 0 if it was killed.
        """
        self.dismiss()
        if not self._pipe.closed:
            with suppress(EOFError, OSError):
                self._nbytes = self._pipe.recv() or 0
            self._pipe.close()
            self._process.join()
        return self._nbytes


def _describe_exit(code: int | None) -> str:
    """Describe how a process ended; `code` is None if its exit code was lost."""
    if code is None:
        return "unknown exit code"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(
    plan: Plan, sink: Callable[[], Sink], pipe: Connection, inherited: Sequence[Connection], parent: int
) -> None:
    """Do tasks in a worker process until it is dismissed or its parent has ended."""
    for item in _SIGNALS:
        signal.signal(item, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _end_with(parent)
    _keep_memory()
    for end in inherited:
        end.close()
    doer: ThreadRunner | None = None
    files: Sink | None = None
    with suppress(EOFError, OSError):
        while (number := pipe.recv()) is not None:
            try:
                files = files or sink()
                doer = doer or ThreadRunner(plan)
                entry = doer(number, files)
            except BaseException:
                pipe.send(None)
            else:
                pipe.send((dict(entry.counts), entry.bindings, entry.digest))
        pipe.send(private_bytes())
    # All bytes have been passed to the system; a normal interpreter exit takes 20 ms.
    end_process(0)  # This flushes the output of plug-ins.


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep_memory() -> None:
    """Make the C library keep freed memory for the next numpy array, since new pages are expensive.

    Converting MXFP4 to bfloat16 takes 2.3 ns per value and core, and 4.2 ns with 1.2 page faults per thousand
    values.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # Only glibc has mallopt.
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)
