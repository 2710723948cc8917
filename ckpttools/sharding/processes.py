"""Communication of the processes of a JAX job, and their synchronization.

A process that fails to read must report this before the others wait for it in a computation.

This module never looks up a device. A save that waits in a background thread must not interfere with the
job's computations, and a conversion needs no devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import OtherProcessError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.plan.parts import Part, invalid_process_numbers

if TYPE_CHECKING:
    import jax

T = TypeVar("T")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


@dataclass(frozen=True, slots=True)
class Service:
    """The coordination service, as seen by one process.

    Attributes:
        number: Index of this process.
        count: Number of processes.
        client: JAX's client.
        name: Prefix of all topics.
        on_wait: Called regularly with the topic while a request is unanswered.
    """

    number: int
    count: int
    client: Any
    name: str = "ckpttools"
    on_wait: Callable[[str], None] = lambda topic: None

    def put(self, topic: str, text: str) -> None:
        """Publish a text under a topic, once."""
        # A value must not be empty.
        self.client.key_value_set(f"{self.name}/{topic}", f"={text}")

    def get(self, topic: str) -> str:
        """Wait for the text of a topic.

        Raises:
            OtherProcessError: The service no longer answers.
        """
        text: str = self._wait_for(self.client.blocking_key_value_get, topic)
        return text[1:]

    def put_bytes(self, topic: str, content: bytes) -> None:
        """Publish bytes of any length under a topic."""
        pieces = [content[i : i + _MAX_VALUE_BYTES] for i in range(0, len(content), _MAX_VALUE_BYTES)]
        for number, piece in enumerate(pieces):
            self.client.key_value_set_bytes(f"{self.name}/{topic}/{number}", piece)
        self.put(topic, str(len(pieces)))

    def get_bytes(self, topic: str) -> bytes:
        """Wait for the bytes of a topic; raises the errors of `get`."""
        get_bytes = self.client.blocking_key_value_get_bytes
        return b"".join(
            self._wait_for(get_bytes, f"{topic}/{number}") for number in range(int(self.get(topic)))
        )

    def set_status(self, topic: str, text: str) -> None:
        """Publish a status of this process, replacing its previous one."""
        self.client.key_value_set(f"{self.name}/{topic}/{self.number}", f"={text}", True)

    def statuses(self, topic: str) -> dict[int, str]:
        """Return the last status of each process that has published one, by index."""
        result = self.client.key_value_dir_get(f"{self.name}/{topic}/")
        return {int(key.rpartition("/")[2]): str(value)[1:] for key, value in result}

    def _wait_for(self, get: Callable[[str, int], T], topic: str) -> T:
        while True:
            try:
                return get(f"{self.name}/{topic}", _PATIENCE_MS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    self.on_wait(topic)
                else:
                    raise OtherProcessError(
                        "the connection to the other processes of the job was lost",
                        got=str(error).partition("\n")[0],
                        hint="find the process that has ended and read its error; its tasks are not done",
                    ) from error


@dataclass(frozen=True, slots=True)
class Processes(Service):
    """The processes that save or load one tree.

    The topic prefix names the call. It is the same in all processes, because all make calls in the same
    order.
    """

    @classmethod
    def of_job(cls, kind: str = "save") -> Processes:
        """Return all processes of the job, for the next call of this kind.

        Raises:
            UsageError: There is no coordination service.
        """
        import jax

        client = current_client()
        if client is None:
            raise UsageError(
                "the processes of this job cannot communicate",
                got=f"{jax.process_count()} processes without a coordination service",
                hint="call jax.distributed.initialize() first, in every process",
            )
        return cls(
            jax.process_index(), jax.process_count(), client, f"ckpttools/{kind}/{next(_numbers[kind])}"
        )

    def from_first(self, topic: str, say: Callable[[], str]) -> str:
        """Compute a text in process 0 and return it in all processes."""
        if self.number == 0:
            text = say()
            self.put(f"{topic}/0", text)
            return text
        return self.get(f"{topic}/0")

    def gather(self, topic: str, declared: str) -> list[str]:
        """Send a text to process 0. Returns all texts in process order there, and [] elsewhere."""
        self.put(f"{topic}/{self.number}", declared)
        if self.number:
            return []
        return [self.get(f"{topic}/{number}") for number in range(self.count)]

    def run_in_all(self, topic: str, do: Callable[[], T]) -> T:
        """Run a function in each process and return its local result; raises the errors of `check_all`."""
        error: BaseException | None = None
        try:
            result = do()
        except BaseException as raised:
            error = raised
        self.check_all(topic, error)
        return result

    def check_all(self, topic: str, error: BaseException | None) -> None:
        """Wait until all processes have finished a step.

        Args:
            topic: Name of the step.
            error: The error of this process; None if it succeeded.

        Raises:
            BaseException: `error`.
            OtherProcessError: Another process failed. The message names it.
        """
        declared = self.gather(topic, "" if error is None else _message(error))
        failure = self.from_first(
            f"{topic} in all",
            lambda: "\n".join(f"process {number}: {text}" for number, text in enumerate(declared) if text),
        )
        if error is not None:
            raise error
        if failure:
            raise OtherProcessError(
                "another process could not do its part",
                got=failure,
                hint="read the error of that process",
            )

    def check_same(self, topic: str, declared: str) -> None:
        """Raise OtherProcessError if the processes do not pass the same text."""
        all_values = self.gather(topic, declared)
        difference = self.from_first(
            f"{topic} compared",
            lambda: ", ".join(str(number) for number, item in enumerate(all_values) if item != all_values[0]),
        )
        if difference:
            raise OtherProcessError(
                f"the processes of the job do not have the same {topic}",
                got=f"process {difference} differs from process 0",
                hint="make the same call in all of them, with the same memory and the same checkpoint",
            )


@lru_cache(maxsize=256)
def is_spread(sharding: jax.sharding.Sharding) -> bool:
    """Return whether several processes have devices of an array and therefore must synchronize.

    Unlike `is_fully_addressable`, the answer is the same in all processes.
    """
    devices: Any = sharding.device_set
    return len({device.process_index for device in devices}) > 1


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Memory that joining a job adds to a process: 128 MiB with jax 0.10, and 138 MiB with 0.12.
JOB_BYTES = 144 << 20
# Timeout of one request. The request is repeated until it is answered, so that interruptions are noticed in
# between. JAX's heartbeats detect a process that has died and end the others.
_PATIENCE_MS = 5_000
# gRPC accepts at most 4 MiB per message.
_MAX_VALUE_BYTES = 2 << 20


def current_client() -> Any:
    """Return JAX's client; None outside a job."""
    from jax._src import distributed  # Orbax uses the same private module.

    return distributed.global_state.client


def join_job(coordinator: str | None = None, process: Part | None = None) -> Service:
    """Join a job of `jax.distributed` with this process.

    Args:
        coordinator: Host and port where process 0 listens; None to detect it.
        process: Index and number of processes; None to detect them.

    Raises:
        UsageError: The environment does not describe a job, or the other processes do not join.
    """
    import jax
    from jax._src import distributed

    if current_client() is None:
        if process is None and (problem := invalid_process_numbers()):
            # JAX would wait for minutes for processes that do not exist.
            raise _not_in_job_error(problem)
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes=process.count if process else None,
                process_id=process.number if process else None,
            )
        except (ValueError, RuntimeError) as error:
            raise _not_in_job_error(str(error).partition("\n")[0]) from error
    state = distributed.global_state
    return Service(state.process_id, state.num_processes, state.client)


def _not_in_job_error(got: str) -> UsageError:
    return UsageError(
        "this process is not part of a jax.distributed job",
        got=got,
        expected="an environment that describes a job (GKE, TPU, SLURM or MPI), processes numbered from 0",
        hint=f"give {option('coordinator', 'HOST:PORT')} and {option('process', 'I/N')}; or use "
        f"{action('write_plan')} and {action('run_part')}",
    )


# Processes leave a job of `jax.distributed` together if all are present, and must not be ended by a signal.
#
# JAX uses a barrier. If the barrier times out, or a process died before reaching it, SIGABRT ends all
# connected processes, both those at the barrier and those that reach it later. The same happens when process
# 0 ends, which runs the service. A process that is stopped at the barrier leaves it like the others.
#
# Wait for late processes (stopped, swapped out, or on a busy machine). After 100 s, JAX considers them dead.
_LATE_SECONDS = 60.0
# Wait for processes that learn of a failure only when their current task ends.
_FAILED_SECONDS = 10.0
# Time for a process that has announced its end to print its error to stderr.
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.1
# Topics for the statuses of processes.
_READY, _AWAY = "ready to leave", "away"


def leave_job(job: Service) -> None:
    """Leave the job together with the other processes, or after a minute without them."""
    import jax

    job.set_status(_READY, "yes")
    if job.number == 0:
        job.put("leave", "together" if _wait_for_all(job, _READY, _LATE_SECONDS) else "alone")
    if job.get("leave") == "together":
        shutdown: Callable[[], None] = jax.distributed.shutdown
        shutdown()
    else:
        abandon_job(job)


def abandon_job(job: Service) -> None:
    """Leave a failed job without the barrier, since the other processes may be gone."""
    from jax._src import distributed

    with contextlib.suppress(Exception):  # Process 0 may have ended.
        job.set_status(_AWAY, "yes")
        if job.number == 0:
            _wait_for_all(job, _AWAY, _FAILED_SECONDS)
            time.sleep(_GRACE_SECONDS)
    state = distributed.global_state
    for item in (state.client, state.service):
        if item is not None:
            # Destroying these objects would wait at the barrier and, without an answer, end the process by a
            # signal.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    state.client = state.service = None


def mark_lost(job: Service, number: int) -> None:
    """Mark another process as gone, so that no process waits for it to leave."""
    replace(job, number=number).set_status(_AWAY, "yes")


def _wait_for_all(job: Service, topic: str, seconds: float) -> bool:
    """Wait for all processes to publish a status; return whether they did within the given seconds."""
    until = time.monotonic() + seconds
    while len(job.statuses(topic)) < job.count:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True
