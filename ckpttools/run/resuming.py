"""What an earlier run left and this one can build on: tasks whose bytes are still in their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ckpttools.plan.plan import Plan
from ckpttools.run.journal import Entry


def kept(entries: Iterable[Entry], plan: Plan, content: Path) -> list[Entry]:
    """The entries of a journal whose tasks need not be done again.

    Args:
        entries: finished tasks of the plan.
        plan: theirs.
        content: the directory in which the checkpoint grows.
    """

    @cache
    def size(file: str) -> int:
        try:
            return (content / file).stat().st_size
        except OSError:
            return -1

    found = {entry.task: entry for entry in entries if 0 <= entry.task < len(plan.tasks)}
    return [entry for entry in found.values() if all(size(file) >= stop for file, stop in _ends(entry, plan))]


def _ends(entry: Entry, plan: Plan) -> Iterator[tuple[str, int]]:
    """File and end of each range that a task wrote."""
    task = plan.tasks[entry.task]
    placement = plan.layout.placements[task.path]
    if placement.codec is None:
        yield from ((run.file, run.offset + run.nbytes) for run in placement.runs(task.region))
        return
    for index in placement.cells(task.region):
        place = entry.chunks.get(index)
        # Without a place no file is long enough.
        yield ("", 1 << 62) if place is None else (place.file, place.offset + place.nbytes)
