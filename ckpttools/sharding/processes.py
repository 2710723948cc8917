"""The processes of a JAX job, as they come to agree.

Who has failed to read must say so before the others wait for it in a computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import OtherProcessError, UsageError
from ckpttools.sharding.distributed_job import Service, client_here

if TYPE_CHECKING:
    import jax

T = TypeVar("T")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


@dataclass(frozen=True, slots=True)
class Processes(Service):
    """The processes that save or load one tree.

    The name is that of the call, the same in all processes: calls are made in the same order everywhere.
    """

    @classmethod
    def of_job(cls, kind: str = "save") -> Processes:
        """All processes of the job, for one more call of a kind.

        Raises:
            UsageError: they have nothing by which they could talk.
        """
        import jax

        client = client_here()
        if client is None:
            raise UsageError(
                "the processes of this job cannot talk to each other",
                got=f"{jax.process_count()} processes without a coordination service",
                hint="call jax.distributed.initialize() first, in every process",
            )
        return cls(
            jax.process_index(), jax.process_count(), client, f"ckpttools/{kind}/{next(_numbers[kind])}"
        )

    def told(self, topic: str, say: Callable[[], str]) -> str:
        """What process 0 says, in all processes; asked of no other."""
        if self.number == 0:
            text = say()
            self.put(f"{topic}/0", text)
            return text
        return self.get(f"{topic}/0")

    def gathered(self, topic: str, declared: str) -> list[str]:
        """What each process says, in the order of their numbers; in process 0, and elsewhere nothing."""
        self.put(f"{topic}/{self.number}", declared)
        if self.number:
            return []
        return [self.get(f"{topic}/{number}") for number in range(self.count)]

    def done(self, topic: str, do: Callable[[], T]) -> T:
        """Does something in each process, and returns what came of it here; errors as `all_well`."""
        error: BaseException | None = None
        try:
            built = do()
        except BaseException as raised:
            error = raised
        self.all_well(topic, error)
        return built

    def all_well(self, topic: str, error: BaseException | None) -> None:
        """Returns when all processes have come here.

        Args:
            topic: what they have done.
            error: what went wrong here.

        Raises:
            BaseException: `error`.
            OtherProcessError: something went wrong elsewhere; says where.
        """
        declared = self.gathered(topic, "" if error is None else _message(error))
        wrong = self.told(
            f"{topic} in all",
            lambda: "\n".join(f"process {number}: {text}" for number, text in enumerate(declared) if text),
        )
        if error is not None:
            raise error
        if wrong:
            raise OtherProcessError(
                "another process could not do its part",
                got=wrong,
                hint="see what that process says",
            )

    def all_same(self, topic: str, declared: str) -> None:
        """Raises OtherProcessError if the processes do not say the same."""
        every = self.gathered(topic, declared)
        wrong = self.told(
            f"{topic} compared",
            lambda: ", ".join(str(number) for number, item in enumerate(every) if item != every[0]),
        )
        if wrong:
            raise OtherProcessError(
                f"the processes of the job do not have the same {topic}",
                got=f"another one in process {wrong} than in process 0",
                hint="make the same call in all of them, with the same memory, of the same checkpoint",
            )


@lru_cache(maxsize=256)
def is_spread(sharding: jax.sharding.Sharding) -> bool:
    """Whether several processes have devices of an array, of which all that have it then speak together.

    Unlike whether this process can address all of it, the answer is the same in all of them.
    """
    devices: Any = sharding.device_set
    return len({device.process_index for device in devices}) > 1


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
