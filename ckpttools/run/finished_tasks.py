"""Journal entries of finished tasks, and the selection of tasks to skip in a resumed run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError, listing
from ckpttools.core.message_terms import PLAN, action
from ckpttools.core.region import Shape
from ckpttools.core.text import plural
from ckpttools.formats.placement import ChunkFiles, Range
from ckpttools.plan.plan import Plan
from ckpttools.plan.task import Task
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Record
from ckpttools.stores.shares import members_command


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A finished task.

    Attributes:
        task: Index of the task in the plan.
        chunks: Locations of its encoded chunks by grid index.
        counts: Counters of its conversion, such as values that overflowed.
        bindings: The files that the task wrote, as text; see `ckpttools.run.bindings`.
        digest: Digest of the output; "" if all processes are known to read the same copy of the source.
        copy: Identity of the source copy that the task read (`ckpttools.run.source_copies`); set only if the
            task comes from a record.
        process: Process that did the task, for messages; set only if the task comes from a record.
    """

    task: int
    chunks: Mapping[Shape, Range]
    counts: Mapping[str, float] = field(default_factory=dict)
    bindings: tuple[str, ...] = ()
    digest: str = ""
    copy: str = ""
    process: str = ""

    def to_record(self, run: str, copy: str = "", process: str = "") -> Record:
        """Encode the task as a journal record.

        Args:
            run: ID of the run that finished it; see `ckpttools.run.bindings.new_run_id`.
            copy, process: See `ckpttools.run.source_copies.SourceCopy`.
        """
        chunks = [[index, item.file, item.offset, item.nbytes] for index, item in self.chunks.items()]
        return [self.task, chunks, dict(self.counts), [self.digest, copy, process], list(self.bindings), run]

    @classmethod
    def from_record(
        cls,
        task: int,
        chunks: list[list[object]],
        counts: Mapping[str, float],
        source: list[str],
        *binding: object,
    ) -> FinishedTask:
        """Decode the items of a record, without the bindings, which `select_sound_records` has checked.

        Raises:
            TypeError, ValueError: The items do not form such a record.
        """
        locations: dict[Shape, Range] = {tuple(index): Range(*location) for index, *location in chunks}  # type: ignore
        digest, copy, process = map(str, source)
        return cls(int(task), locations, dict(counts), (), digest, copy, process)


def select_kept_tasks(records: Iterable[Record], plan: Plan, content: Location) -> list[FinishedTask]:
    """Return the finished tasks of an earlier run whose bytes are still in their files.

    Args:
        records: Journal records of the tasks.
        plan: The plan of the tasks.
        content: Location of the unpublished checkpoint.
    """

    @cache
    def size(file: str) -> int:
        result = content.store.stat((content / file).key)
        return -1 if result is None else result.size

    result = {entry.task: entry for entry in entries(records) if 0 <= entry.task < len(plan.tasks)}

    def is_held(entry: FinishedTask) -> bool:
        # The size of a file that holds a single chunk must match exactly.
        is_exact = isinstance(plan.layout.placements[plan.tasks[entry.task].path].home, ChunkFiles)
        sizes = ((size(file), stop) for file, stop in _ends(entry, plan))
        return all(actual == stop if is_exact else actual >= stop for actual, stop in sizes)

    return [entry for entry in result.values() if is_held(entry)]


def unfinished_tasks(plan: Plan, done: Iterable[FinishedTask]) -> list[Task]:
    """Return the unfinished tasks of a plan."""
    finished = {entry.task for entry in done}
    return [task for number, task in enumerate(plan.tasks) if number not in finished]


class UnfinishedError(UsageError):
    """A checkpoint cannot be published because tasks are missing."""


def unfinished_error(
    missing: Sequence[int], count: int, location: object, got: str | None = None
) -> UnfinishedError:
    """Return the error that lists unfinished tasks.

    Args:
        missing: Sorted indexes of the tasks.
        count: Number of tasks in the plan.
        location: Location of the unfinished checkpoint.
        got: Description of active processes.
    """
    ask = members_command()
    rest = action("run_part", PLAN, "0/1")
    ranges_text = listing([_range_text(*index_range) for index_range in index_ranges(missing)], folds=False)
    return UnfinishedError(
        f"{len(missing)} of {plural(count, 'task')} are missing:{ranges_text}",
        location=location,
        got=got,
        expected="all parts finished",
        hint=f"{ask} lists the active processes; {rest} does the remaining tasks",
    )


def index_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as ranges (first, stop) without gaps."""
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and result[-1][1] == number:
            result[-1] = result[-1][0], number + 1
        else:
            result.append((number, number + 1))
    return result


def _range_text(first: int, stop: int) -> str:
    return f"task {first}" if stop == first + 1 else f"tasks {first} to {stop - 1}"


def entries(records: Iterable[Record]) -> Iterator[FinishedTask]:
    """Parse records, skipping malformed ones even if their checksums are right."""
    for record in records:
        try:
            yield FinishedTask.from_record(*record)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue


def _ends(entry: FinishedTask, plan: Plan) -> Iterator[tuple[str, int]]:
    """Iterate over the file and end offset of each range that a task wrote."""
    task = plan.tasks[entry.task]
    placement = plan.layout.placements[task.path]
    if placement.codec is None:
        if isinstance(placement.home, ChunkFiles):
            cells = placement.cells(task.region)
            yield from ((placement.home.name(index), placement.chunk_nbytes) for index in cells)
        else:
            yield from ((run.file, run.offset + run.nbytes) for run in placement.runs(task.region))
        return
    for index in placement.cells(task.region):
        location = entry.chunks.get(index)
        # An unknown location never passes the length check.
        yield ("", 1 << 62) if location is None else (location.file, location.offset + location.nbytes)
