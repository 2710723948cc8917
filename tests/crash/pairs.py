"""Two commands that take turns, call by call."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

from crash.runner import Ended, Runner

# A process that does not ask for so long waits for the other one, or hangs: the other goes on.
_PATIENCE_SECONDS = 10.0
_numbers = itertools.count()


def staged(lengths: tuple[int, int], number: int) -> Iterator[int]:
    """Yield which of two commands is next: alternating runs of calls, then the remaining calls of both.

    Args:
        lengths: Number of calls that each command makes alone.
        number: Number of the schedule, which determines it.
    """
    source = random.Random(number)
    first = source.randrange(2)
    for part in range(source.choice((1, 2, 3, 20))):
        whose = (first + part) % 2
        yield from [whose] * source.randrange(1, lengths[whose] + 1)
    rest = source.randrange(2)
    yield from [rest] * (2 * max(lengths))
    yield from itertools.cycle((0, 1))


def together(
    runner: Runner, commands: Sequence[Sequence[str]], turns: Iterator[int], exchange: bool
) -> list[Ended]:
    """Run two commands at once, each making a call that changes something only when it is its turn."""
    address = f"\0ckpttools-crash-{os.getpid()}-{next(_numbers)}"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(address)
        listener.listen(2)
        running, asking = [], []
        for args in commands:
            running.append(runner.start(*args, turns=address, exchange=exchange))
            asking.append(listener.accept()[0])
        _take_turns(asking, turns)
    return [runner.wait(item) for item in running]


def _take_turns(asking: Sequence[socket.socket], turns: Iterator[int]) -> None:
    going = {0, 1}
    for item in asking:
        item.settimeout(_PATIENCE_SECONDS)
    for whose in turns:
        if not going:
            return
        whose = whose if whose in going else 1 - whose
        try:
            if asking[whose].recv(1):
                asking[whose].sendall(b"!")
            else:
                going.discard(whose)
                asking[whose].close()
        except TimeoutError:
            continue
