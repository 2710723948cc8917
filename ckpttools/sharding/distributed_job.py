"""JAX's coordination service: by it the processes of a job talk to each other, never by their devices.

Nothing here looks for a device. What a save waits for in a thread of its own must not come between what the
job computes on them; and a conversion has no use for them at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import OtherProcessError, UsageError
from ckpttools.core.message_terms import option, step
from ckpttools.plan.parts import Part, misnumbered

T = TypeVar("T")
# What a process takes that has joined a job, beside any other: 128 MiB with jax 0.10, 138 with 0.12.
JOB_BYTES = 144 << 20
# How long one question waits; it is asked again until it is answered: an interruption is noticed meanwhile.
# Of a process that has died JAX's own heartbeats tell, and end the others.
_PATIENCE_MS = 5_000
# gRPC takes 4 MiB at once.
_MOST_AT_ONCE = 2 << 20


@dataclass(frozen=True, slots=True)
class Service:
    """The service, as one process has it.

    Attributes:
        number: of this process.
        count: how many there are.
        client: of JAX.
        name: what all topics begin with.
        waits: called with the topic now and then, as long as nobody answers.
    """

    number: int
    count: int
    client: Any
    name: str = "ckpttools"
    waits: Callable[[str], None] = lambda topic: None

    def put(self, topic: str, text: str) -> None:
        """Says something, once."""
        # A value must not be empty.
        self.client.key_value_set(f"{self.name}/{topic}", f"={text}")

    def get(self, topic: str) -> str:
        """What a process has said, once it has.

        Raises:
            OtherProcessError: nobody answers any more.
        """
        text: str = self._asked(self.client.blocking_key_value_get, topic)
        return text[1:]

    def put_bytes(self, topic: str, content: bytes) -> None:
        """The same of any number of bytes."""
        pieces = [content[i : i + _MOST_AT_ONCE] for i in range(0, len(content), _MOST_AT_ONCE)]
        for number, piece in enumerate(pieces):
            self.client.key_value_set_bytes(f"{self.name}/{topic}/{number}", piece)
        self.put(topic, str(len(pieces)))

    def get_bytes(self, topic: str) -> bytes:
        """The same of bytes; errors as `get`."""
        asked = self.client.blocking_key_value_get_bytes
        return b"".join(self._asked(asked, f"{topic}/{number}") for number in range(int(self.get(topic))))

    def note(self, topic: str, text: str) -> None:
        """Says something of this process, in place of what it has said before."""
        self.client.key_value_set(f"{self.name}/{topic}/{self.number}", f"={text}", True)

    def noted(self, topic: str) -> dict[int, str]:
        """What processes have said of themselves so far, by number."""
        result = self.client.key_value_dir_get(f"{self.name}/{topic}/")
        return {int(key.rpartition("/")[2]): str(value)[1:] for key, value in result}

    def _asked(self, get: Callable[[str, int], T], topic: str) -> T:
        while True:
            try:
                return get(f"{self.name}/{topic}", _PATIENCE_MS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    self.waits(topic)
                else:
                    raise OtherProcessError(
                        "the processes of the job do not hear each other any more",
                        got=str(error).partition("\n")[0],
                        hint="see which process has ended, and what it says; what it was to do is not done",
                    ) from error


def client_here() -> Any:
    """JAX's client, None outside of a job."""
    from jax._src import distributed  # which Orbax uses for the same

    return distributed.global_state.client


def joined_job(coordinator: str | None = None, process: Part | None = None) -> Service:
    """This process as one of a job.

    Args:
        coordinator: host and port where process 0 listens; None for as the environment says.
        process: which of how many; None for as the environment says.

    Raises:
        UsageError: the environment does not say, or the others do not come.
    """
    import jax
    from jax._src import distributed

    if client_here() is None:
        if process is None and (wrong := misnumbered()):
            # JAX would wait for minutes for processes that there are none of.
            raise _no_job(wrong)
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes=process.count if process else None,
                process_id=process.number if process else None,
            )
        except (ValueError, RuntimeError) as error:
            raise _no_job(str(error).partition("\n")[0]) from error
    state = distributed.global_state
    return Service(state.process_id, state.num_processes, state.client)


def _no_job(got: str) -> UsageError:
    return UsageError(
        "this is no process of a job of jax.distributed",
        got=got,
        expected="an environment that says so: GKE, TPU, SLURM or MPI, numbering processes from 0",
        hint=f"say it: {option('coordinator', 'HOST:PORT')}, {option('process', 'I/N')}; or use "
        f"{step('ckpttools.write_plan', 'ckpt plan')} and {step('ckpttools.run_part', 'ckpt run')}",
    )


# How processes leave a job of `jax.distributed`: in step where all are there, and none ends by a signal.
#
# JAX's own way is a barrier. When it times out, or a process has died before it, all that are connected are
# ended by SIGABRT, those at the barrier and those that come later; so are all others when process 0 ends,
# which has the service. A process that is stopped at the barrier comes out of it as the others do.
#
# For those who are late: stopped, swapped out, or on a busy machine. After 100 s JAX takes them for dead.
_LATE_SECONDS = 60.0
# For those who are to hear that the job has failed: when a task of theirs ends.
_FAILED_SECONDS = 10.0
# For what is left to a process that has said that it goes: what happened, on stderr.
_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# Topics of what each process says of itself.
_READY, _AWAY = "ready to leave", "away"


def left_job(job: Service) -> None:
    """Takes leave of the others, who do the same; of those who do not come after a minute, without them."""
    import jax

    job.note(_READY, "yes")
    if job.number == 0:
        job.put("leave", "together" if _all_say(job, _READY, _LATE_SECONDS) else "alone")
    if job.get("leave") == "together":
        shutdown: Callable[[], None] = jax.distributed.shutdown
        shutdown()
    else:
        abandoned_job(job)


def abandoned_job(job: Service) -> None:
    """Ends without the barrier: of a job that has failed nobody waits for the others, who may be gone."""
    from jax._src import distributed

    with contextlib.suppress(Exception):  # process 0 may be gone
        job.note(_AWAY, "yes")
        if job.number == 0:
            _all_say(job, _AWAY, _FAILED_SECONDS)
            time.sleep(_GRACE_SECONDS)
    state = distributed.global_state
    for item in (state.client, state.service):
        if item is not None:
            # What is destroyed takes leave, too, and ends the process by a signal if nobody answers.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    state.client = state.service = None


def is_gone(job: Service, number: int) -> None:
    """Says of another process that it has gone: nobody waits for it to leave."""
    replace(job, number=number).note(_AWAY, "yes")


def _all_say(job: Service, topic: str, seconds: float) -> bool:
    """Whether all processes say this within so many seconds."""
    until = time.monotonic() + seconds
    while len(job.noted(topic)) < job.count:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
