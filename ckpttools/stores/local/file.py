"""Local files, read by position. No mmap: mapped pages would count against the memory budget."""

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

from ckpttools.core.errors import CheckpointError, FormatError, SourceChangedError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.base import LARGEST_WHOLE, File, too_large

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Open files: few at a time, whatever the number of files; those that were not used for longest are closed.
#
# A checkpoint may have more shards than a process may have open files.
#
# More open files than this make nothing quicker.
_MOST = 4096
# What other parts of a process open: libraries, the journal, directories and files that are synced, pipes.
_RESERVE = 48
_LEAST = 8


class Reopened:
    """A file that is open while it is used, and afterwards as long as there is room.

    Args:
        opener: opens it; called again after it was closed. May raise `OSError`.
    """

    def __init__(self, opener: Callable[[], int]) -> None:
        self._opener = opener
        self._opening = threading.Lock()
        # One descriptor or none. Whoever takes it out closes it, which only one thread can do.
        self._descriptor: list[int] = []
        self._users = 0

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Its descriptor, which stays open inside the `with`; errors as those of the opener."""
        _POOL.enter(self)
        try:
            yield self._opened()
        finally:
            _POOL.leave(self)

    def close(self) -> None:
        """Gives the descriptor back now; the next use opens the file again. Not while others use it."""
        try:
            descriptor = self._descriptor.pop()
        except IndexError:
            return
        os.close(descriptor)

    @property
    def is_idle(self) -> bool:
        return self._users == 0

    def _opened(self) -> int:
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
    """What may be open, the longest unused first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[Reopened, None] = OrderedDict()

    def enter(self, file: Reopened) -> None:
        with self._lock:
            file._users += 1
            self._files[file] = None
            self._files.move_to_end(file)

    def leave(self, file: Reopened) -> None:
        with self._lock:
            file._users -= 1

    def make_room(self) -> None:
        if len(self._files) > _allowed(raised=False):
            self.close_idle(_allowed(raised=True))

    def close_idle(self, limit: int) -> None:
        """Closes files that nobody uses until there are so many at most."""
        with self._lock:
            extra = len(self._files) - limit
            idle = (file for file in self._files if file.is_idle)
            # Closed under the lock: nobody can begin to use one meanwhile.
            for file in list(islice(idle, max(0, extra))):
                del self._files[file]
                file.close()


_POOL = _Pool()


def _allowed(*, raised: bool) -> int:
    """How many files may be open here.

    Args:
        raised: whether the process's own limit may be raised, as far as the system permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = _MOST + _RESERVE
    if raised and soft != resource.RLIM_INFINITY and soft < expected and soft != hard:
        soft = expected if hard == resource.RLIM_INFINITY else min(expected, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, soft - _RESERVE))


def iso_time(nanoseconds: int) -> str:
    """Nanoseconds since 1970 as ISO 8601 in UTC, with all digits, so that different times look different."""
    seconds, rest = divmod(nanoseconds, 10**9)
    try:
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        # A file system may have times beyond the year 9999.
        return f"{nanoseconds} ns since 1970"
    return f"{text}.{rest:09}Z" if rest else f"{text}Z"


# Linux transfers at most 2**31 - 4096 bytes a call (read(2)); ask for less, in whole pages.
_MOST_AT_ONCE = 1 << 30
_CHECKED_AT_ONCE = 1 << 20
# A named pipe is opened without waiting for a writer, and refused when it is read by position.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalFile(File):
    """One file, read by all threads; opened at the first read, and again where it had to be closed meanwhile.

    Attributes:
        path: where it is.
        size: its length in bytes when it was opened; a later, shorter file is an error.
        version: when it was last changed, in nanoseconds.
        identity: device and inode that had the path then; None if that was not asked.
    """

    __slots__ = ("__weakref__", "_file", "_head", "identity", "path", "size", "version")

    def __init__(self, path: str, size: int, version: str = "", identity: object = None) -> None:
        self.path = path
        self.size = size
        self.version = version
        self.identity = identity
        self._head = 0, 0
        self._file = Reopened(_Opener(path, _expected_status(size, version, identity)))
        weakref.finalize(self, self._file.close).atexit = False

    @classmethod
    def at(cls, path: str | Path) -> LocalFile:
        """The file as it is now.

        Raises:
            FormatError: it is not there.
            StorageError: it cannot be accessed.
        """
        try:
            status = Path(path).stat()
        except OSError as error:
            raise _reading_error("cannot look at", path, error) from error
        identity = status.st_dev, status.st_ino
        return cls(str(path), status.st_size, str(status.st_mtime_ns), identity)

    def remember_head(self, nbytes: int) -> None:
        """Takes note of the first bytes: the time of change can be set back; errors as `read_into`."""
        self._head = nbytes, self._checksum(nbytes)

    def check_unchanged(self) -> None:
        """Compares file, length, time of change and the remembered head; see `File`.

        Not the time of the last change of its status: another process that links the file changes that, too.
        """
        now = LocalFile.at(self.path)
        if self.identity not in (None, now.identity):
            raise self._changed(f"another file has the name: {_summary(now)}")
        if (now.size, now.version) != (self.size, self.version):
            raise self._changed(_summary(now))
        nbytes, checksum = self._head
        if self._checksum(nbytes) != checksum:
            raise self._changed(f"its header was rewritten: {_summary(now)}")

    def _changed(self, got: str) -> SourceChangedError:
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=got,
            expected=f"the file as it was when it was opened first: {_summary(self)}",
            hint=f"wait until nothing writes to it, then {retry_term()}",
        )

    def _checksum(self, nbytes: int) -> int:
        checksum = 0
        for start in range(0, nbytes, _CHECKED_AT_ONCE):
            checksum = zlib.crc32(self.read(start, min(_CHECKED_AT_ONCE, nbytes - start)), checksum)
        return checksum

    def read_into(self, offset: int, out: Buffer) -> None:
        """Fills `out` with the bytes from `offset` on.

        Raises:
            FormatError: the file ends before, is gone, or was replaced or changed after it had been read.
            StorageError: the system reports an error.
        """
        rest = memoryview(out).cast("B")
        with self._file.lent() as descriptor:
            self._fill(descriptor, offset, rest)

    def has_hole(self, start: int, stop: int) -> bool:
        """Whether bytes of a range are not stored; see `FindsHoles`."""
        with self._file.lent() as descriptor:
            try:
                return os.lseek(descriptor, start, os.SEEK_HOLE) < stop
            except OSError:
                return False

    def _fill(self, descriptor: int, offset: int, rest: memoryview) -> None:
        expected = len(rest)
        while rest:
            try:
                count = os.preadv(descriptor, [rest[:_MOST_AT_ONCE]], offset)
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
        """Gives the descriptor back; a later read opens the file again. Not while others read."""
        self._file.close()

    def __repr__(self) -> str:
        return f"LocalFile({self.path!r})"


def _summary(file: LocalFile) -> str:
    return f"{file.size} bytes, changed at {iso_time(int(file.version))}"


def _expected_status(size: int, version: str, identity: object) -> tuple[int, ...] | None:
    """Return what a file must be when it is opened: a link can lead elsewhere by then, and back later."""
    match identity:
        case (int(device), int(inode)) if version.isdecimal():
            return device, inode, size, int(version)
    return None


class _Opener:
    """Opens a file for reading, and refuses another one that has its name by then."""

    __slots__ = ("_first", "_path")

    def __init__(self, path: str, first: tuple[int, ...] | None = None) -> None:
        self._path = path
        self._first = first

    def __call__(self) -> int:
        """
        Raises:
            FormatError: it is gone, or not the file, or not as long and as old, as at first.
            StorageError: the system reports an error other than too many open files.
        """
        try:
            descriptor = os.open(self._path, _FLAGS)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise _reading_error("cannot open", self._path, error) from error
        status = os.fstat(descriptor)
        now = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        self._first = self._first or now
        if now != self._first:
            os.close(descriptor)
            raise self._changed(now)
        return descriptor

    def _changed(self, now: tuple[int, ...]) -> SourceChangedError:
        first = self._first or now
        what = "ends too early" if now[2] < first[2] else "was changed while it was read"
        return SourceChangedError(
            f"{self._path} {what}",
            got="another file has the name" if now[:2] != first[:2] else _described(now),
            expected=f"the file as it was before: {_described(first)}",
            hint=f"wait until nothing writes to it, then {retry_term()}",
        )


def _described(status: tuple[int, ...]) -> str:
    return f"{status[2]} bytes, changed at {iso_time(status[3])}"


def read_whole(path: Path, limit: int = LARGEST_WHOLE) -> bytes:
    """All of a small file.

    Raises:
        FormatError: it is a pipe or a device, or of a size that no such file has; opening a pipe would wait
            for a writer.
        StorageError: it cannot be read.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise FormatError("not a file", location=path, got=stat.filemode(status.st_mode))
        if status.st_size > limit:
            raise too_large(path, status.st_size, limit)
        return path.read_bytes()
    except OSError as error:
        raise storage_error("cannot read", path, error) from error


def _reading_error(doing: str, path: str | Path, error: OSError) -> CheckpointError:
    """The same for a file that a checkpoint names, not the user: without it the checkpoint is damaged."""
    if not isinstance(error, FileNotFoundError):
        return storage_error(doing, path, error)
    return FormatError(
        f"{doing} {path}",
        got=f"{error.strerror} (errno {error.errno})",
        hint="it was deleted, moved or not copied: `ckpt doctor` says what else the checkpoint lacks",
    )


def storage_error(doing: str, path: str | Path, error: OSError) -> StorageError:
    """An operating-system error in our words, the system's own kept."""
    hints = {
        "PermissionError": "check who owns it and its mode bits",
        "FileNotFoundError": "check the spelling of the path",
    }
    return StorageError(
        f"{doing} {path}",
        got=f"{error.strerror} (errno {error.errno})",
        hint=hints.get(type(error).__name__),
    )
