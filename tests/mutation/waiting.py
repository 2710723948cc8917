"""Waiting for tests that may never end, by what they do: a busy machine makes none look hung."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 0.5
# No test of the package sleeps for so long, nor do the processes that it starts.
_ASLEEP_SECONDS = 90.0
_TICKS = os.sysconf("SC_CLK_TCK")

BUSY, ASLEEP = "busy without end", "asleep without end"


@dataclass(frozen=True)
class _Process:
    """CPU seconds that a process and those it has waited for took, and whether all its threads sleep."""

    cpu: float
    is_asleep: bool


def ended(process: subprocess.Popen[str], cpu_seconds: float, asleep_seconds: float = _ASLEEP_SECONDS) -> str:
    """Waits for a process that leads a session of its own.

    Args:
        process: it.
        cpu_seconds: of it and all that it has started, after which it counts as one that never ends.
        asleep_seconds: in which none of their threads runs, waits for its turn or for the disk, likewise.

    Returns:
        "" when it has ended, else `BUSY` or `ASLEEP`: it still runs then.
    """
    awake = time.monotonic()
    while process.poll() is None:
        result = list(_of_session(process.pid))
        if sum(item.cpu for item in result) > cpu_seconds:
            return BUSY
        if not all(item.is_asleep for item in result):
            awake = time.monotonic()
        elif time.monotonic() - awake > asleep_seconds:
            return ASLEEP
        time.sleep(_SECONDS)
    return ""


def _of_session(session: int) -> Iterator[_Process]:
    """The processes of a session, as Linux has them in /proc."""
    for location in Path("/proc").glob("[0-9]*"):
        try:
            fields = _fields(location / "stat")
            if int(fields[3]) == session:
                states = [_fields(thread / "stat")[0] for thread in (location / "task").iterdir()]
                yield _Process(sum(map(int, fields[11:15])) / _TICKS, not {"R", "D"}.intersection(states))
        except (FileNotFoundError, ProcessLookupError):
            continue


def _fields(stat: Path) -> list[str]:
    """Those of proc(5) after the name, which may hold blanks: state, parent, group, session, …"""
    return stat.read_text().rpartition(")")[2].split()
