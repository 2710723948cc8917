"""Journals of several processes, each in a file of its own: `<destination>.partial/parts/TOKEN`.

Each file is written only by its process, which keeps it locked while it runs. Lines have the format of the
main journal (`ckpttools.stores.local.journal`): first the share, then finished tasks, and finally the
outcome.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from ckpttools.stores.local.files import names_in, sync_directory, sync_file, write_all, write_error
from ckpttools.stores.local.journal import line, lines
from ckpttools.stores.publishing import Record
from ckpttools.stores.shares import PARTS, Member, Share, describe_this_process, parse_share

_PART, _TASK, _END = "part", "task", "end"
_LARGEST = 1 << 30


class PartJournal:
    """The journal of this process, which is open and locked while this object exists.

    Attributes:
        token: Unique name of the file.
    """

    def __init__(self, directory: Path, plan: str, share: Share) -> None:
        """Create the journal file.

        Args:
            directory: The staging directory, on which the process holds a shared lock.
            plan: Fingerprint of the plan.
            share: The share of the work that this process does.

        Raises:
            StorageError, NoSpaceError: The file cannot be created.
        """
        self.token = os.urandom(6).hex()
        self._path = directory / PARTS / self.token
        try:
            self._path.parent.mkdir(exist_ok=True)
            sync_directory(directory)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            # Processes that test the lock hold it briefly.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise write_error(error.filename or self._path, error) from error
        values = [share.name, share.first, share.stop]
        self._append([(_PART, [plan, values, describe_this_process(), time.time()])])
        sync_directory(self._path.parent)

    def record(self, records: Iterable[Record]) -> None:
        """Record tasks whose bytes are durable; same errors as the constructor."""
        self._append([(_TASK, record) for record in records])

    def end(self, outcome: str) -> None:
        """Record the outcome; same errors as the constructor."""
        self._append([(_END, outcome)])

    def _append(self, entries: Iterable[tuple[str, object]]) -> None:
        try:
            write_all(self._descriptor, b"".join(line(kind, content) for kind, content in entries))
            sync_file(self._descriptor)
        except OSError as error:
            raise write_error(self._path, error) from error

    def discard(self) -> None:
        """Discard the recorded tasks."""
        try:
            self._path.unlink(missing_ok=True)
            sync_directory(self._path.parent)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def members(directory: Path, plan: str) -> list[Member]:
    """Return the processes that are working, or have worked, on a plan in a staging directory.

    Raises:
        OSError: The system reports an error.
    """
    result = [_member(directory / PARTS / name, plan) for name in _names(directory)]
    return sorted((item for item in result if item is not None), key=lambda item: item.began)


def remove_parts(directory: Path) -> None:
    """Remove the journals of all processes durably; none may be running. Raises OSError."""
    try:
        names = names_in(directory / PARTS)
    except FileNotFoundError:
        return
    for name in names:
        (directory / PARTS / name).unlink(missing_ok=True)
    (directory / PARTS).rmdir()
    sync_directory(directory)


def _names(directory: Path) -> list[str]:
    try:
        return names_in(directory / PARTS)
    except FileNotFoundError:
        return []


def _member(path: Path, plan: str) -> Member | None:
    """Parse a journal file; return None if it does not belong to the plan."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        # Test the lock before reading, so that records added later are known to be from a running process.
        is_alive = _is_locked(descriptor)
        status = os.fstat(descriptor)
        data = _read(descriptor, min(status.st_size, _LARGEST))
    finally:
        os.close(descriptor)
    complete_lines = lines(data[: data.rfind(b"\n") + 1])
    return _parsed(path.name, complete_lines, plan, is_alive, status.st_mtime)


def _read(descriptor: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _parsed(
    token: str, entries: Iterator[tuple[str, Any]], plan: str, is_alive: bool, last_seen: float
) -> Member | None:
    match next(entries, None):
        case (str(kind), [str(of), declared, str(process), int() | float() as began]) if kind == _PART:
            share = parse_share(declared)
        case _:
            return None
    if share is None or of != plan:
        return None
    records: list[Record] = []
    outcome = ""
    for kind, content in entries:
        if kind == _TASK and isinstance(content, list):
            records.append(content)
        elif kind == _END:
            outcome = str(content)
    age, release = max(0.0, time.time() - last_seen), _release(process)
    return Member(token, share, process, began, last_seen, is_alive, outcome, records, age, release)


def _release(process: str) -> str:
    """Return the command that ends a process (as named by `describe_this_process`) to release its lock."""
    match process.split():
        case ["process", pid, "on", host] if pid.isdecimal():
            return f"kill {pid}" if host == socket.gethostname() else f"ssh {quote(host)} kill {pid}"
    return ""


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
