"""How far the parts of a plan have come, who does what, and who is waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ckpttools.api.parts import destination_of, standing_of
from ckpttools.api.published import Published, published_at
from ckpttools.plan.plan_file import PlanFile
from ckpttools.run.entries import stretches
from ckpttools.run.parts import numbers_of
from ckpttools.stores.place import Place
from ckpttools.stores.relocation import AS_PLANNED, Relocation
from ckpttools.stores.shares import Member, Share, Standing

# A process that has more than so many times as much left to do as half of the others is waited for.
_STRAGGLES = 2.0


@dataclass(frozen=True, slots=True)
class PartStanding:
    """A process that does a part, or did.

    Attributes:
        part: which, such as "3/8".
        process: in words.
        state: "at work", "done", "gone" (it was cut off), or what has ended it.
        tasks, nbytes: of the part, whoever does them; `tasks_done` and `bytes_done` of them are done.
        bytes_per_second: read and written by this process; 0.0 where nothing is known yet.
        seconds_left: until the part is done at this rate; None where that is not known, or it is done.
        seen: seconds since its last sign of life.
        token: what tells it from all others.
        is_straggler: whether the others will have to wait for it.
    """

    part: str
    process: str
    state: str
    tasks: int
    tasks_done: int
    nbytes: int
    bytes_done: int
    bytes_per_second: float
    seconds_left: float | None
    seen: float
    token: str
    is_straggler: bool = False


@dataclass(frozen=True, slots=True)
class PlanStanding:
    """How far a plan has come.

    Attributes:
        destination: of the conversion.
        plan: fingerprint.
        state: "not begun", "at work", "stopped" (tasks are missing, and nobody is at work), "done" (it can be
            published), "published" (but for what is left beside it), "complete" (published, with nothing left
            to do), "taken" (something else is there).
        other: what else is there, in words.
        tasks, nbytes: of all; bytes that are read and written. `tasks_done`, `bytes_done` of them are done.
        bytes_per_second: of all that are at work.
        seconds_left: until the last part is done; None where that is not known.
        parts: the processes that are at work, were cut off or ended by an error, and those that are done.
        missing: stretches (first task, one after the last) that are not done and nobody is at work on.
    """

    destination: Place
    plan: str
    state: str
    other: str
    tasks: int
    tasks_done: int
    nbytes: int
    bytes_done: int
    bytes_per_second: float
    seconds_left: float | None
    parts: tuple[PartStanding, ...]
    missing: tuple[tuple[int, int], ...]


def plan_standing(file: PlanFile, *, relocation: Relocation = AS_PLANNED) -> PlanStanding:
    """How far a plan has come, who is at work, and who is waited for. Takes no lock, and changes nothing.

    Raises:
        StorageError: the destination cannot be looked at.
    """
    header = file.header
    destination = destination_of(header, relocation)
    standing = standing_of(header, destination)
    if not standing.is_begun and (found := published_at(file, destination)) is not None:
        return _complete(file, found)
    done = numbers_of(standing.all_records, header.tasks)
    left = {*range(header.tasks)} - done
    parts = _stragglers([_part_standing(file, each, done) for each in _latest(standing.members)])
    for each in standing.members:
        if each.is_alive:
            left -= {*file.tasks_of(each.share.first, each.share.stop)}
    working = [each for each in parts if each.state == "at work"]
    lasting = [each.seconds_left for each in working if each.seconds_left is not None]
    return PlanStanding(
        destination=destination,
        plan=header.plan,
        state=_state(standing, len(done) == header.tasks, bool(working), destination),
        other=standing.other,
        tasks=header.tasks,
        tasks_done=len(done),
        nbytes=sum(file.groups),
        bytes_done=file.bytes_of_tasks(done),
        bytes_per_second=sum(each.bytes_per_second for each in working),
        seconds_left=max(lasting, default=None),
        parts=tuple(parts),
        missing=tuple(stretches(sorted(left))) if standing.is_begun else (),
    )


def _complete(file: PlanFile, found: Published) -> PlanStanding:
    tasks, nbytes = file.header.tasks, sum(file.groups)
    return PlanStanding(
        found.destination, found.plan, found.state, "", tasks, tasks, nbytes, nbytes, 0.0, None, (), ()
    )


def _state(standing: Standing, is_done: bool, is_at_work: bool, destination: Place) -> str:
    if standing.is_published:
        return "published"
    if not standing.is_begun:
        return "taken" if standing.other or destination.exists() else "not begun"
    if is_at_work:
        return "at work"
    return "done" if is_done else "stopped"


def _latest(members: Sequence[Member]) -> list[Member]:
    """For each share the process that began last, and all that are at work."""
    last: Mapping[Share, Member] = {each.share: each for each in members}
    return [each for each in members if each.is_alive or last[each.share] is each]


def _part_standing(file: PlanFile, member: Member, done: set[int]) -> PartStanding:
    tasks = file.tasks_of(member.share.first, member.share.stop)
    ready = [number for number in tasks if number in done]
    nbytes, bytes_done = file.bytes_of_tasks(tasks), file.bytes_of_tasks(ready)
    own = file.bytes_of_tasks(numbers_of(member.records, file.header.tasks))
    now = time.time()
    seconds = (now if member.is_alive else member.seen) - member.began
    rate = own / seconds if own and seconds > 0 else 0.0
    is_done = len(ready) == len(tasks)
    state = "at work" if member.is_alive else "done" if is_done else member.outcome or "gone"
    left = (nbytes - bytes_done) / rate if rate and member.is_alive else None
    return PartStanding(
        member.share.name,
        member.process,
        state,
        len(tasks),
        len(ready),
        nbytes,
        bytes_done,
        rate,
        left,
        max(0.0, now - member.seen),
        member.token,
    )


def _stragglers(parts: Sequence[PartStanding]) -> list[PartStanding]:
    """Those that will be waited for are marked."""
    left = [each.seconds_left for each in parts if each.seconds_left is not None]
    if len(left) < 2:
        return list(parts)
    most = _STRAGGLES * median(left)
    return [replace(each, is_straggler=(each.seconds_left or 0.0) > max(most, 1.0)) for each in parts]
