"""What each of several processes has done, in a file of its own: `<destination>.partial/parts/TOKEN`.

Its process alone writes it, from the first line to the last, and has it locked as long as it lives. A line is
as in the journal (`ckpttools.stores.local.journal`): first whose it is, then finished tasks, at last the end.
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

from ckpttools.stores.local.files import names_in, sync_directory, write_all, write_error
from ckpttools.stores.local.journal import line, lines
from ckpttools.stores.publishing import Record
from ckpttools.stores.shares import PARTS, Member, Share, share_of, this_process

_PART, _TASK, _END = "part", "task", "end"
_LARGEST = 1 << 30


class PartJournal:
    """The file of this process, open and locked as long as this object is.

    Attributes:
        token: its name, which no other process has.
    """

    def __init__(self, directory: Path, plan: str, share: Share) -> None:
        """Makes it.

        Args:
            directory: the staging directory, which the process has locked together with others.
            plan: fingerprint of the plan.
            share: what the process is going to do.

        Raises:
            StorageError, NoSpaceError: it cannot be made.
        """
        self.token = os.urandom(6).hex()
        self._path = directory / PARTS / self.token
        try:
            self._path.parent.mkdir(exist_ok=True)
            sync_directory(directory)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            # Who looks whether it is locked has it for a moment.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise write_error(error.filename or self._path, error) from error
        declared = [share.name, share.first, share.stop]
        self._append([(_PART, [plan, declared, this_process(), time.time()])])
        sync_directory(self._path.parent)

    def enter(self, records: Iterable[Record]) -> None:
        """Notes that the bytes of these tasks are durable; errors as when it is made."""
        self._append([(_TASK, record) for record in records])

    def end(self, outcome: str) -> None:
        """Notes how it ended; errors as when it is made."""
        self._append([(_END, outcome)])

    def _append(self, entries: Iterable[tuple[str, object]]) -> None:
        try:
            write_all(self._descriptor, b"".join(line(kind, content) for kind, content in entries))
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(self._path, error) from error

    def discard(self) -> None:
        """Gives up what was entered: nobody finds it any more."""
        try:
            self._path.unlink(missing_ok=True)
            sync_directory(self._path.parent)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Gives up the lock."""
        os.close(self._descriptor)


def members(directory: Path, plan: str) -> list[Member]:
    """The processes that do, or did, shares of a plan in a staging directory.

    Raises:
        OSError: the system reports an error.
    """
    result = [_member(directory / PARTS / name, plan) for name in _names(directory)]
    return sorted((item for item in result if item is not None), key=lambda item: item.began)


def remove_parts(directory: Path) -> None:
    """Removes all files of shares, durably; nobody does one. Raises OSError."""
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
    """What a file says; None where it is not one of this plan."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        # Before it is read: what is entered after that is somebody's who is alive.
        is_alive = _is_locked(descriptor)
        status = os.fstat(descriptor)
        data = _read(descriptor, min(status.st_size, _LARGEST))
    finally:
        os.close(descriptor)
    whole = lines(data[: data.rfind(b"\n") + 1])
    return _parsed(path.name, whole, plan, is_alive, status.st_mtime)


def _read(descriptor: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _parsed(
    token: str, entries: Iterator[tuple[str, Any]], plan: str, is_alive: bool, seen: float
) -> Member | None:
    match next(entries, None):
        case (str(kind), [str(of), declared, str(process), int() | float() as began]) if kind == _PART:
            share = share_of(declared)
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
    age, release = max(0.0, time.time() - seen), _release(process)
    return Member(token, share, process, began, seen, is_alive, outcome, records, age, release)


def _release(process: str) -> str:
    """The command that ends a process, as `this_process` describes it, and with it its lock."""
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
