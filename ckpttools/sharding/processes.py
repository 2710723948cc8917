"""The processes of a JAX job, as they come to agree: by JAX's coordination service, never by its devices.

What a save waits for in a thread of its own must not come between what the job computes on its devices; and
who has failed to read must say so before the others wait for it in a computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from ckpttools.core.errors import OtherProcessError, UsageError

# How long one question waits; it is asked again until it is answered. Of a process that has died JAX's own
# heartbeats tell, and end the others.
_PATIENCE_MS = 10_000
T = TypeVar("T")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that save or load one tree.

    Attributes:
        number: of this process.
        count: how many there are.
        client: of the coordination service.
        name: of the call, the same in all processes: calls are made in the same order everywhere.
    """

    number: int
    count: int
    client: Any
    name: str

    @classmethod
    def of_job(cls, kind: str = "save") -> Processes:
        """All processes of the job, for one more call of a kind.

        Raises:
            UsageError: they have nothing by which they could talk.
        """
        import jax
        from jax._src import distributed  # which Orbax uses for the same

        client = distributed.global_state.client
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
            self._put(f"{topic}/0", text)
            return text
        return self._get(f"{topic}/0")

    def gathered(self, topic: str, said: str) -> list[str]:
        """What each process says, in the order of their numbers; in process 0, and elsewhere nothing."""
        self._put(f"{topic}/{self.number}", said)
        if self.number:
            return []
        return [self._get(f"{topic}/{number}") for number in range(self.count)]

    def done(self, topic: str, do: Callable[[], T]) -> T:
        """Does something in each process, and returns what came of it here; errors as `all_well`."""
        error: BaseException | None = None
        try:
            made = do()
        except BaseException as raised:
            error = raised
        self.all_well(topic, error)
        return made

    def all_well(self, topic: str, error: BaseException | None) -> None:
        """Returns when all processes have come here.

        Args:
            topic: what they have done.
            error: what went wrong here.

        Raises:
            BaseException: `error`.
            OtherProcessError: something went wrong elsewhere; says where.
        """
        said = self.gathered(topic, "" if error is None else _told(error))
        wrong = self.told(
            f"{topic} in all",
            lambda: "\n".join(f"process {number}: {text}" for number, text in enumerate(said) if text),
        )
        if error is not None:
            raise error
        if wrong:
            raise OtherProcessError(
                "another process could not do its part",
                got=wrong,
                hint="see what that process says",
            )

    def all_same(self, topic: str, said: str) -> None:
        """Raises OtherProcessError if the processes do not say the same."""
        every = self.gathered(topic, said)
        wrong = self.told(
            f"{topic} compared",
            lambda: ", ".join(str(number) for number, each in enumerate(every) if each != every[0]),
        )
        if wrong:
            raise OtherProcessError(
                f"the processes of the job do not have the same {topic}",
                got=f"another one in process {wrong} than in process 0",
                hint="make the same call in all of them, with the same memory, of the same checkpoint",
            )

    def _put(self, topic: str, text: str) -> None:
        # A value must not be empty.
        self.client.key_value_set(f"{self.name}/{topic}", f"={text}")

    def _get(self, topic: str) -> str:
        while True:
            try:
                value: str = self.client.blocking_key_value_get(f"{self.name}/{topic}", _PATIENCE_MS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise OtherProcessError(
                        "the processes of the job do not hear each other any more",
                        got=str(error).partition("\n")[0],
                        hint="see which process has ended, and what it says; what it was to do is not done",
                    ) from error
                continue
            return value[1:]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
