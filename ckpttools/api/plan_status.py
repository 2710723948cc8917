"""Report the progress of a plan's parts, and its running processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

from ckpttools.api.plans import (
    Planned,
    PublishedPlan,
    destination_of,
    find_published,
    is_new,
    open_plan,
    relocation_of,
)
from ckpttools.api.run_part import output_state
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import plural
from ckpttools.plan.parts import Part, dealt, parse_part
from ckpttools.plan.plan_file import PlanFile
from ckpttools.run.finished_tasks import index_ranges
from ckpttools.run.parts import finished_tasks
from ckpttools.stores.location import Location
from ckpttools.stores.relocation import Roots
from ckpttools.stores.shares import Member, Share, Standing

# A process with more than this multiple of the median remaining work is a straggler.
_STRAGGLER_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The progress of some tasks.

    Attributes:
        tasks, nbytes: Number of tasks, and the bytes that they read and write. `tasks_done` and `bytes_done`
            of them are done.
        bytes_per_second: Rate of the running processes; 0.0 if it is unknown.
        seconds_left: Time until all tasks are done at this rate; None if it is unknown or all tasks are done.
    """

    tasks: int
    tasks_done: int
    nbytes: int
    bytes_done: int
    bytes_per_second: float
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class PartStatus(TaskProgress):
    """A process that runs or ran a part, and the progress of its tasks.

    Attributes:
        part: Name of the part, such as "3/8".
        process: Description of the process.
        state: "at work", "done", "gone" (killed), or the error that ended the process.
        idle_seconds: Seconds since the last sign of activity.
        token: Unique identifier of the process.
        is_straggler: Whether the other processes will have to wait for this one.
    """

    part: str
    process: str
    state: str
    idle_seconds: float
    token: str
    is_straggler: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class PlanStatus(TaskProgress, Tabular):
    """The progress of a plan.

    Attributes:
        tasks, tasks_done, nbytes, bytes_done, bytes_per_second, seconds_left: Totals; see `TaskProgress`.
        destination: Location of the output.
        plan: Fingerprint of the plan.
        state: "not begun", "at work", "stopped" (tasks are missing, and no process is running), "done" (ready
            to be published), "published" (with files to remove next to it), "complete" (published, with
            nothing left to do), or "taken" (the destination has other content).
        other_content: Description of the other content.
        parts: Processes that are running, were killed, failed, or are done.
        missing: Ranges of tasks (first, one after the last) that are neither done nor in progress.
        num_parts: Number of parts that most running processes declare; if no process is running, the number
            that the last one declared; None if no part has started.
        not_started: Indices of parts with missing tasks that no process has started.
    """

    rows_field = "parts"

    destination: Location
    plan: str
    state: str
    other_content: str
    parts: tuple[PartStatus, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()
    num_parts: int | None = None
    not_started: tuple[int, ...] = ()

    @property
    def tasks_missing(self) -> int:
        """Return the number of tasks that are neither done nor in progress."""
        return sum(stop - first for first, stop in self.missing)

    def __repr__(self) -> str:
        states = Counter(part.state for part in self.parts)
        parts = "".join(f", {count} {state}" for state, count in states.items())
        done = f"{self.tasks_done} of {plural(self.tasks, 'task')}"
        return f"<PlanStatus of {self.destination}: {self.state}, {done}{parts}>"


@validate_arguments
def plan_status(plan: Planned, *, root: Roots = ()) -> PlanStatus:
    """Report the progress of a plan and its running processes. Takes no lock and changes nothing.

    Args:
        plan: The plan file.
        root: See `run_part`.

    Raises:
        StorageError: The destination cannot be inspected.
        CheckpointError: The plan cannot be read.
    """
    file = open_plan(plan)
    relocation, header = relocation_of(file, root), file.header
    destination = destination_of(header, relocation)
    status = output_state(header, destination)
    if not status.is_published and (result := find_published(file, destination)) is not None:
        return _complete(file, result)
    done = finished_tasks(status.all_records, header.tasks)
    left = {*range(header.tasks)} - done
    parts = _stragglers([_part_status(file, item, done) for item in _latest(status.members)])
    for member in status.members:
        if member.is_alive:
            left -= {*file.tasks_of(member.share.first, member.share.stop)}
    working = [part for part in parts if part.state == "at work"]
    lasting = [item.seconds_left for item in working if item.seconds_left is not None]
    count = _count(status.members)
    return PlanStatus(
        header.tasks,
        len(done),
        sum(file.groups),
        file.bytes_of_tasks(done),
        sum(item.bytes_per_second for item in working),
        max(lasting, default=None),
        destination,
        header.plan,
        _state(status, len(done) == header.tasks, bool(working), partial(_is_occupied, file, destination)),
        status.other,
        tuple(parts),
        tuple(index_ranges(sorted(left))) if status.is_begun else (),
        count,
        () if count is None else tuple(_unstarted_parts(file, count, parts, left)),
    )


def _complete(file: PlanFile, result: PublishedPlan) -> PlanStatus:
    tasks, nbytes = file.header.tasks, sum(file.groups)
    return PlanStatus(
        tasks, tasks, nbytes, nbytes, 0.0, None, result.destination, result.plan, result.state, ""
    )


def _count(members: Sequence[Member]) -> int | None:
    """Return `PlanStatus.count`; `members` are in the order in which they started."""
    working = [member for member in members if member.is_alive] or members[-1:]
    counts = [part.count for item in working if (part := _part_of(item.share)) is not None]
    # Of several equally frequent counts, choose the latest.
    return max(reversed(counts), key=counts.count, default=None)


def _part_of(share: Share) -> Part | None:
    """Return the part of a share; None if its name does not identify one."""
    try:
        return parse_part(share.name)
    except UsageError:
        return None


def _unstarted_parts(
    file: PlanFile, count: int, parts: Iterable[PartStatus], left: set[int]
) -> Iterator[int]:
    started, ends = {part.part for part in parts}, dealt(file.groups, count)
    for number, (first, stop) in enumerate(pairwise(ends)):
        if str(Part(number, count)) not in started and not left.isdisjoint(file.tasks_of(first, stop)):
            yield number


def _is_occupied(file: PlanFile, destination: Location, other: str) -> bool:
    """Return whether the destination has content that prevents parts from starting.

    Args:
        file: The plan.
        destination: Location of the output.
        other: Description of another unfinished output at the destination, or "".
    """
    # In a bucket, another conversion writes directly to the destination.
    return not file.header.overwrite if other else is_new(file, destination)


def _state(status: Standing, is_done: bool, is_at_work: bool, is_taken: Callable[[str], bool]) -> str:
    if status.is_published:
        return "published"
    if not status.is_begun:
        return "taken" if is_taken(status.other) else "not begun"
    if is_at_work:
        return "at work"
    return "done" if is_done else "stopped"


def _latest(members: Sequence[Member]) -> list[Member]:
    """Return the process of each share that started last, and all running processes."""
    last: Mapping[Share, Member] = {member.share: member for member in members}
    return [member for member in members if member.is_alive or last[member.share] is member]


def _part_status(file: PlanFile, member: Member, done: set[int]) -> PartStatus:
    tasks = file.tasks_of(member.share.first, member.share.stop)
    ready = [number for number in tasks if number in done]
    nbytes, bytes_done = file.bytes_of_tasks(tasks), file.bytes_of_tasks(ready)
    own = file.bytes_of_tasks(finished_tasks(member.records, file.header.tasks))
    now = time.time()
    seconds = (now if member.is_alive else member.seen) - member.began
    rate = own / seconds if own and seconds > 0 else 0.0
    is_done = len(ready) == len(tasks)
    return PartStatus(
        len(tasks),
        len(ready),
        nbytes,
        bytes_done,
        rate,
        (nbytes - bytes_done) / rate if rate and member.is_alive else None,
        member.share.name,
        member.process,
        "at work" if member.is_alive else "done" if is_done else member.outcome or "gone",
        max(0.0, now - member.seen),
        member.token,
    )


def _stragglers(parts: Sequence[PartStatus]) -> list[PartStatus]:
    """Mark the processes that others will wait for."""
    left = [part.seconds_left for part in parts if part.seconds_left is not None]
    if len(left) < 2:
        return list(parts)
    limit = _STRAGGLER_FACTOR * median(left)
    return [replace(part, is_straggler=(part.seconds_left or 0.0) > max(limit, 1.0)) for part in parts]
