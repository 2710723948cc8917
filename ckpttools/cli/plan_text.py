"""A plan, its notes and the closing line, for people and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ckpttools.cli.units import count, counted, disk, exact, memory
from ckpttools.ir.kinds import role
from ckpttools.ir.tree import spelled
from ckpttools.notes import Note, Notes
from ckpttools.plan.plan import Plan
from ckpttools.run.events import Receipt

_FIRST_NAMES = 5


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """One array of the destination."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunk: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What `--dry-run` shows.

    Attributes:
        parameters: elements of all arrays of the destination but the step.
        memory: bytes allowed; `projected_peak` of them will be used at most.
        inexact, values: value changes that are not, and that are, undone to the bit.
        dropped: source arrays left out on purpose.
        files: data files of the destination with their sizes.
    """

    source: Path
    destination: Path
    arrays: int
    parameters: int
    bytes_in: int
    bytes_out: int
    tasks: int
    jobs: int
    memory: int
    projected_peak: int
    inexact: tuple[Note, ...]
    values: tuple[Note, ...]
    dropped: tuple[str, ...]
    files: Mapping[str, int]
    array_list: tuple[PlannedArray, ...]


def describe(plan: Plan, source: Path, destination: Path) -> PlanReport:
    """The plan as data."""
    arrays = plan.tree.arrays
    return PlanReport(
        source=source,
        destination=destination,
        arrays=len(arrays),
        parameters=sum(array.size for path, array in arrays.items() if role(path) == "parameter"),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        tasks=len(plan.tasks),
        jobs=plan.jobs,
        memory=plan.memory,
        projected_peak=plan.projected_peak,
        inexact=plan.notes.inexact,
        values=plan.notes.values,
        dropped=plan.notes.dropped,
        files=plan.layout.files,
        array_list=tuple(_planned(plan)),
    )


def _planned(plan: Plan) -> Iterator[PlannedArray]:
    for path, array in plan.tree.arrays.items():
        chunk = plan.layout.placements[path].chunk
        yield PlannedArray(spelled(path), array.shape, array.dtype.name, array.nbytes, chunk)


def print_plan(report: PlanReport) -> None:
    """The plan as text on stdout."""
    arrays = f"{counted(report.arrays, 'array')}, {count(report.parameters)} parameters"
    peak = f"{memory(report.projected_peak)} at most, of {memory(report.memory)} allowed"
    pairs = [
        ("from", str(report.source)),
        ("to", str(report.destination)),
        ("arrays", arrays),
        ("read", exact(report.bytes_in)),
        ("write", exact(report.bytes_out)),
        *(("file", f"{name}, {disk(nbytes)}") for name, nbytes in report.files.items()),
        ("work", f"{counted(report.tasks, 'task')}, {counted(report.jobs, 'worker')}"),
        ("memory", peak),
        *(("changed", _spelled(note)) for note in report.values),
        *_warnings(report.inexact, report.dropped),
    ]
    for label, text in pairs:
        click.echo(f"{label:<8} {text}")
    click.echo("\nDry run: nothing was written. --json lists every array with its chunks.")


def print_notes(notes: Notes) -> None:
    """What the user should know before the work begins, on stderr."""
    for label, text in _warnings(notes.inexact, notes.dropped):
        click.echo(f"{label:<8} {text}", err=True)


def closing_line(receipt: Receipt) -> str:
    """What a finished run did, in one line."""
    rate = (receipt.bytes_out - receipt.bytes_resumed) / max(receipt.seconds, 1e-9)
    parts = [
        counted(receipt.arrays, "array"),
        f"{disk(receipt.bytes_out)} in {receipt.seconds:.2f} s ({disk(rate)}/s)",
    ]
    if receipt.peak_bytes is not None:
        parts.append(f"peak memory {memory(receipt.peak_bytes)}")
    if receipt.tasks_resumed:
        parts.append(f"{receipt.tasks_resumed} of {counted(receipt.tasks, 'task')} were done before")
    return f"{receipt.destination}: {', '.join(parts)}"


def _spelled(note: Note) -> str:
    return f"{note.subject}: {note.text}"


def _warnings(inexact: Sequence[Note], dropped: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Labelled lines: what will not come back to the bit, and how many arrays are left out."""
    for note in inexact:
        yield "INEXACT", _spelled(note)
    if dropped:
        more = ", …" if len(dropped) > _FIRST_NAMES else ""
        yield "dropped", f"{counted(len(dropped), 'array')}: {', '.join(dropped[:_FIRST_NAMES])}{more}"
