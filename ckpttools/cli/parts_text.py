"""Parts of a plan, and how far they have come, for people."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.api.standing import PartStanding, PlanStanding
from ckpttools.cli.units import disk, duration
from ckpttools.core.text import plural
from ckpttools.run.parts import PartReceipt

_STATES = {
    "not begun": "not begun",
    "at work": "at work",
    "stopped": "stopped: nobody is at work, and tasks are missing",
    "done": "all parts are done; next: ckpt run PLAN --publish",
    "published": "published; ckpt run PLAN --publish removes what is left beside it",
    "complete": "published; nothing is left to do",
    "taken": "nothing of this plan is in the making",
}
_MOST_STRETCHES = 10


def part_line(receipt: PartReceipt) -> str:
    """What a process did of a plan, in one line."""
    if receipt.is_published:
        return f"part {receipt.part}: nothing to do, {receipt.destination} is complete and has its name"
    if not receipt.tasks:
        return f"part {receipt.part}: nothing to do, there are fewer tasks than parts"
    new = receipt.bytes_out - receipt.bytes_resumed
    rate = f" ({disk(new / receipt.seconds)}/s)" if new and receipt.seconds else ""
    done = f"{plural(receipt.tasks, 'task')}, {disk(receipt.bytes_out)} in {receipt.seconds:.2f} s{rate}"
    before = f", {receipt.tasks_resumed} of them done before" if receipt.tasks_resumed else ""
    return f"part {receipt.part} of {receipt.destination}: {done}{before}"


def status_lines(found: PlanStanding) -> Iterator[str]:
    """All that is known, a line for each process."""
    yield f"{found.destination}: {_STATES[found.state]}"
    if found.state == "taken":
        complete = "something complete: what this plan makes, if it was published before"
        yield f"there is {found.other or complete}"
        return
    share = 100 * found.bytes_done // max(1, found.nbytes)
    done = f"{found.tasks_done} of {plural(found.tasks, 'task')}, {share} % of {disk(found.nbytes)}"
    rate = f", {disk(found.bytes_per_second)}/s" if found.bytes_per_second else ""
    left = f", {duration(found.seconds_left)} left" if found.seconds_left is not None else ""
    yield f"all      {done}{rate}{left}"
    for each in found.parts:
        yield f"{each.part:<8} {_part(each)}"
    spelled = [f"{first} to {stop - 1}" if stop > first + 1 else f"{first}" for first, stop in found.missing]
    if spelled:
        more = f" and {len(spelled) - _MOST_STRETCHES} more" if len(spelled) > _MOST_STRETCHES else ""
        yield f"nobody   is at work on tasks {', '.join(spelled[:_MOST_STRETCHES])}{more}"


def _part(each: PartStanding) -> str:
    share = 100 * each.bytes_done // max(1, each.nbytes)
    words = [each.state, f"{each.tasks_done} of {plural(each.tasks, 'task')}, {share} %"]
    if each.bytes_per_second:
        words.append(f"{disk(each.bytes_per_second)}/s")
    if each.seconds_left is not None:
        words.append(f"{duration(each.seconds_left)} left")
    words.append(each.process)
    if each.state == "gone" or (each.state == "at work" and each.seen > 60):
        words.append(f"last seen {duration(each.seen)} ago")
    if each.is_straggler:
        words.append("the others will wait for it")
    return ", ".join(words)


def waiting_line(found: PlanStanding) -> str:
    """Who is waited for, in one line."""
    missing = found.tasks - found.tasks_done
    working = sorted((each for each in found.parts if each.state == "at work"), key=_left)
    if not missing and working:
        return f"part {working[-1].part} ({working[-1].process}) has done its tasks, and has not ended yet"
    text = f"{missing} of {plural(found.tasks, 'task')} missing"
    if working:
        last = working[-1]
        left = f", {duration(last.seconds_left)} left" if last.seconds_left is not None else ""
        text += (
            f"; waiting for {plural(len(working), 'part')}, longest for {last.part} ({last.process}{left})"
        )
    nobody = sum(stop - first for first, stop in found.missing)
    if nobody or not working:
        text += f"; nobody is at work on {plural(nobody or missing, 'task')}"
    return text


def _left(each: PartStanding) -> float:
    return float("inf") if each.seconds_left is None else each.seconds_left
