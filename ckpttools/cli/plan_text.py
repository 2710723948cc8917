"""Text of a plan: its tasks, notes, parts and their progress, and the closing lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING

from ckpttools.api.plan_report import PlanReport, fold_renames
from ckpttools.api.plan_status import PartStatus, PlanStatus
from ckpttools.cli.output import format_labeled, print_lines, print_stderr, prose_width, width
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import (
    first_names,
    format_count,
    format_disk,
    format_duration,
    format_exact,
    format_memory,
    plural,
    printable,
    sample_names,
)
from ckpttools.run.events import Receipt
from ckpttools.run.finished_tasks import index_ranges
from ckpttools.run.parts import PartReceipt
from ckpttools.stores.publishing import Published
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.api.chunks import MeshReads
    from ckpttools.api.next_steps import NextSteps
    from ckpttools.inspection.chunks import LoadCost


_FIRST_NAMES = 5
_MAX_FOLDED = 10_000
_LOST_TEXTS = {
    "overflowed": "became infinite or NaN",
    "saturated": "clipped",
    "underflowed": "became zero",
    "nan_lost": "that were NaN became a number",
}


def print_plan(report: PlanReport) -> None:
    """Print the plan as text on stdout."""
    arrays = f"{plural(report.arrays, 'array')}, {format_count(report.parameters)} parameters"
    peak = f"{format_memory(report.projected_peak)} at most, of {format_memory(report.memory)} allowed"
    pairs = [
        ("from", str(report.source)),
        ("to", str(report.destination)),
        ("arrays", arrays),
        ("read", format_exact(report.bytes_in)),
        ("write", format_exact(report.bytes_out)),
        *(("file", f"{name}, {format_disk(nbytes)}") for name, nbytes in report.files.items()),
        *_shared_line(report),
        ("work", f"{plural(report.tasks, 'task')}, {plural(report.jobs, 'worker')}"),
        ("memory", peak),
        *(("changed", text) for text in _note_lines(report.values)),
        *(("note", text) for text in report.remarks),
        *_warning_lines(report.inexact, report.dropped),
    ]
    for label, text in pairs:
        print_lines(_plan_lines(label, text) if label in _SENTENCE_END else [f"{label:<8} {text}"])
    if report.renames:
        print_lines(rename_lines(report))
    if report.mesh_reads:
        print_lines(mesh_read_lines(report.mesh_reads))
    print_lines(["", "Dry run: nothing was written. --json lists every array with its chunks."])


# As many lines as the rest of a plan leaves of a screen.
_MAX_RENAMES = 20


def rename_lines(report: PlanReport) -> Iterator[str]:
    """Yield the old and new names, folded, and the number of arrays that keep their names."""
    changed = {item.name for item in report.renames}
    same = [array.path for array in report.array_list if array.path not in changed]
    rearranged = sum(item.is_rearranged for item in report.renames)
    more = f", {rearranged:,} of them rearranged" if rearranged else ""
    yield f"renamed  {plural(len(report.renames), 'array')}{more}"
    lines = [printable(line) for line in fold_renames(report.renames)]
    for line in lines[:_MAX_RENAMES]:
        old, arrow, new = line.partition(" -> ")
        is_long = len(line) + _COLUMN > (width() or len(line) + _COLUMN)
        yield from (f"{'':9}{old}", f"{'':11}-> {new}") if is_long else (f"{'':9}{old}{arrow}{new}",)
    if len(lines) > _MAX_RENAMES:
        yield f"         … and {len(lines) - _MAX_RENAMES:,} more lines; --json has all names"
    if same:
        yield from _plan_lines("same", f"{plural(len(same), 'array')}: {printable(sample_names(same))}")


def mesh_read_lines(reads: MeshReads) -> Iterator[str]:
    """Yield lines about the reads of a mesh's devices before and after."""
    mesh = ",".join(f"{name}={length}" for name, length in reads.before.mesh.items())
    of = f"a device of {mesh}, {reads.before.spec}, needs {format_disk(reads.after.needed)} and fetches "
    yield from _plan_lines("before", of + _fetched_text(reads.before))
    yield from _plan_lines("after", _fetched_text(reads.after))
    if reads.is_regression:
        yield from _plan_lines(
            "note",
            "devices will fetch more from DST than from SRC: arrays of up to 4 MiB, or --subchunks, are "
            "one chunk each, which all devices fetch whole; smaller --subchunks cut them",
        )
    elif not reads.is_improvement:
        yield from _plan_lines(
            "note",
            "no gain: devices fetch as much from SRC; DST only records how arrays are sharded over the mesh",
        )


def print_gain(receipt: Receipt) -> None:
    """Print the reads of a mesh's devices before and after on stderr, if there is a mesh."""
    from ckpttools.api.reshard import Resharded

    if isinstance(receipt, Resharded) and receipt.mesh_reads:
        print_stderr(*mesh_read_lines(receipt.mesh_reads))


def _fetched_text(loading: LoadCost) -> str:
    reads = plural(loading.reads, "read")
    return f"{format_disk(loading.fetched)} in {reads}, over-read {loading.over_read:.2f}"


_SENTENCE_END = ("changed", "note", "INEXACT", "dropped", "share")


def _plan_lines(label: str, text: str) -> list[str]:
    return format_labeled(label, text, 9, prose_width())


def _shared_line(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield labeled lines about data that is not written."""
    if report.bytes_referenced:
        dead = (
            f", which hold {format_disk(report.bytes_unreferenced)} more" if report.bytes_unreferenced else ""
        )
        where = f"linked from {plural(len(report.links), 'file')}{dead}" if report.links else "in the index"
        yield "share", f"{format_exact(report.bytes_referenced)}, {where}"


def print_notes(notes: Notes, remarks: Sequence[str] = ()) -> None:
    """Print the plan's notes on stderr before the work starts."""
    for text in remarks:
        print_stderr(*_plan_lines("note", text))
    for label, text in _warning_lines(notes.inexact, notes.dropped):
        print_stderr(*_plan_lines(label, text))


def closing_line(receipt: Receipt) -> str:
    """Return a one-line summary of a finished run."""
    rate = (receipt.bytes_out - receipt.bytes_resumed) / max(receipt.seconds, 1e-9)
    # A rate is meaningless for links.
    speed = f" ({format_disk(rate)}/s)" if rate and not receipt.bytes_referenced else ""
    parts = [
        plural(receipt.arrays, "array"),
        f"{format_disk(receipt.bytes_out)} in {receipt.seconds:.2f} s{speed}",
    ]
    if receipt.bytes_referenced:
        parts.append(
            f"{format_disk(receipt.bytes_referenced - receipt.bytes_unlinked)} shared with the source"
        )
    if receipt.bytes_unlinked:
        parts.append(f"{format_disk(receipt.bytes_unlinked)} copied because links were refused")
    if receipt.peak_bytes is not None:
        parts.append(f"peak memory {format_memory(receipt.peak_bytes)}")
    if receipt.tasks_resumed:
        verb = "was" if receipt.tasks_resumed == 1 else "were"
        parts.append(f"{receipt.tasks_resumed} of {plural(receipt.tasks, 'task')} {verb} done before")
    parts += _lost_texts(receipt.counts)
    if receipt.source and parse(receipt.source).store.scheme != "file":
        parts.append(f"from {receipt.source}")
    return f"{receipt.destination}: {', '.join(parts)}{published_text(receipt.published)}"


def advice_lines(notes: Notes) -> Iterator[str]:
    """Yield the advice on a result."""
    for text in notes.advice:
        yield from format_labeled("advice", text, _COLUMN, prose_width())


def published_text(published: Published | None) -> str:
    """Return a line with the URL, visibility and commit of the published checkpoint."""
    if published is None:
        return ""
    readers = "private" if published.is_private else "public"
    return f"\n{published.url}: {readers}, commit {published.commit}"


def _lost_texts(counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield `3 values overflowed in 1 array` for each kind of `Receipt.counts`."""
    for kind, text in _LOST_TEXTS.items():
        numbers = [item[kind] for item in counts.values() if kind in item]
        if numbers:
            yield f"{plural(sum(numbers), 'value')} {text} in {plural(len(numbers), 'array')}"


def _note_lines(notes: Sequence[Note]) -> Iterator[str]:
    """Format notes, joining those with the same text."""
    notes_by_text: dict[str, list[Note]] = {}
    for note in notes:
        notes_by_text.setdefault(note.text, []).append(note)
    yield from (f"{_subject_text(declared)}: {text}" for text, declared in notes_by_text.items())


def _subject_text(notes: Sequence[Note]) -> str:
    """Return the subject of a line: the first row, or the total number of arrays."""
    numbers = [note.arrays for note in notes if note.arrays is not None]
    rows = [note.subject for note in notes if note.arrays is None]
    first = [first_names(rows)] if rows else []
    return " and ".join([*first, *([plural(sum(numbers), "array")] if numbers else [])])


def _warning_lines(inexact: Sequence[Note], dropped: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield labeled lines about inexact values and the number of dropped arrays."""
    for text in _note_lines(inexact):
        yield "INEXACT", text
    if dropped:
        # Folding 90,000 names takes 3 s.
        is_long = len(dropped) > _MAX_FOLDED
        names = first_names(dropped, _FIRST_NAMES) if is_long else sample_names(dropped, _FIRST_NAMES)
        yield "dropped", f"{plural(len(dropped), 'array')}: {names}"


_COLUMN = 9


def print_next(steps: NextSteps) -> None:
    """Print commands that load a model checkpoint, and caveats."""
    lines = [f"{'next' if not number else '':<{_COLUMN}}{use}" for number, use in enumerate(steps.uses)]
    for surprise in steps.surprises:
        lines += format_labeled("note", surprise, _COLUMN, prose_width())
    if lines:
        print_stderr(*lines)


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
        yield f"the destination has {result.other_content or complete}"
        return
    share = 100 * result.bytes_done // max(1, result.nbytes)
    done = f"{result.tasks_done} of {plural(result.tasks, 'task')}, {share} % of {format_disk(result.nbytes)}"
    rate = f", {format_disk(result.bytes_per_second)}/s" if result.bytes_per_second else ""
    left = f", {format_duration(result.seconds_left)} left" if result.seconds_left is not None else ""
    yield f"all      {done}{rate}{left}"
    if result.num_parts is not None:
        yield f"parts    {_parts_text(result, result.num_parts)}"
    is_folded = sum(part.state == "done" for part in result.parts) > _MAX_DONE
    for part in result.parts:
        if not (is_folded and part.state == "done"):
            yield f"{part.part:<8} {_part_text(part)}"
    if result.missing:
        parts_text = f"{plural(result.tasks_missing, 'task')}: {_group_parts(result.missing)}"
        yield f"missing  {parts_text}; no process is working on them"


def _parts_text(result: PlanStatus, count: int) -> str:
    """Return the number of parts in each state: `of 16: 9 done, 3 at work, 4 not begun (12/16 to 15/16)`."""
    own = {part.part: part.state for part in result.parts if part.part.endswith(f"/{count}")}
    states = Counter(state if state in _ORDER else "failed" for state in own.values())
    # Parts that were not started and have no tasks left were done by other parts.
    states["done"] += count - len(own) - len(result.not_started)
    values = [f"{states[state]} {state}" for state in _ORDER if states[state]]
    if result.not_started:
        parts_text = _group_parts(index_ranges(result.not_started), f"/{count}")
        values.append(f"{len(result.not_started)} not begun ({parts_text})")
    others = [part.part for part in result.parts if part.state == "at work" and part.part not in own]
    if others:
        values.append(f"{len(others)} of other divisions at work ({', '.join(others[:_MAX_GROUPS])})")
    return f"of {count}: {', '.join(values)}"


def _group_parts(numbers: Sequence[tuple[int, int]], of: str = "") -> str:
    spelled = [
        f"{first}{of} to {stop - 1}{of}" if stop > first + 1 else f"{first}{of}" for first, stop in numbers
    ]
    return first_names(spelled, _MAX_GROUPS)


def _part_text(status: PartStatus) -> str:
    share = 100 * status.bytes_done // max(1, status.nbytes)
    words = [status.state, f"{status.tasks_done} of {plural(status.tasks, 'task')}, {share} %"]
    if status.bytes_per_second:
        words.append(f"{format_disk(status.bytes_per_second)}/s")
    if status.seconds_left is not None:
        words.append(f"{format_duration(status.seconds_left)} left")
    words.append(status.process)
    if status.state == "gone" or (status.state == "at work" and status.idle_seconds > 60):
        words.append(f"last seen {format_duration(status.idle_seconds)} ago")
    if status.is_straggler:
        words.append("the others will wait for it")
    return ", ".join(words)


def waiting_line(result: PlanStatus) -> str:
    """Return one line about the running processes."""
    missing = result.tasks - result.tasks_done
    working = sorted((part for part in result.parts if part.state == "at work"), key=_remaining_seconds)
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


def _remaining_seconds(status: PartStatus) -> float:
    return float("inf") if status.seconds_left is None else status.seconds_left
