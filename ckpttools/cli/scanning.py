"""Progress of commands that only read: what `ckpttools.api` tells as it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ckpttools.cli.progress import SECONDS_BETWEEN_LINES, Tally, progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ckpttools.api.sources import Observe

progress_option = click.option("--progress/--no-progress", default=True, help="Report progress on stderr.")


@contextmanager
def watching(wanted: bool) -> Iterator[Observe | None]:
    """What to give to a function that looks as `observe`: a bar where stderr is a terminal, else a line now
    and then; None unless `wanted`."""
    if not wanted:
        yield None
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        with ExitStack() as until:
            yield _Bar(until)


@dataclass
class _Lines:
    """Plain lines on stderr, at most one in five seconds."""

    tally: Tally = field(default_factory=Tally)
    last: float = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.tally.done = done
        if not done:
            self.tally.total, self.tally.started, self.last = total, now, now
        elif now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            click.echo(self.tally.text(now), err=True)


@dataclass
class _Bar:
    """A bar from the first byte to the last."""

    until: ExitStack
    tally: Tally = field(default_factory=Tally)
    shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.tally.done = done
        if self.shown is None:
            self.tally.total, self.tally.started = total, now
            progress = self.until.enter_context(progress_bar())
            self.shown = progress, progress.add_task("", total=total, status="")
        progress, task = self.shown
        progress.update(task, completed=done, status=self.tally.text(now))
        if done >= total:
            self.until.close()
