"""What the zygote is asked for, and what a run leaves."""

from __future__ import annotations

from dataclasses import dataclass

from crash.handlers import Fault
from crash.taps import Call


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run.

    Attributes:
        args: after `ckpt`.
        root: directory below which its calls are seen.
        notes: directory for its output and what was noted.
        fault: that it meets.
        turns: address of who says when it may go on.
        exchange: whether the system can exchange two names.
    """

    args: tuple[str, ...]
    root: str
    notes: str
    fault: Fault | None = None
    turns: str | None = None
    exchange: bool = True


@dataclass(frozen=True, slots=True)
class Notes:
    """What a run leaves for who started it."""

    calls: tuple[Call, ...]
    counts: dict[str, int]
    modules: tuple[str, ...]
