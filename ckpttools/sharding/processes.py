"""Synchronization of the processes of a JAX job.

A process that fails to read must report this before the others wait for it in a computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import OtherProcessError, UsageError
from ckpttools.sharding.distributed_job import Service, current_client

if TYPE_CHECKING:
    import jax

T = TypeVar("T")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


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
            built = do()
        except BaseException as raised:
            error = raised
        self.check_all(topic, error)
        return built

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
        wrong = self.from_first(
            f"{topic} in all",
            lambda: "\n".join(f"process {number}: {text}" for number, text in enumerate(declared) if text),
        )
        if error is not None:
            raise error
        if wrong:
            raise OtherProcessError(
                "another process could not do its part",
                got=wrong,
                hint="read the error of that process",
            )

    def check_same(self, topic: str, declared: str) -> None:
        """Raise OtherProcessError if the processes do not pass the same text."""
        every = self.gather(topic, declared)
        wrong = self.from_first(
            f"{topic} compared",
            lambda: ", ".join(str(number) for number, item in enumerate(every) if item != every[0]),
        )
        if wrong:
            raise OtherProcessError(
                f"the processes of the job do not have the same {topic}",
                got=f"process {wrong} differs from process 0",
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
