"""Run one conversion in the processes of a `jax.distributed` job.

Process 0 plans and sends the plan to the others. Each process runs one part, as `ckpttools.run_part` does.
Then process 0 waits for the others and publishes. Data does not pass through devices, and no device is
needed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ckpttools.api.calls import code_in, user_code
from ckpttools.api.plan_status import PartStatus, PlanStatus, plan_status
from ckpttools.api.plans import content_of
from ckpttools.api.prepared import Prepared
from ckpttools.api.run_part import part_done
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import OtherProcessError, first_line
from ckpttools.core.memory_limit import extra_resident
from ckpttools.core.message_terms import render, retry_term
from ckpttools.plan.parts import Part
from ckpttools.plan.plan_file import PlanFile, decode_plan
from ckpttools.run.events import Event, Observer, Receipt
from ckpttools.run.parts import PartReceipt
from ckpttools.sharding.processes import JOB_BYTES, Service, mark_lost
from ckpttools.stores.relocation import NO_RELOCATION
from ckpttools.stores.shares import describe_this_process

_POLL_SECONDS = 0.5
# The destination is inspected less and less often, because that may take thousands of requests.
_REPORT_SECONDS = 10.0
# All processes have met before the first one starts.
_LATE_SECONDS = 300.0
# Topics under which each process reports its state.
_HERE, _DONE, _FAILED = "here", "done", "failed"
_END = "end"


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks for the events of a distributed conversion.

    Attributes:
        observe: Called with every event.
        done: Called when this process's part is done.
        waiting: Called from time to time in process 0 while it waits for other processes.
    """

    observe: Observer
    done: Callable[[PartReceipt], None]
    waiting: Callable[[PlanStatus], None]


def convert_distributed(job: Service, plan: Callable[[], Prepared], callbacks: Callbacks) -> Receipt | None:
    """Run this process's part; process 0 also plans and publishes.

    Args:
        job: The processes.
        plan: Plans the conversion, with absolute locations; called in process 0.
        callbacks: Functions to call with events.

    Returns:
        The receipt of the conversion in process 0; None in the other processes.

    Raises:
        OtherProcessError: Another process could not do its part. The message names the process.
        CheckpointError: See `Prepared.run`.
    """
    try:
        with extra_resident(JOB_BYTES):
            if job.number == 0:
                return _first(job, plan, callbacks)
            _run_worker_process(job, plan, callbacks)
    except BaseException as error:
        if not isinstance(error, OtherProcessError):
            job.set_status(_FAILED, render(first_line(error)))
        raise
    return None


def _part_of(job: Service) -> Part:
    return Part(job.number, job.count)


def _run_worker_process(job: Service, plan: Callable[[], Prepared], callbacks: Callbacks) -> None:
    content = job.get_bytes("plan")
    if not content:
        raise OtherProcessError(_end_of(job))
    file = decode_plan(zlib.decompress(content), "the plan of process 0")
    job.set_status(_HERE, describe_this_process())
    observe = _stop_when_job_ends(lambda: _check_ended(job), callbacks.observe)
    # Only code that this process's own command line names may run, not code that process 0 names.
    code = {} if file.header.has_tasks else _user_code(plan())
    callbacks.done(part_done(file, _part_of(job), NO_RELOCATION, observe=observe, code=code))
    job.set_status(_DONE, "yes")
    if failure := _end_of(job):
        raise OtherProcessError(failure)


def _user_code(prepared: Prepared) -> Mapping[str, str]:
    return user_code(**code_in(prepared.call.arguments)) if prepared.call else {}


def _end_of(job: Service) -> str:
    """Wait for the final message of process 0: "" or the reason for its failure."""
    return job.get(f"{_END}/0")


def _check_ended(job: Service) -> None:
    """Raise OtherProcessError if process 0 has ended the job with an error."""
    for failure in filter(None, job.statuses(_END).values()):
        raise OtherProcessError(failure)


def _first(job: Service, plan: Callable[[], Prepared], callbacks: Callbacks) -> Receipt:
    is_planned = False
    try:
        prepared = plan()
        prepared = replace(prepared, options=replace(prepared.options, observe=callbacks.observe, command=""))
        _ = prepared.mesh_reads  # Computed before anything is written.
        content = content_of(prepared)
        file = decode_plan(content, "the plan")
        # No process of this job starts before it has the plan.
        started, before = time.monotonic(), plan_status(file)
        earlier = {part.token for part in before.parts}
        job.put_bytes("plan", zlib.compress(content, 1))
        is_planned = True
        observe = _stop_when_job_ends(lambda: _check_failed(job), callbacks.observe)
        code = _user_code(prepared)
        callbacks.done(part_done(file, _part_of(job), NO_RELOCATION, observe=observe, code=code))
        _wait(job, file, callbacks.waiting, earlier)
        receipt = prepared.execute(file.header.plan)
    except BaseException as error:
        reason = first_line(error)
        if not is_planned:
            job.put_bytes("plan", b"")
        job.set_status(_END, f"process 0 of {job.count} ended the job: {reason}")
        raise
    job.set_status(_END, "")
    # To the publishing run, all tasks look resumed; only those done before this job count.
    return replace(
        receipt,
        seconds=time.monotonic() - started,
        tasks_resumed=before.tasks_done,
        bytes_resumed=before.bytes_done,
    )


def _check_failed(job: Service) -> None:
    """Raise OtherProcessError if any process has failed."""
    for number, failure in job.statuses(_FAILED).items():
        raise OtherProcessError(f"process {number} of {job.count} could not do its part", got=failure)


def _stop_when_job_ends(check: Callable[[], None], observe: Observer) -> Observer:
    """Wrap `observe` so that it stops the work when another process has ended the job."""
    last_check = time.monotonic()

    def heed(event: Event) -> None:
        nonlocal last_check
        if time.monotonic() - last_check > _POLL_SECONDS:
            last_check = time.monotonic()
            check()
        observe(event)

    return heed


def _wait(
    job: Service, file: PlanFile, waiting: Callable[[PlanStatus], None], earlier: Collection[str]
) -> None:
    """Wait until all parts are done. `earlier` contains the process tokens of earlier jobs.

    Raises:
        OtherProcessError: A process has failed or no longer exists. The message names it.
    """
    started = reported = last_check = time.monotonic()
    count, pause = job.count, _POLL_SECONDS
    while True:
        _check_failed(job)
        if len(job.statuses(_DONE)) == count - 1:
            return
        statuses = job.statuses(_HERE)
        if len(statuses) < count - 1 and time.monotonic() - started > _LATE_SECONDS:
            missing = ", ".join(str(item) for item in range(1, count) if item not in statuses)
            raise OtherProcessError("processes have not started their parts", got=missing)
        if time.monotonic() - last_check > pause:
            result = plan_status(file)
            if _are_done(job, result.parts, statuses, earlier):
                return
            last_check, pause = time.monotonic(), min(2 * pause, _REPORT_SECONDS)
            if last_check - reported > _REPORT_SECONDS:
                reported = last_check
                waiting(result)
        time.sleep(_POLL_SECONDS)


def _are_done(
    job: Service, parts: Iterable[PartStatus], statuses: Mapping[int, str], earlier: Collection[str]
) -> bool:
    """Return whether all other processes have done their parts, by their reports or the destination.

    Args:
        job, earlier: See `_wait`.
        parts: State of the parts at the destination, read before the processes are asked.
        statuses: Description of each process that has started.

    Raises:
        OtherProcessError: A process no longer exists.
    """
    count, done = job.count, {*job.statuses(_DONE)}
    for part in parts:
        number = int(part.part.partition("/")[0])
        # The process must be of this job: in containers, a process of a later job can have the same number
        # and host.
        is_ours = part.part == f"{number}/{count}" and statuses.get(number) == part.process
        if not is_ours or part.token in earlier or number in done or part.state == "at work":
            continue
        if part.state != "done":
            # The process may have just reported the reason.
            _check_failed(job)
            mark_lost(job, number)
            raise _lost_process_error(part, number, count)
        done.add(number)
    return len(done - {0}) == count - 1


def _lost_process_error(status: PartStatus, number: int, count: int) -> OtherProcessError:
    done = f"with {status.tasks_done} of {status.tasks} tasks done"
    ended = "" if status.state == "gone" else f", ended by: {status.state}"
    return OtherProcessError(
        f"process {number} of {count} is gone",
        got=f"{status.process}, last seen {status.idle_seconds:.0f} s ago, {done}{ended}",
        hint=f"{retry_term()}: finished work is not repeated",
    )
