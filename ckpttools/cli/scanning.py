"""Progress of commands that only read: what `ckpttools.run.scanning.scan` tells as it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ckpttools.cli.progress import SECONDS_BETWEEN_LINES, Tally, progress_bar

progress_option = click.option("--progress/--no-progress", default=True, help="Report progress on stderr.")


@contextmanager
def watching(wanted: bool, total: int) -> Iterator[Callable[[int], None]]:
    """What to give to `scan` as `observe`: a bar where stderr is a terminal, else a line now and then.

    Args:
        wanted: whether to say anything.
        total: bytes that will be read.
    """
    tally = Tally(total=total, started=time.monotonic())
    if not wanted:
        yield lambda nbytes: None
    elif not sys.stderr.isatty():
        yield _lines(tally)
    else:
        with progress_bar() as progress:
            task = progress.add_task("", total=total, status="")

            def observe(nbytes: int) -> None:
                tally.done += nbytes
                progress.update(task, completed=tally.done, status=tally.text(time.monotonic()))

            yield observe


def _lines(tally: Tally) -> Callable[[int], None]:
    last = tally.started

    def observe(nbytes: int) -> None:
        nonlocal last
        tally.done += nbytes
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            click.echo(tally.text(now), err=True)

    return observe
