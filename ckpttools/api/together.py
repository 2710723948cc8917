"""One conversion by the processes of a job of `jax.distributed`.

Process 0 plans, and tells the others; each does a part, as `ckpt run` does; process 0 waits for them and
publishes. Nothing passes through devices, and none is looked for.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttools.api.parts import Replan, content_of, run_part
from ckpttools.api.prepared import Prepared
from ckpttools.api.standing import PartStanding, PlanStanding, plan_standing
from ckpttools.core.errors import OtherProcessError, UsageError
from ckpttools.plan.dealing import Part
from ckpttools.plan.plan_file import PlanFile, decoded
from ckpttools.run.events import Event, Observer, Receipt
from ckpttools.run.parts import PartReceipt
from ckpttools.stores.shares import this_process

# A question waits so long, and is asked again: an interruption is noticed meanwhile.
_PATIENCE_MS = 5_000
_LOOK_SECONDS = 0.5
# The destination is asked less and less often what is there: thousands of objects may tell.
_SAID_SECONDS = 10.0
# All have met before the first begins.
_LATE_SECONDS = 300.0
# gRPC takes 4 MiB at once.
_MOST_AT_ONCE = 2 << 20
# Of processes that are not there any more the others need not take leave for long.
_LEAVE_SECONDS = 10
_GRACE_SECONDS = 2.0
# Topics of what each process says of itself.
_HERE, _DONE, _FAILED = "here", "done", "failed"


@dataclass(frozen=True, slots=True)
class Job:
    """The processes of a job.

    Attributes:
        part: which of them this is.
        client: of the coordination service.
    """

    part: Part
    client: Any

    def tell(self, topic: str, content: bytes) -> None:
        """Says something, once."""
        pieces = [content[i : i + _MOST_AT_ONCE] for i in range(0, len(content), _MOST_AT_ONCE)]
        for number, piece in enumerate(pieces):
            self.client.key_value_set_bytes(f"ckpttools/{topic}/{number}", piece)
        self.client.key_value_set(f"ckpttools/{topic}", str(len(pieces)))

    def asked(self, topic: str) -> bytes:
        """What a process has said, once it has."""
        count = int(self._get(self.client.blocking_key_value_get, topic))
        return b"".join(
            self._get(self.client.blocking_key_value_get_bytes, f"{topic}/{number}")
            for number in range(count)
        )

    def _get(self, get: Callable[[str, int], Any], topic: str) -> Any:
        while True:
            try:
                return get(f"ckpttools/{topic}", _PATIENCE_MS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise OtherProcessError(
                        "process 0 does not answer any more", got=str(error).partition("\n")[0]
                    ) from error

    def note(self, topic: str, text: str) -> None:
        """Says something of this process."""
        self.client.key_value_set(f"ckpttools/{topic}/{self.part.number}", text)

    def noted(self, topic: str) -> dict[int, str]:
        """What processes have said of themselves so far, by number."""
        found = self.client.key_value_dir_get(f"ckpttools/{topic}/")
        return {int(key.rpartition("/")[2]): str(value) for key, value in found}


def joined_job(coordinator: str | None = None, process: Part | None = None) -> Job:
    """This process as one of a job.

    Args:
        coordinator: host and port where process 0 listens; None for as the environment says.
        process: which of how many; None for as the environment says.

    Raises:
        UsageError: the environment does not say, or the others do not come.
    """
    import jax
    from jax._src import distributed  # which Orbax uses for the same

    state = distributed.global_state
    if state.client is None:
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes=process.count if process else None,
                process_id=process.number if process else None,
                shutdown_timeout_seconds=_LEAVE_SECONDS,
            )
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                "this is no process of a job of jax.distributed",
                got=str(error).partition("\n")[0],
                wanted="an environment that says so: GKE, TPU, SLURM or MPI",
                hint="say it: --coordinator HOST:PORT --process I/N; or use ckpt plan and ckpt run",
            ) from error
    return Job(Part(state.process_id, state.num_processes), state.client)


def left_job() -> None:
    """Takes leave of the others, who do the same."""
    import jax

    shutdown: Callable[[], None] = jax.distributed.shutdown
    shutdown()


def abandoned_job(job: Job) -> None:
    """Ends without taking leave: of a job that has failed nobody waits for the others, who may be gone."""
    import ctypes

    from jax._src import distributed

    if job.part.number == 0:
        # With this process its service ends, and the others by a signal, who are about to say what happened.
        time.sleep(_GRACE_SECONDS)
    state = distributed.global_state
    for each in (state.client, state.service):
        if each is not None:
            # What is destroyed takes leave, too, and ends the process by a signal if nobody answers.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    state.client = state.service = None


def convert_together(
    job: Job,
    plan: Callable[[], Prepared],
    words: Sequence[str],
    *,
    replan: Replan,
    observe: Observer,
    done: Callable[[PartReceipt], None],
    waiting: Callable[[PlanStanding], None],
) -> Receipt | None:
    """Does this process's part, and in process 0 all that comes before and after.

    Args:
        job: the processes.
        plan: decides the conversion; called in process 0.
        words: of the command line, after `ckpt`.
        replan: as of `ckpttools.api.parts.run_part`.
        observe: called with every event.
        done: called when this process's part is done.
        waiting: called now and then in process 0, as long as it waits for others.

    Returns:
        What was done, in process 0; None elsewhere.

    Raises:
        OtherProcessError: another process could not do its part; says which.
        CheckpointError: as `Prepared.run`.
    """
    try:
        if job.part.number == 0:
            return _first(job, plan, words, replan, observe, done, waiting)
        _other(job, replan, observe, done)
    except BaseException as error:
        if not isinstance(error, OtherProcessError):
            job.note(_FAILED, str(error).partition("\n")[0] or type(error).__name__)
        raise
    return None


def _other(job: Job, replan: Replan, observe: Observer, done: Callable[[PartReceipt], None]) -> None:
    said = job.asked("plan")
    if not said:
        raise OtherProcessError(job.asked("end").decode())
    file = decoded(zlib.decompress(said), "what process 0 has planned")
    job.note(_HERE, this_process())
    done(run_part(file, job.part, replan=replan, observe=observe))
    job.note(_DONE, "yes")
    outcome = job.asked("end")
    if outcome:
        raise OtherProcessError(outcome.decode())


def _first(
    job: Job,
    plan: Callable[[], Prepared],
    words: Sequence[str],
    replan: Replan,
    observe: Observer,
    done: Callable[[PartReceipt], None],
    waiting: Callable[[PlanStanding], None],
) -> Receipt:
    told = False
    try:
        prepared = plan()
        content = content_of(prepared, words)
        file = decoded(content, "the plan")
        # Nobody of this job begins before it knows the plan.
        earlier = {each.token for each in plan_standing(file).parts}
        job.tell("plan", zlib.compress(content, 1))
        told = True
        done(run_part(file, job.part, replan=replan, observe=_heeding(job, observe)))
        _wait(job, file, waiting, earlier)
        receipt = prepared.conversion.run(
            prepared.destination,
            overwrite=prepared.overwrite,
            observe=observe,
            planned=file.header.plan,
        )
    except BaseException as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        if not told:
            job.tell("plan", b"")
        job.tell("end", f"process 0 of {job.part.count} has ended the job: {said}".encode())
        raise
    job.tell("end", b"")
    return receipt


def _check_failed(job: Job) -> None:
    """Raises OtherProcessError if a process has given up."""
    for number, why in job.noted(_FAILED).items():
        raise OtherProcessError(f"process {number} of {job.part.count} could not do its part", got=why)


def _heeding(job: Job, observe: Observer) -> Observer:
    """`observe`, which ends the work when another process has given up: nothing would come of it."""
    looked = time.monotonic()

    def heed(event: Event) -> None:
        nonlocal looked
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            _check_failed(job)
        observe(event)

    return heed


def _wait(
    job: Job, file: PlanFile, waiting: Callable[[PlanStanding], None], earlier: Collection[str]
) -> None:
    """Waits until all parts are done; `earlier` are processes, by token, of jobs before this one.

    Raises:
        OtherProcessError: a process has given up, or is not there any more; says which.
    """
    started = said = looked = time.monotonic()
    count, pause = job.part.count, _LOOK_SECONDS
    while True:
        _check_failed(job)
        if len(job.noted(_DONE)) == count - 1:
            return
        here = job.noted(_HERE)
        if len(here) < count - 1 and time.monotonic() - started > _LATE_SECONDS:
            missing = ", ".join(str(each) for each in range(1, count) if each not in here)
            raise OtherProcessError("processes do not begin with their parts", got=missing)
        if time.monotonic() - looked > pause:
            found = plan_standing(file)
            if _are_done(job, found.parts, here, earlier):
                return
            looked, pause = time.monotonic(), min(2 * pause, _SAID_SECONDS)
            if looked - said > _SAID_SECONDS:
                said = looked
                waiting(found)
        time.sleep(_LOOK_SECONDS)


def _are_done(
    job: Job, parts: Iterable[PartStanding], here: Mapping[int, str], earlier: Collection[str]
) -> bool:
    """Whether all other processes have done their parts, as they say or as the destination shows.

    Args:
        job, earlier: as of `_wait`.
        parts: what the destination shows, looked at before the processes are asked.
        here: the processes that have begun, in words.

    Raises:
        OtherProcessError: one is not there any more.
    """
    count, done = job.part.count, {*job.noted(_DONE)}
    for each in parts:
        number = int(each.part.partition("/")[0])
        # Not one of an earlier job: in containers a process has the same number and host again.
        is_ours = each.part == f"{number}/{count}" and here.get(number) == each.process
        if not is_ours or each.token in earlier or number in done or each.state == "at work":
            continue
        if each.state != "done":
            # It may have said why a moment ago.
            _check_failed(job)
            raise _gone(each, number, count)
        done.add(number)
    return len(done - {0}) == count - 1


def _gone(each: PartStanding, number: int, count: int) -> OtherProcessError:
    done = f"with {each.tasks_done} of {each.tasks} tasks done"
    ended = "" if each.state == "gone" else f", ended by: {each.state}"
    return OtherProcessError(
        f"process {number} of {count} is gone",
        got=f"{each.process}, last seen {each.seen:.0f} s ago, {done}{ended}",
        hint="run the same command again: what is done is not done again",
    )
