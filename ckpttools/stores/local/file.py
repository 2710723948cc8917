"""Local files with positional reads.

Files are not memory-mapped, because mapped pages would count against the memory limit.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttools.core.details import log_detail
from ckpttools.core.errors import CheckpointError, FormatError, SourceChangedError, StorageError
from ckpttools.core.message_terms import action, retry_term
from ckpttools.stores.base import LARGEST_WHOLE, File, size_limit_error

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Limit on open files, because a checkpoint may have more shards than a process may open. The least recently
# used file is closed first. A higher limit is not faster.
_MAX_OPEN_FILES = 4096
# Descriptors reserved for other uses in the process: libraries, the journal, directories, synced files,
# pipes.
_RESERVE = 48
_MIN_OPEN_FILES = 8


class ReopenableFile:
    """A file that stays open while in use, and afterward as long as few others are open.

    Args:
        opener: Opens the file, and reopens it after it was closed. May raise `OSError`.
    """

    def __init__(self, opener: Callable[[], int]) -> None:
        self._opener = opener
        self._opening = threading.Lock()
        # A list of one descriptor or none. The thread that removes the descriptor from the list closes it, so
        # only one thread can.
        self._descriptor: list[int] = []
        self._users = 0

    @contextmanager
    def use(self) -> Iterator[int]:
        """Yield the descriptor, which stays open in the `with` block; same errors as the opener."""
        _POOL.enter(self)
        try:
            yield self._reopen()
        finally:
            _POOL.leave(self)

    def close(self) -> None:
        """Close the descriptor; the next use reopens the file. Must not be called during a use."""
        try:
            descriptor = self._descriptor.pop()
        except IndexError:
            return
        os.close(descriptor)

    @property
    def is_idle(self) -> bool:
        return self._users == 0

    def _reopen(self) -> int:
        with self._opening:
            if not self._descriptor:
                _POOL.make_room()
                self._descriptor.append(self._open())
            return self._descriptor[0]

    def _open(self) -> int:
        try:
            return self._opener()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _POOL.close_idle(0)
            return self._opener()


class _Pool:
    """The pool of open files, least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[ReopenableFile, None] = OrderedDict()

    def enter(self, file: ReopenableFile) -> None:
        with self._lock:
            file._users += 1
            self._files[file] = None
            self._files.move_to_end(file)

    def leave(self, file: ReopenableFile) -> None:
        with self._lock:
            file._users -= 1

    def make_room(self) -> None:
        if len(self._files) > _max_open_files(raised=False):
            self.close_idle(_max_open_files(raised=True))

    def close_idle(self, limit: int) -> None:
        """Close idle files until at most `limit` files are open."""
        with self._lock:
            extra = len(self._files) - limit
            idle = (file for file in self._files if file.is_idle)
            # Closing under the lock prevents a new use at the same time.
            for file in list(islice(idle, max(0, extra))):
                del self._files[file]
                file.close()


_POOL = _Pool()


def _max_open_files(*, raised: bool) -> int:
    """Return the maximum number of open files.

    Args:
        raised: Whether the process's soft limit may be raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = _MAX_OPEN_FILES + _RESERVE
    if raised and soft != resource.RLIM_INFINITY and soft < expected and soft != hard:
        soft = expected if hard == resource.RLIM_INFINITY else min(expected, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MAX_OPEN_FILES
    return max(_MIN_OPEN_FILES, min(_MAX_OPEN_FILES, soft - _RESERVE))


def iso_time(nanoseconds: int) -> str:
    """Format nanoseconds since 1970 as ISO 8601 in UTC, with all digits to distinguish close times."""
    seconds, rest = divmod(nanoseconds, 10**9)
    try:
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        # A file system can store times beyond the year 9999.
        return f"{nanoseconds} ns since 1970"
    return f"{text}.{rest:09}Z" if rest else f"{text}Z"


# Linux transfers at most 2**31 - 4096 bytes per call (read(2)). This limit is smaller and a multiple of a
# page.
_MAX_READ_BYTES = 1 << 30
_CHECK_BYTES = 1 << 20
# With this flag, opening a named pipe does not wait for a writer; reading it by position then fails.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalFile(File):
    """A file that all threads read. It is opened at the first read and reopened if it was closed.

    Attributes:
        path: Path of the file.
        size: Size in bytes when the file was first inspected; if it is shorter later, reading fails.
        version: Modification time at that moment, in nanoseconds.
        identity: Device and inode at that moment; None if unknown.
    """

    __slots__ = ("__weakref__", "_file", "_head", "identity", "path", "size", "version")

    def __init__(self, path: str, size: int, version: str = "", identity: object = None) -> None:
        self.path = path
        self.size = size
        self.version = version
        self.identity = identity
        self._head = 0, 0
        self._file = ReopenableFile(_Opener(path, _expected_status(size, version, identity)))
        weakref.finalize(self, self._file.close).atexit = False

    @classmethod
    def at(cls, path: str | Path) -> LocalFile:
        """Return the file with its current status.

        Raises:
            FormatError: The file does not exist.
            StorageError: The file cannot be accessed.
        """
        try:
            status = Path(path).stat()
        except OSError as error:
            raise _reading_error("cannot inspect", path, error) from error
        identity = status.st_dev, status.st_ino
        return cls(str(path), status.st_size, str(status.st_mtime_ns), identity)

    def remember_head(self, nbytes: int) -> None:
        """Remember the first bytes, because modification times can be set back; errors as for `read_into`."""
        self._head = nbytes, self._checksum(nbytes)

    def check_unchanged(self) -> None:
        """Compare inode, size, modification time and remembered head; see `File.check_unchanged`.

        The ctime is not compared, because it also changes when another process links the file.
        """
        current = LocalFile.at(self.path)
        if self.identity not in (None, current.identity):
            raise self._changed(f"another file has the name: {_summary(current)}")
        if (current.size, current.version) != (self.size, self.version):
            raise self._changed(_summary(current))
        nbytes, checksum = self._head
        if self._checksum(nbytes) != checksum:
            raise self._changed(f"its header was rewritten: {_summary(current)}")

    def _changed(self, got: str) -> SourceChangedError:
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=got,
            expected=f"the file as it was first opened: {_summary(self)}",
            hint=f"wait until no process writes to it, then {retry_term()}",
        )

    def _checksum(self, nbytes: int) -> int:
        checksum = 0
        for start in range(0, nbytes, _CHECK_BYTES):
            checksum = zlib.crc32(self.read(start, min(_CHECK_BYTES, nbytes - start)), checksum)
        return checksum

    def read_into(self, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes from `offset`.

        Raises:
            FormatError: The file is too short, was removed, or was replaced or changed after an earlier read.
            StorageError: The system reports an error.
        """
        rest = memoryview(out).cast("B")
        with self._file.use() as descriptor:
            self._fill(descriptor, offset, rest)

    def has_hole(self, start: int, stop: int) -> bool:
        """Return whether bytes in a range were never written; see `SupportsHoleDetection`."""
        with self._file.use() as descriptor:
            try:
                return os.lseek(descriptor, start, os.SEEK_HOLE) < stop
            except OSError:
                return False

    def _fill(self, descriptor: int, offset: int, rest: memoryview) -> None:
        expected = len(rest)
        while rest:
            try:
                count = os.preadv(descriptor, [rest[:_MAX_READ_BYTES]], offset)
            except OSError as error:
                raise storage_error("cannot read", self.path, error) from error
            if count == 0:
                raise FormatError(
                    f"{self.path} ends too early",
                    got=f"a file of {os.fstat(descriptor).st_size} bytes",
                    expected=f"{expected} bytes that end at byte {offset + len(rest)}",
                    hint="the file was cut short or is still being written: fetch it again",
                )
            offset += count
            rest = rest[count:]

    def close(self) -> None:
        """Close the descriptor; a later read reopens the file. Must not be called during a read."""
        self._file.close()

    def __repr__(self) -> str:
        return f"LocalFile({self.path!r})"


def _summary(file: LocalFile) -> str:
    return f"{file.size} bytes, changed at {iso_time(int(file.version))}"


def _expected_status(size: int, version: str, identity: object) -> tuple[int, ...] | None:
    """Return the status required when opening a file, because a link can change its target in between."""
    match identity:
        case (int(device), int(inode)) if version.isdecimal():
            return device, inode, size, int(version)
    return None


class _Opener:
    """Opens a file for reading, and rejects a different file with the same name."""

    __slots__ = ("_first", "_path")

    def __init__(self, path: str, first: tuple[int, ...] | None = None) -> None:
        self._path = path
        self._first = first

    def __call__(self) -> int:
        """Open the file.

        Raises:
            FormatError: The file was removed or replaced, or has another size or modification time.
            StorageError: The system reports an error other than too many open files.
        """
        try:
            descriptor = os.open(self._path, _FLAGS)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise _reading_error("cannot open", self._path, error) from error
        log_detail("opened file %s", self._path)
        status = os.fstat(descriptor)
        current = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        self._first = self._first or current
        if current != self._first:
            os.close(descriptor)
            raise self._changed(current)
        return descriptor

    def _changed(self, current: tuple[int, ...]) -> SourceChangedError:
        first = self._first or current
        problem = "ends too early" if current[2] < first[2] else "was changed while it was read"
        return SourceChangedError(
            f"{self._path} {problem}",
            got="another file has the name" if current[:2] != first[:2] else _describe_status(current),
            expected=f"the file as it was before: {_describe_status(first)}",
            hint=f"wait until no process writes to it, then {retry_term()}",
        )


def _describe_status(status: tuple[int, ...]) -> str:
    return f"{status[2]} bytes, changed at {iso_time(status[3])}"


def read_whole(path: Path, limit: int = LARGEST_WHOLE) -> bytes:
    """Read a small file completely.

    Raises:
        FormatError: The path is a pipe or a device, where reading could wait for a writer, or the file is too
            large.
        StorageError: The file cannot be read.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise FormatError("not a file", location=path, got=stat.filemode(status.st_mode))
        if status.st_size > limit:
            raise size_limit_error(path, status.st_size, limit)
        return path.read_bytes()
    except OSError as error:
        raise storage_error("cannot read", path, error) from error


def _reading_error(activity: str, path: str | Path, error: OSError) -> CheckpointError:
    """Return the error for a file of a checkpoint; if the file is missing, the checkpoint is damaged."""
    if not isinstance(error, FileNotFoundError):
        return storage_error(activity, path, error)
    return FormatError(
        f"{activity} {path}",
        got=f"{error.strerror} (errno {error.errno})",
        hint=f"it was deleted, moved or not copied: {action('doctor')} lists everything that the "
        "checkpoint lacks",
    )


def storage_error(activity: str, path: str | Path, error: OSError) -> StorageError:
    """Convert an OSError to a StorageError, keeping the system's message."""
    hints = {
        "PermissionError": "check who owns it and its mode bits",
        "FileNotFoundError": "check the path: its directory does not exist, or files cannot be created in it",
    }
    # A missing file of a checkpoint is not a mistake in the command, unlike a missing file that the user
    # names.
    return StorageError(
        f"{activity} {path}",
        got=f"{error.strerror} (errno {error.errno})",
        hint=hints.get(type(error).__name__),
    )
