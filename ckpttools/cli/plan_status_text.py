"""Text about the parts of a plan and their progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from shlex import quote

from ckpttools.api.plan_status import PartStatus, PlanStatus
from ckpttools.core.text import first_names, plural
from ckpttools.core.units import format_disk, format_duration
from ckpttools.run.entries import index_ranges
from ckpttools.run.parts import PartReceipt

_STATES = {
    "not begun": "not begun",
    "at work": "at work",
    "stopped": "stopped: no process is running, and tasks are missing",
    "done": "all parts are done; next: ckpt run {plan} --publish",
    "published": "published; ckpt run {plan} --publish removes the files left next to it",
    "complete": "published; nothing is left to do",
    "taken": "no unfinished output of this plan exists",
}
_MAX_GROUPS = 10
# Maximum number of processes that are listed one by one.
_MAX_DONE = 16
_ORDER = ("done", "at work", "gone", "failed")


def part_line(receipt: PartReceipt) -> str:
    """Return a one-line summary of a part."""
    if receipt.is_published:
        return f"part {receipt.part}: nothing to do, {receipt.destination} is complete and published"
    if not receipt.tasks:
        return f"part {receipt.part}: nothing to do, there are fewer tasks than parts"
    new = receipt.bytes_out - receipt.bytes_resumed
    rate = f" ({format_disk(new / receipt.seconds)}/s)" if new and receipt.seconds else ""
    done = (
        f"{plural(receipt.tasks, 'task')}, {format_disk(receipt.bytes_out)} in {receipt.seconds:.2f} s{rate}"
    )
    before = f", {receipt.tasks_resumed} of them done before" if receipt.tasks_resumed else ""
    return f"part {receipt.part} of {receipt.destination}: {done}{before}"


def status_lines(result: PlanStatus, plan: str) -> Iterator[str]:
    """Yield all facts about a plan, with a line for each process."""
    yield f"{result.destination}: {_STATES[result.state].format(plan=quote(plan))}"
    if result.state == "taken":
        complete = "a complete checkpoint, possibly the published output of this plan"
        yield f"there is {result.other or complete}"
        return
    share = 100 * result.bytes_done // max(1, result.nbytes)
    done = f"{result.tasks_done} of {plural(result.tasks, 'task')}, {share} % of {format_disk(result.nbytes)}"
    rate = f", {format_disk(result.bytes_per_second)}/s" if result.bytes_per_second else ""
    left = f", {format_duration(result.seconds_left)} left" if result.seconds_left is not None else ""
    yield f"all      {done}{rate}{left}"
    if result.count is not None:
        yield f"parts    {_part_lines(result, result.count)}"
    is_folded = sum(part.state == "done" for part in result.parts) > _MAX_DONE
    for part in result.parts:
        if not (is_folded and part.state == "done"):
            yield f"{part.part:<8} {_part_text(part)}"
    if result.missing:
        which = f"{plural(result.tasks_missing, 'task')}: {_group_parts(result.missing)}"
        yield f"missing  {which}; no process is working on them"


def _part_lines(result: PlanStatus, count: int) -> str:
    """Return the number of parts in each state: `of 16: 9 done, 3 at work, 4 not begun (12/16 to 15/16)`."""
    own = {part.part: part.state for part in result.parts if part.part.endswith(f"/{count}")}
    states = Counter(state if state in _ORDER else "failed" for state in own.values())
    # Parts that were not started and have no tasks left were done by other parts.
    states["done"] += count - len(own) - len(result.not_begun)
    declared = [f"{states[state]} {state}" for state in _ORDER if states[state]]
    if result.not_begun:
        which = _group_parts(index_ranges(result.not_begun), f"/{count}")
        declared.append(f"{len(result.not_begun)} not begun ({which})")
    others = [part.part for part in result.parts if part.state == "at work" and part.part not in own]
    if others:
        declared.append(f"{len(others)} of other divisions at work ({', '.join(others[:_MAX_GROUPS])})")
    return f"of {count}: {', '.join(declared)}"


def _group_parts(numbers: Sequence[tuple[int, int]], of: str = "") -> str:
    spelled = [
        f"{first}{of} to {stop - 1}{of}" if stop > first + 1 else f"{first}{of}" for first, stop in numbers
    ]
    return first_names(spelled, _MAX_GROUPS)


def _part_text(each: PartStatus) -> str:
    share = 100 * each.bytes_done // max(1, each.nbytes)
    words = [each.state, f"{each.tasks_done} of {plural(each.tasks, 'task')}, {share} %"]
    if each.bytes_per_second:
        words.append(f"{format_disk(each.bytes_per_second)}/s")
    if each.seconds_left is not None:
        words.append(f"{format_duration(each.seconds_left)} left")
    words.append(each.process)
    if each.state == "gone" or (each.state == "at work" and each.seen > 60):
        words.append(f"last seen {format_duration(each.seen)} ago")
    if each.is_straggler:
        words.append("the others will wait for it")
    return ", ".join(words)


def waiting_line(result: PlanStatus) -> str:
    """Return one line about the running processes."""
    missing = result.tasks - result.tasks_done
    working = sorted((part for part in result.parts if part.state == "at work"), key=_remaining_text)
    if not missing and working:
        return f"part {working[-1].part} ({working[-1].process}) has done its tasks, and has not ended yet"
    text = f"{missing} of {plural(result.tasks, 'task')} missing"
    if working:
        last = working[-1]
        left = f", {format_duration(last.seconds_left)} left" if last.seconds_left is not None else ""
        text += (
            f"; waiting for {plural(len(working), 'part')}, longest for {last.part} ({last.process}{left})"
        )
    idle = result.tasks_missing
    if idle or not working:
        text += f"; no process is working on {plural(idle or missing, 'task')}"
    return text


def _remaining_text(each: PartStatus) -> float:
    return float("inf") if each.seconds_left is None else each.seconds_left
