"""The states that a disk may be in after a crash during a run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crash.disk import Disk, Moment


@dataclass(frozen=True, slots=True)
class Crash:
    """A state by its history.

    Attributes:
        text: for people.
        steps: that reached the disk.
        least: whether nothing did that had not to.
    """

    text: str
    steps: frozenset[int]
    least: bool = False


def crashes(disk: Disk, moments: Sequence[Moment], seed: str, samples: int) -> list[Crash]:
    """All prefixes; and, where something was about to be made durable, of what was on its way: nothing, each
    step alone, all but one, and some random parts. Each set of steps once.

    Args:
        disk: that made the moments.
        moments: of the run.
        seed: of the random parts.
        samples: how many of those for each moment.
    """
    source = random.Random(seed)
    found: dict[frozenset[int], Crash] = {}
    for crash in _crashes(disk, moments, source, samples):
        found.setdefault(crash.steps, crash)
    return list(found.values())


def _crashes(disk: Disk, moments: Sequence[Moment], source: random.Random, samples: int) -> Iterator[Crash]:
    for moment in moments:
        everything = frozenset(range(moment.steps))
        yield Crash(f"killed after {moment.calls} calls", everything)
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
