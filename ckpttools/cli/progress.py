"""Listening to a run: a progress bar where stderr is a terminal, a line now and then where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ckpttools.cli.units import disk, duration, memory
from ckpttools.run.events import Event, Observer, Publishing, Started, TaskDone
from ckpttools.run.memory import current_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 5.0
# Before that, one small task decides what the rate seems to be.
_SECONDS_BEFORE_RATE = 0.5


@contextmanager
def listening(wanted: bool) -> Iterator[Observer]:
    """An observer that fits where stderr goes; silent unless `wanted`."""
    if not wanted:
        yield lambda event: None
    elif sys.stderr.isatty():
        with progress_bar() as progress:
            yield Bar(progress)
    else:
        yield Lines()


@dataclass
class Tally:
    """What is done, added up from events; the rate counts this run only."""

    total: int = 0
    done: int = 0
    before: int = 0
    started: float = 0.0

    def add(self, event: Event, now: float) -> None:
        if isinstance(event, Started):
            self.total, self.started = event.plan.bytes_out, now
            self.done = self.before = event.bytes_done
        elif isinstance(event, TaskDone):
            self.done += event.bytes_out

    def text(self, now: float) -> str:
        """`42 %  1.04 of 2.47 GB  1.31 GB/s  0:00:01 left  0.21 GiB resident`."""
        elapsed = now - self.started
        parts = [f"{100 * self.done // max(self.total, 1)} %", _of(self.done, self.total)]
        if elapsed >= _SECONDS_BEFORE_RATE and self.done > self.before:
            rate = (self.done - self.before) / elapsed
            parts += [f"{disk(rate)}/s", f"{duration((self.total - self.done) / rate)} left"]
        resident = current_bytes()
        if resident is not None:
            parts.append(f"{memory(resident)} resident")
        return "  ".join(parts)


def _of(done: int, total: int) -> str:
    """`1.04 of 2.47 GB`, or with both units where they differ."""
    first, second = disk(done), disk(total)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} of {second}"


@dataclass
class Lines:
    """Plain lines on stderr, at most one in five seconds; a run shorter than that says nothing."""

    clock: Callable[[], float] = time.monotonic
    tally: Tally = field(default_factory=Tally)
    last: float = 0.0

    def __call__(self, event: Event) -> None:
        now = self.clock()
        self.tally.add(event, now)
        if isinstance(event, Started):
            self.last = now
        elif isinstance(event, TaskDone) and now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            click.echo(self.tally.text(now), err=True)


@dataclass
class Bar:
    """A progress bar of rich's."""

    progress: Progress
    tally: Tally = field(default_factory=Tally)
    task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        self.tally.add(event, now)
        if isinstance(event, Started):
            self.task = self.progress.add_task("", total=event.plan.bytes_out, status="")
        if self.task is None:
            return
        status = "writing the index" if isinstance(event, Publishing) else self.tally.text(now)
        self.progress.update(self.task, completed=self.tally.done, status=status)


def progress_bar() -> Progress:
    """rich's bar with our own text, which says the same as the plain lines; gone when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=None), TextColumn("{task.fields[status]}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
