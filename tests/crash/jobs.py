"""Requests to the zygote, and the records of a run."""

from __future__ import annotations

from dataclasses import dataclass

from crash.handlers import Fault
from crash.taps import Call


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run.

    Attributes:
        args: Arguments after `ckpt`.
        root: Directory below which calls are intercepted.
        notes: Directory for the output and the records.
        fault: Fault to inject.
        turns: Address of the process that grants turns.
        exchange: Whether the system supports exchanging two names.
    """

    args: tuple[str, ...]
    root: str
    notes: str
    fault: Fault | None = None
    turns: str | None = None
    exchange: bool = True


@dataclass(frozen=True, slots=True)
class Notes:
    """Records of a run."""

    calls: tuple[Call, ...]
    counts: dict[str, int]
    modules: tuple[str, ...]
