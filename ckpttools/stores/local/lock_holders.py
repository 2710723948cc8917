"""Find the process that holds a file lock, as far as Linux shows it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ckpttools.core.text import age
from ckpttools.stores.publishing import LockedError


def locked_error(what: str, location: object, descriptor: int) -> LockedError:
    """Return the error of a lock that another process holds.

    Args:
        what: The first line of the error.
        location: The locked location.
        descriptor: The file or the directory that has the lock.
    """
    since = age(max(0.0, time.time() - os.fstat(descriptor).st_mtime))
    pid = _holder(descriptor)
    if pid is None:
        got = f"a process of another machine or container; {location} was last written {since} ago"
        hint = "wait until it is done, or end that process, which releases its lock"
    else:
        began = age(_seconds_running(pid))
        got = f"process {pid} on {socket.gethostname()}, started {began} ago; last written {since} ago"
        hint = f"wait until it is done, or end it, which releases its lock: kill {pid}"
    return LockedError(what, location=location, got=got, hint=hint)


def _holder(descriptor: int) -> int | None:
    """Return the process that holds the lock of an open file; None if the system does not show it."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # Example: "1: FLOCK  ADVISORY  WRITE 27180 fe:00:2146396 0 EOF". Overlays show another device.
    locks = [fields for fields in map(str.split, lines) if len(fields) > 5 and fields[1] == "FLOCK"]
    same = [fields for fields in locks if fields[5].endswith(f":{status.st_ino}")]
    exact = [fields for fields in same if fields[5].startswith(f"{device}:")]
    matches = exact or (same if len(same) == 1 else [])
    # Processes of other containers have the ID 0 or -1.
    return next((int(fields[4]) for fields in matches if fields[4].isdecimal() and int(fields[4]) > 0), None)


def _seconds_running(pid: int) -> float:
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
