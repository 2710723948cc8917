"""The possible states of a disk after a crash during a run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crash.disk import Disk, Moment
from crash.taps import Call

# More than a process makes.
_HANDLES = 1 << 32


def of_a_later_process(calls: Sequence[Call]) -> list[Call]:
    """Renumber the handles of calls so that they differ from those of the previous process."""
    return [replace(call, handle=call.handle and call.handle + _HANDLES) for call in calls]


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash, described by the steps that reached the disk.

    Attributes:
        text: Description.
        steps: Steps that reached the disk.
        least: Whether only the required steps did.
        calls: Number of completed calls if a kill caused the state; None for a power cut.
    """

    text: str
    steps: frozenset[int]
    least: bool = False
    calls: int | None = None


def crashes(disk: Disk, moments: Sequence[Moment], seed: str, samples: int) -> list[Crash]:
    """Yield all crashes of a run, without duplicates.

    These are all prefixes of the calls. Before each sync, they are also these subsets of the pending steps:
    none, each step alone, all but one, and random subsets.

    Args:
        disk: Disk that recorded the moments.
        moments: Moments of the run.
        seed: Seed of the random subsets.
        samples: Number of random subsets per moment.
    """
    source = random.Random(seed)
    result: dict[frozenset[int], Crash] = {}
    for crash in _crashes(disk, moments, source, samples):
        known = result.setdefault(crash.steps, crash)
        if crash.least:
            result[crash.steps] = replace(known, least=True)
    return list(result.values())


def _crashes(disk: Disk, moments: Sequence[Moment], source: random.Random, samples: int) -> Iterator[Crash]:
    for moment in moments:
        everything = frozenset(range(moment.steps))
        yield Crash(f"killed after {moment.calls} calls", everything, calls=moment.calls)
        if not moment.waits:
            continue
        waiting = sorted(everything - moment.durable)
        text = f"power lost after {moment.calls} calls"
        yield Crash(f"{text}, nothing more than durable", moment.durable, least=True)
        for step in waiting:
            yield Crash(f"{text}, all but {step}", frozenset(disk.without_later(everything, step)))
            yield Crash(f"{text}, only {step}", moment.durable | disk.with_earlier((step,)))
        for _ in range(samples):
            share = source.choice((0.1, 0.5, 0.9))
            part = [step for step in waiting if source.random() < share]
            yield Crash(f"{text}, some: {part}", moment.durable | disk.with_earlier(part))
