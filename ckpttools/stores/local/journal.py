"""A journal of finished tasks, in a file next to the data, so that a command can resume after `kill -9`.

The first line identifies the plan and its command. A line for each finished task follows. When everything
is written and the checkpoint is about to be published, lines with the status of its files follow, and a
line that ends this list. A task is recorded only after its bytes are synced, so the journal never claims
more than the disk holds. Every line has a checksum; lines with a wrong checksum are ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from ckpttools.core.errors import UsageError
from ckpttools.core.text import format_age
from ckpttools.stores.local.file import read_whole, storage_error
from ckpttools.stores.local.files import moved_error, sync_directory, sync_file, write_all, write_error
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX, JobInfo, LockedError, Record

# A line takes 60 bytes, and more for each encoded chunk.
_LARGEST = 1 << 30
_LINES_PER_WRITE = 1024
# Maximum length of the first line, which contains a command that may be as long as the system accepts.
_LONGEST_PLAN = 4 << 20
_PLAN, _TASK, _INVENTORY, _FILE, _PUBLISHING = "plan", "task", "inventory", "file", "publishing"
_PREPARING = "preparing"
# Worker processes inherit the lock and end shortly after their parent.
_ENDING_SECONDS, _ENDING_LOOKS = 0.2, 10
_BEGINNING = re.compile(rb'[0-9a-f]{8} \["plan",\["')
_SHORTEST_BEGINNING = b'00000000 ["plan",["'
_TEXT = re.compile(rb"[ -~]*\n?")

Access: TypeAlias = Literal["alone", "together", "looking"]

JOURNAL = "journal.ckpttools"


class Journal:
    """The journal of a staging directory, which is open and locked while this object exists.

    Attributes:
        purpose: The conversion; None if there is no readable entry.
        records: Records of the finished tasks.
        publishing: Whether everything is written, so that the checkpoint may be published.
        inventory: Files of the checkpoint when it was published; None if the list is incomplete.
        preparing: The plan for which the directory is being emptied while the journal is locked, or "".
    """

    def __init__(self, directory: Path, access: Access = "alone", name: str = JOURNAL) -> None:
        """Open and lock the journal, creating it if needed.

        Args:
            directory: The staging directory.
            access: "alone" for an exclusive lock, "together" for a shared one, or "looking" for none. Only
                "alone" writes the file.
            name: The name of the file. Only a file with the default name is created.

        Raises:
            FileNotFoundError: The directory does not exist, or the file was removed before it was locked.
            LockedError: Another process has locked the journal.
            UsageError: The file was not written by ckpttools, or has another hard link.
            OSError: The journal cannot be opened.
        """
        self._path = directory / name
        self._access = access
        flags = os.O_RDWR | os.O_APPEND if access == "alone" else os.O_RDONLY
        if access == "alone" and name == JOURNAL:
            flags |= os.O_CREAT
        self._descriptor = os.open(self._path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if access != "looking":
                self._lock()
            self._refuse_others()
            self.purpose: JobInfo | None = None
            self.records: list[Record] = []
            self.publishing = False
            self.inventory: list[str] | None = None
            self.preparing = ""
            self._load()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            self._flock(fcntl.LOCK_EX if self._access == "alone" else fcntl.LOCK_SH)
        except BlockingIOError:
            reason = "another process is writing this checkpoint"
            raise locked_error(reason, self._path.parent, self._descriptor) from None
        # The previous lock holder may have removed the file just before it released the lock.
        if not self._is_in_location():
            raise FileNotFoundError(self._path)

    def _flock(self, operation: int) -> None:
        """Lock the file; if a process was killed, wait until its forks have ended."""
        for _ in range(_ENDING_LOOKS):
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
                return
            time.sleep(_ENDING_SECONDS / _ENDING_LOOKS)
        fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)

    def _is_in_location(self) -> bool:
        """Return whether the open file still has its name."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def check_in_location(self) -> None:
        """Raise StorageError if the directory was removed or moved, or its path leads to another one."""
        if not self._is_in_location():
            raise moved_error(self._path.parent)

    def _refuse_others(self) -> None:
        """Raise UsageError if ckpttools does not own this file, which the next conversion would overwrite."""
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            got = stat.filemode(status.st_mode)
        elif status.st_nlink > 1:
            got = f"a file with {status.st_nlink} names (hard links)"
        else:
            return
        raise _foreign_file_error(self._path, got)

    @property
    def plan(self) -> str | None:
        """Return the fingerprint of the plan; None if unknown."""
        return None if self.purpose is None else self.purpose.plan

    def _load(self) -> None:
        size = os.fstat(self._descriptor).st_size
        # A larger file was not written by ckpttools.
        data = os.pread(self._descriptor, size, 0) if size <= _LARGEST else b""
        complete_length = data.rfind(b"\n") + 1
        files: list[str] = []
        is_ours = size <= _LARGEST and _may_be_torn(data)
        for kind, content in lines(data[:complete_length]):
            is_ours = True
            if kind == _PLAN:
                self.purpose = _parse_job_info(content)
            elif kind == _INVENTORY:
                files = []
            elif kind == _PUBLISHING:
                self.publishing = True
                self.inventory = files if content == len(files) else None
            elif kind == _PREPARING:
                self.preparing = str(content)
            elif kind == _FILE and isinstance(content, str):
                files.append(content)
            elif kind == _TASK and isinstance(content, list):
                self.records.append(content)
        if not is_ours:
            raise _foreign_file_error(self._path, f"{size} bytes without a valid line")
        if self.purpose is None:
            self.records, self.publishing, self.inventory = [], False, None
        elif complete_length < size and self._access == "alone":
            # The process died while writing the last line, so the next line must not be appended to it.
            os.ftruncate(self._descriptor, complete_length)

    def begin(self, purpose: JobInfo) -> None:
        """Start the journal of a new conversion.

        Raises:
            StorageError, NoSpaceError: The file cannot be written.
        """
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise write_error(self._path, error) from error
        self.purpose, self.records, self.publishing, self.inventory = purpose, [], False, None
        self._append([(_PLAN, astuple(purpose))])
        self.preparing = ""

    def note_preparing(self, plan: str) -> None:
        """Record that the directory is being emptied for a plan, or "" at the end; errors as for `begin`."""
        self._append([(_PREPARING, plan)])
        self.preparing = plan

    def note_publishing(self, inventory: Iterable[str]) -> None:
        """Record the files of the checkpoint before it is published; same errors as `begin`."""

        def entries() -> Iterator[tuple[str, object]]:
            count = 0
            yield _INVENTORY, None
            for item in inventory:
                yield _FILE, item
                count += 1
            yield _PUBLISHING, count

        self._append(entries())
        self.publishing = True

    def record(self, records: Iterable[Record]) -> None:
        """Record tasks whose bytes are durable; same errors as `begin`."""
        self._append([(_TASK, record) for record in records])

    def _append(self, lines: Iterable[tuple[str, object]]) -> None:
        waiting = iter(lines)
        try:
            # A checkpoint may have 100,000 files.
            while batch := list(islice(waiting, _LINES_PER_WRITE)):
                write_all(self._descriptor, b"".join(line(kind, content) for kind, content in batch))
            sync_file(self._descriptor)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def move(self, path: Path) -> bool:
        """Rename the locked file durably, replacing any file there; return whether it still existed.

        Raises:
            OSError: The system reports an error.
        """
        is_in_location = self._is_in_location()
        if is_in_location:
            self._path.rename(path)
            for directory in (path.parent, self._path.parent):
                sync_directory(directory)
            self._path = path
        return is_in_location

    def remove(self) -> bool:
        """Delete the locked file; return whether it still existed.

        Raises:
            OSError: The system reports an error.
        """
        is_in_location = self._is_in_location()
        if is_in_location:
            self._path.unlink()
        return is_in_location


def line(kind: str, content: object) -> bytes:
    """Encode an entry with its checksum."""
    text = json.dumps([kind, content], separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def lines(data: bytes) -> Iterator[tuple[str, object]]:
    """Iterate over the kind and content of each line with a correct checksum."""
    for line in data.split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if text and checksum == b"%08x" % zlib.crc32(text):
            try:
                kind, content = json.loads(text)
            except (ValueError, TypeError, RecursionError):
                continue
            yield kind, content


def is_journal(path: Path) -> bool:
    """Return whether a file starts like a journal."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _BEGINNING.match(file.read(len(_SHORTEST_BEGINNING))) is not None


def read_job_info(path: Path) -> JobInfo | None:
    """Read the conversion from a journal, locked or not; return None if it is unreadable."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_PLAN)
    except OSError:
        return None
    return next((_parse_job_info(content) for kind, content in lines(line) if kind == _PLAN), None)


def _may_be_torn(data: bytes) -> bool:
    """Return whether a crash can leave this unsynced first line: truncated, or with blocks of zeros."""
    begins = data[:1] == b"\0" or _begins(data.partition(b"\0")[0])
    return begins and _TEXT.fullmatch(data.replace(b"\0", b"")) is not None


def _begins(data: bytes) -> bool:
    return _BEGINNING.match(data + _SHORTEST_BEGINNING[len(data) :]) is not None


def _foreign_file_error(path: Path, got: str) -> UsageError:
    return UsageError(
        f"{path} is not a journal of ckpttools",
        got=got,
        expected="no such file, or an unmodified file of an interrupted conversion",
        hint="move it away, or choose another destination",
    )


def _parse_job_info(content: object) -> JobInfo | None:
    """Parse the description of a conversion; return None if it is malformed."""
    # Earlier versions did not record the division into parts.
    is_ours = (
        isinstance(content, list)
        and len(content) in (4, 5)
        and all(isinstance(item, str) for item in content)
    )
    return JobInfo(*content) if is_ours else None  # type: ignore[misc]


def locked_error(reason: str, location: object, descriptor: int) -> LockedError:
    """Return the error for a lock that another process holds.

    Args:
        reason: The first line of the error.
        location: The locked location.
        descriptor: The file or the directory that has the lock.
    """
    since = format_age(max(0.0, time.time() - os.fstat(descriptor).st_mtime))
    pid = _holder(descriptor)
    if pid is None:
        got = f"a process on another machine or in another container; {location} was last written {since} ago"
        hint = "wait until it is done, or end that process, which releases its lock"
    else:
        age = format_age(_seconds_running(pid))
        got = f"process {pid} on {socket.gethostname()}, started {age} ago; last written {since} ago"
        hint = f"wait until it is done, or end it, which releases its lock: kill {pid}"
    return LockedError(reason, location=location, got=got, hint=hint)


def _holder(descriptor: int) -> int | None:
    """Return the process that holds the lock of an open file; None if the system does not show it."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # Example: "1: FLOCK ADVISORY WRITE 27180 fe:00:2146396 0 EOF". Overlay file systems show another device.
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


CONTENT, REPLACED, REMOVED = "content", "replaced", "removed"


def is_staging(path: Path) -> bool:
    """Return whether a directory is the staging directory of a running or interrupted conversion."""
    return path.name.endswith(SUFFIX) and (path / JOURNAL).is_file()


_LONGEST_MARK = 1 << 10


def read_mark(location: Path) -> str | None:
    """Return the plan that a directory's mark names; None without a directory or mark.

    Raises:
        StorageError: The mark cannot be accessed.
    """
    mark = location / PLAN_MARK
    try:
        status = mark.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error("cannot inspect", mark, error) from error
    is_ours = stat.S_ISREG(status.st_mode) and status.st_size <= _LONGEST_MARK
    return read_whole(mark).decode(errors="replace") if is_ours else ""


def remove_mark(location: Path) -> None:
    """Durably remove the mark of a checkpoint, if it exists."""
    mark = location / PLAN_MARK
    if os.path.lexists(mark):
        mark.unlink()
        sync_directory(location)
