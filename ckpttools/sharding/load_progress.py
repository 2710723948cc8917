"""How far the processes of a job have come that load together, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field

from ckpttools.core.dataclass import dataclass
from ckpttools.sharding.processes import Processes

# Each process says so often how far it has come; the first of them tells of all.
_SAID_SECONDS = 5.0
_TOPIC = "progress"


@dataclass(frozen=True, slots=True)
class ProcessProgress:
    """How far a process has come.

    Attributes:
        process: its number.
        nbytes: that it makes; `bytes_done` of them are made.
        bytes_per_second: since it began.
    """

    process: int
    nbytes: int
    bytes_done: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, repr=False)
class JobProgress:
    """How far all have come that load together, as they have said.

    Attributes:
        count: how many there are.
        processes: those that have said something.
        waiting_for: the process for which process 0, and so all that have read their share, wait; None where
            nobody does.
    """

    count: int
    processes: tuple[ProcessProgress, ...]
    waiting_for: int | None = None

    def __repr__(self) -> str:
        done = sum(process.bytes_done for process in self.processes)
        nbytes = sum(process.nbytes for process in self.processes)
        rate = sum(process.bytes_per_second for process in self.processes)
        waits = "" if self.waiting_for is None else f", all wait for process {self.waiting_for}"
        last = min(
            self.processes, key=lambda process: process.bytes_done / max(1, process.nbytes), default=None
        )
        slowest = f", process {last.process} has least" if last and len(self.processes) > 1 else ""
        share = f"{100 * done // max(1, nbytes)} % of {nbytes:,} bytes, {rate:,.0f} bytes/s"
        return f"<JobProgress of {self.count:,} processes: {share}{slowest}{waits}>"


@dataclass
class Teller:
    """Says how far this process has come, and tells in process 0 of all.

    Attributes:
        processes: all of them.
        nbytes: that this one makes.
        tell: called now and then, in process 0.
    """

    processes: Processes
    nbytes: int
    tell: Callable[[JobProgress], None]
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    declared: float = 0.0

    def add(self, nbytes: int) -> None:
        """So many bytes more are made."""
        self.done += nbytes
        if time.monotonic() - self.declared >= _SAID_SECONDS or self.done == self.nbytes:
            self.say()

    def say(self, waiting_for: int | None = None) -> None:
        """Says it now."""
        self.declared = time.monotonic()
        rate = self.done / max(1e-9, self.declared - self.began)
        self.processes.note(_TOPIC, f"{self.nbytes} {self.done} {rate:.0f}")
        if self.processes.number == 0:
            noted = sorted(self.processes.noted(_TOPIC).items())
            result = [ProcessProgress(number, *map(int, text.split())) for number, text in noted]
            self.tell(JobProgress(self.processes.count, tuple(result), waiting_for))

    def waits(self, topic: str) -> None:
        """Process 0 waits for what another is to say; the number of that ends the topic."""
        number = topic.rpartition("/")[2]
        if self.processes.number == 0 and number.isdigit():
            self.say(int(number))
