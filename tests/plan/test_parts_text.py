"""What is said of parts: a line for each process, a summary, and who is waited for."""

from __future__ import annotations

from dataclasses import replace

from support.internals import Share, parse

from ckpttools.api.plan_status import PartStatus, PlanStatus, _count, _stragglers
from ckpttools.cli.plan_text import part_line, status_lines, waiting_line
from ckpttools.run.parts import PartReceipt
from ckpttools.stores.shares import Member

GB = 10**9
PART = PartStatus(100, 50, 20 * GB, 10 * GB, 1e9, 10.0, "0/3", "process 7 on a", "at work", 1.0, "a")
SLOW = replace(
    PART, part="1/3", process="process 7 on b", bytes_done=2 * GB, bytes_per_second=2e8, seconds_left=90.0
)
GONE = replace(
    PART,
    part="2/3",
    process="process 7 on c",
    state="gone",
    seconds_left=None,
    idle_seconds=130.0,
    tasks_done=4,
)
ALL = PlanStatus(
    300,
    104,
    60 * GB,
    14 * GB,
    1.2e9,
    90.0,
    parse("/data/out"),
    "0123",
    "at work",
    "",
    tuple(_stragglers([PART, SLOW, GONE])),
    ((204, 300),),
)


def test_each_process_has_a_line_and_stragglers_are_named():
    assert list(status_lines(ALL, "x.plan")) == [
        "/data/out: at work",
        "all      104 of 300 tasks, 23 % of 60.0 GB, 1.20 GB/s, 0:01:30 left",
        "0/3      at work, 50 of 100 tasks, 50 %, 1.00 GB/s, 0:00:10 left, process 7 on a",
        "1/3      at work, 50 of 100 tasks, 10 %, 200 MB/s, 0:01:30 left, process 7 on b",
        "2/3      gone, 4 of 100 tasks, 50 %, 1.00 GB/s, process 7 on c, last seen 0:02:10 ago",
        "missing  96 tasks: 204 to 299; no process is working on them",
    ]


def test_next_command_names_the_plan():
    line = next(status_lines(replace(ALL, state="done"), "my plans/x.plan"))
    assert line.endswith("next: ckpt run 'my plans/x.plan' --publish")


def test_slow_part_is_a_straggler():
    parts = _stragglers([PART, replace(PART, part="2/3"), SLOW])
    assert [part.is_straggler for part in parts] == [False, False, True]
    assert next(
        line for line in status_lines(replace(ALL, parts=tuple(parts)), "x.plan") if "wait" in line
    ).startswith("1/3")


def test_unstarted_parts_are_named():
    parts = (replace(PART, part="0/8"),)
    lines = list(status_lines(replace(ALL, num_parts=8, parts=parts, not_started=(4, 6, 7)), "x.plan"))
    assert lines[2] == "parts    of 8: 4 done, 1 at work, 3 not begun (4/8, 6/8 to 7/8)"


def member(name, began, alive):
    return Member(f"{name}-{began}", Share(name, 0, 1), "process 7", began, began, alive, "")


def test_part_count_is_the_most_common_one():
    old = [member(f"{number}/16", number, False) for number in range(16)]
    again = [member("3/16", 20.0, True), member("7/16", 21.0, True)]
    rest = member("0/1", 22.0, True)
    assert _count([*old, *again, rest]) == 16
    assert _count([*old, rest]) == _count([*old, member("0/1", 22.0, False)]) == 1
    assert _count([*old, again[0], rest]) == 1
    assert _count([]) is None
    lines = list(status_lines(replace(ALL, num_parts=3, parts=(PART, replace(SLOW, part="0/1"))), "x.plan"))
    assert lines[2] == "parts    of 3: 2 done, 1 at work, 1 of other divisions at work (0/1)"


def test_many_finished_parts_are_only_counted():
    done = [replace(PART, part=f"{number}/40", state="done") for number in range(39)]
    lines = list(
        status_lines(replace(ALL, num_parts=40, parts=(*done, replace(SLOW, part="39/40"))), "x.plan")
    )
    assert lines[2] == "parts    of 40: 39 done, 1 at work"
    assert [line.split()[0] for line in lines[3:]] == ["39/40", "missing"]


def test_waiting_parts_are_listed_in_one_line():
    assert waiting_line(ALL) == (
        "196 of 300 tasks missing; waiting for 2 parts, longest for 1/3 (process 7 on b, 0:01:30 left); "
        "no process is working on 96 tasks"
    )
    assert waiting_line(replace(ALL, parts=(), missing=((0, 300),), tasks_done=0)) == (
        "300 of 300 tasks missing; no process is working on 300 tasks"
    )


def test_taken_destination_has_no_counts():
    lines = list(
        status_lines(replace(ALL, state="taken", other_content="the conversion of x, plan 12"), "x.plan")
    )
    assert lines == [
        "/data/out: no unfinished output of this plan exists",
        "the destination has the conversion of x, plan 12",
    ]


def test_part_line_describes_the_work_done():
    receipt = PartReceipt("3/8", parse("/data/out"), 120, 20, 7 * GB, GB, 31.25)
    assert part_line(receipt) == (
        "part 3/8 of /data/out: 120 tasks, 7.00 GB in 31.25 s (192 MB/s), 20 of them done before"
    )
    assert "nothing to do" in part_line(PartReceipt("7/8", parse("/data/out")))
