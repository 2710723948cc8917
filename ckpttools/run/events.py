"""What a run tells whoever listens. The library never prints; the command line listens and does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpttools.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Started:
    """Work begins.

    Attributes:
        plan: all of it.
        tasks_done, bytes_done: what an earlier run had finished.
    """

    plan: Plan
    tasks_done: int
    bytes_done: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A task has written all its bytes."""

    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Publishing:
    """All data is written; index and metadata follow, then the final name."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a finished run did.

    Attributes:
        destination: the final name.
        arrays: arrays in the destination.
        tasks: tasks of the plan; `tasks_resumed` of them were done by an earlier run.
        bytes_in, bytes_out: bytes of all tasks; `bytes_resumed` of the output by an earlier run.
        seconds: wall time of this run, planning left out.
        peak_bytes: resident memory at its highest, or None where the system does not tell.
    """

    destination: Path
    arrays: int
    tasks: int
    tasks_resumed: int
    bytes_in: int
    bytes_out: int
    bytes_resumed: int
    seconds: float
    peak_bytes: int | None


Event = Started | TaskDone | Publishing | Receipt
Observer = Callable[[Event], None]
