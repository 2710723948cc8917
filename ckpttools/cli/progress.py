"""Progress reports: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

from ckpttools.cli.output import chosen, has_color, print_json, print_stderr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.process_memory import current_bytes
from ckpttools.core.text import format_disk, format_duration, format_memory
from ckpttools.run.events import Comparing, Event, Fetching, Observer, Publishing, Started, TaskDone

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ckpttools.api.sources import Observe

LINE_INTERVAL_SECONDS = 5.0
_EVENT_SECONDS = 0.1
# Before this time, a single small task would distort the rate.
_RATE_DELAY_SECONDS = 0.5


@contextmanager
def progress_observer(expected: bool) -> Iterator[Observer]:
    """Show the progress of a run on stderr; silent unless `expected`."""
    with _display(expected) as display:
        yield Listener(display) if display else lambda event: None


@contextmanager
def progress_events(expected: bool) -> Iterator[Observe | None]:
    """Yield the `observe` argument of a reading function of `ckpttools`; None unless `expected`."""
    with _display(expected) as display:
        yield display.watch if display else None


@contextmanager
def _display(expected: bool) -> Iterator[Lines | Bar | JsonLines | None]:
    expected = expected and not chosen("quiet")
    if expected and chosen("jsonl"):
        yield JsonLines()
        return
    # A bar would interleave with the lines of --verbose.
    if expected and sys.stderr.isatty() and not chosen("verbose"):
        with ExitStack() as until:
            yield Bar(until)
    else:
        yield Lines() if expected else None


@dataclass
class Listener:
    """A counter of the events of a run."""

    display: Lines | Bar | JsonLines
    done: int = 0
    total: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Fetching | Comparing):
            self.display.watch(event.done, event.total)
        elif isinstance(event, Started):
            self.done, self.total = event.bytes_done, event.plan.bytes_out
            self.display.begin(self.done, self.total)
        elif isinstance(event, TaskDone):
            self.done += event.bytes_out
            self.display.show(self.done)
        elif isinstance(event, Publishing):
            self.display.publish()


@dataclass
class Tally:
    """Finished work. The rate counts only this run."""

    total: int = 0
    done: int = 0
    before: int = 0
    started: float = 0.0

    def text(self, now: float) -> str:
        """Format `42 %  1.04 of 2.47 GB  1.31 GB/s  0:00:01 left  0.21 GiB resident`."""
        elapsed = now - self.started
        parts = [f"{100 * self.done // max(self.total, 1)} %", _format_part(self.done, self.total)]
        if elapsed >= _RATE_DELAY_SECONDS and self.done > self.before:
            rate = (self.done - self.before) / elapsed
            parts += [f"{format_disk(rate)}/s", f"{format_duration((self.total - self.done) / rate)} left"]
        resident = current_bytes()
        if resident is not None:
            parts.append(f"{format_memory(resident)} resident")
        return "  ".join(parts)


def _format_part(done: int, total: int) -> str:
    """Format `1.04 of 2.47 GB`, or both units if they differ."""
    first, second = format_disk(done), format_disk(total)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} of {second}"


@dataclass
class Lines:
    """Prints plain lines on stderr, at most one every five seconds; short runs print none."""

    clock: Callable[[], float] = time.monotonic
    tally: Tally = field(default_factory=Tally)
    last: float = 0.0

    def begin(self, done: int, total: int) -> None:
        self.last = self.clock()
        self.tally = Tally(total, done, done, self.last)

    def show(self, done: int) -> None:
        now, self.tally.done = self.clock(), done
        if now - self.last >= LINE_INTERVAL_SECONDS:
            self.last = now
            print_stderr(self.tally.text(now))

    def publish(self) -> None:
        """Do nothing: the indexes have been written."""

    def watch(self, done: int, total: int) -> None:
        if done:
            self.show(done)
        else:
            self.begin(0, total)


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """A line of `--jsonl` while a command works.

    Attributes:
        done, total: Bytes done so far, including an earlier run, and total bytes.
        seconds: Seconds since the work began.
    """

    done: int
    total: int
    seconds: float


@dataclass
class JsonLines:
    """JSON objects on stdout: "start", "progress" at most ten times a second, and "publish".

    The result or the error follows as the last line.
    """

    clock: Callable[[], float] = time.monotonic
    total: int = 0
    done: int = 0
    started: float = 0.0
    last: float = 0.0

    def begin(self, done: int, total: int) -> None:
        self.started = self.last = self.clock()
        self.done, self.total = done, total
        self._print("start")

    def show(self, done: int) -> None:
        now, self.done = self.clock(), done
        if now - self.last >= _EVENT_SECONDS or done >= self.total:
            self.last = now
            self._print("progress")

    def publish(self) -> None:
        self._print("publish")

    def watch(self, done: int, total: int) -> None:
        if done:
            self.show(done)
        else:
            self.begin(0, total)

    def _print(self, event: str) -> None:
        seconds = round(self.clock() - self.started, 3)
        print_json(ProgressEvent(self.done, self.total, seconds), event=event)
        sys.stdout.flush()


@dataclass
class Bar:
    """A rich progress bar, from the first byte to the last."""

    until: ExitStack
    tally: Tally = field(default_factory=Tally)
    shown: tuple[Progress, TaskID] | None = None

    def begin(self, done: int, total: int) -> None:
        self._end()
        self.tally = Tally(total, done, done, time.monotonic())
        progress = self.until.enter_context(progress_bar())
        self.shown = progress, progress.add_task("", total=total, status="")
        self.show(done)

    def show(self, done: int) -> None:
        self.tally.done = done
        self._update(self.tally.text(time.monotonic()))

    def publish(self) -> None:
        self._update("writing the index")

    def _update(self, status: str) -> None:
        if self.shown:
            progress, task = self.shown
            progress.update(task, completed=self.tally.done, status=status)

    def watch(self, done: int, total: int) -> None:
        if self.shown is None and done < total:
            self.begin(0, total)
        self.show(done)
        if done >= total:
            self._end()

    def _end(self) -> None:
        self.until.close()
        self.shown = None


def progress_bar() -> Progress:
    """Create a rich bar with the text of the plain lines, removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = BarColumn(bar_width=None, style="bright_black", complete_style="default", finished_style="default")
    columns = (bar, TextColumn("{task.fields[status]}", markup=False))
    return Progress(
        *columns, console=Console(stderr=True, no_color=has_color() is False), transient=True, expand=True
    )
