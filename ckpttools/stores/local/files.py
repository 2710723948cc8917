"""Changes to the local file system: durable and atomic writes, renames, and removal."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from ckpttools.core.errors import CheckpointError, NoSpaceError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.local.file import storage_error
from ckpttools.stores.local.mounts import first_mount

# Syncing a file waits for the disk. With more files than this, all file systems are synced once first, which
# is faster but reports no errors; syncing each file then reports them.
MAX_SINGLE_SYNCS = 64
_SYNC_CONCURRENCY = 16
_SYNCS_WAITING = 1024
# Prefix of temporary names for files that are being written, followed by a checksum of the final name and 16
# digits.
_UNFINISHED = ".ckpttools-unfinished-"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
# Errors of kernels and file systems that do not support an operation, such as exchange with renameat2(2).
_UNSUPPORTED = frozenset((errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))


def write_error(path: Path | str, error: OSError) -> CheckpointError:
    """Convert an error of a write; a full disk becomes a NoSpaceError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            "the disk is full",
            location=path,
            got=error.strerror,
            hint=f"free some space and {retry_term()}: it resumes",
        )
    return storage_error("cannot write", path, error)


def make_directory(path: Path) -> None:
    """Create a directory and its parents durably.

    Raises:
        OSError: The system reports an error, or the path is not a directory.
    """
    missing = []
    for location in (path, *path.absolute().parents):
        if location.is_dir():
            break
        missing.append(location)
    for location in reversed(missing):
        location.mkdir(exist_ok=True)
        sync_directory(location.absolute().parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, creating its directories if needed; it becomes durable when its tree is synced.

    Raises:
        OSError: The system reports an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data` at the file's current offset; raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_all_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at an offset; raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        offset, data = offset + count, data[count:]


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file with durable content; its name becomes durable when its directory is synced.

    Raises:
        OSError: The system reports an error. The file is then removed, because data remains readable after a
            failed sync, but later syncs do not make it durable (fsync(2)).
    """
    _write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666), path, content)


def _write(descriptor: int, path: Path, content: bytes) -> None:
    """Write, sync and close a file; remove it on failure."""
    try:
        write_all(descriptor, content)
        sync_file(descriptor)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def claim(path: Path, content: bytes) -> bool:
    """Create a small file and its directories durably, unless the path exists.

    Returns:
        Whether the file was created; False if the path exists.

    Raises:
        OSError: The system reports an error. The file is then removed if possible.
    """
    make_directory(path.absolute().parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    _write(descriptor, path, content)
    sync_directory(path.absolute().parent)
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file atomically and durably.

    The file is written under a hidden temporary name. Temporary files of killed processes are removed by the
    next write of this file, if the file system has locks.

    Raises:
        OSError: The system reports an error. An existing file is kept, unless only the last sync failed.
    """
    _remove_unfinished(path)
    growing, descriptor = _create_temporary(path)
    try:
        write_all(descriptor, content)
        sync_file(descriptor)
        growing.replace(path)
    except BaseException:
        growing.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create and lock a temporary file next to `path`; return its path and descriptor."""
    while True:
        growing = path.with_name(_temporary_prefix(path) + os.urandom(8).hex())
        descriptor = os.open(growing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(descriptor)
        # Another process could have removed the file as abandoned before it was locked.
        if growing.exists():
            return growing, descriptor
        os.close(descriptor)


def _temporary_prefix(path: Path) -> str:
    """Return the prefix of temporary names for `path`; its length does not depend on the name."""
    return f"{_UNFINISHED}{zlib.crc32(os.fsencode(path.name)):08x}-"


def _remove_unfinished(path: Path) -> None:
    """Remove temporary files for `path` that killed processes left; running processes hold a lock."""
    unfinished = re.compile(re.escape(_temporary_prefix(path)) + "[0-9a-f]{16}")
    with suppress(OSError):  # Write permission for a directory does not imply read permission.
        for name in filter(unfinished.fullmatch, names_in(path.parent)):
            _remove_if_unlocked(path.with_name(name))


def _remove_if_unlocked(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(descriptor, waiting=False):
                path.unlink()
        finally:
            os.close(descriptor)


def _lock(descriptor: int, *, waiting: bool = True) -> bool:
    """Lock a file for this process; return False if another process holds it or locks are unsupported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waiting else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def sync_file(descriptor: int, *, is_data: bool = False) -> None:
    """Make the content of an open file or directory durable.

    Args:
        descriptor: The file descriptor.
        is_data: Whether times and permissions of the file need not be durable, which is faster.

    Raises:
        OSError: The system reports an error.
    """
    # On macOS, fsync(2) leaves data in the disk's cache, which F_FULLFSYNC flushes.
    if (flush := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(descriptor, flush)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    sync = getattr(os, "fdatasync", os.fsync) if is_data else os.fsync
    sync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make every file and directory at or below `path` durable, without following symbolic links."""
    below = (
        Path(top, name) for top, dirs, files in os.walk(path, onerror=_raise) for name in (*dirs, *files)
    )
    locations = chain([path], below)
    # Sync in batches: each waiting path takes 2 KiB, and there may be hundreds of thousands.
    first = list(islice(locations, MAX_SINGLE_SYNCS + 1))
    if len(first) > MAX_SINGLE_SYNCS:
        os.sync()
        _sync_in_threads(chain(first, locations))
    else:
        for location in first:
            _sync_location(location)


def _raise(error: OSError) -> NoReturn:
    raise error


def _sync_in_threads(locations: Iterator[Path]) -> None:
    """Sync paths in threads, because the disk's journal serves waiting syncs together."""
    while batch := list(islice(locations, _SYNCS_WAITING)):
        map_in_threads(_SYNC_CONCURRENCY, _sync_location, batch)


def _sync_location(location: Path) -> None:
    if location.is_dir() and not location.is_symlink():
        sync_directory(location)
        return
    descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def exchange(a: Path, b: Path) -> bool:
    """Atomically exchange two names on one file system.

    Returns:
        Whether the names were exchanged; False if the kernel or file system does not support it
        (renameat2(2)).

    Raises:
        OSError: The system reports any other error.
    """
    call = _renameat2()
    if call is None:
        return False
    code = call(os.fsencode(a), os.fsencode(b))
    if code in _UNSUPPORTED:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(b))
    return True


@cache
def _renameat2() -> Callable[[bytes, bytes], int] | None:
    """Return the C function that exchanges two paths and returns an error number; None if there is none."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None

    def exchanged(a: bytes, b: bytes) -> int:
        failed = call(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
        return ctypes.get_errno() if failed else 0

    return exchanged


def check_can_rename(path: Path, scratch: Path) -> None:
    """Check that a directory can be renamed in one step, without moving it.

    Overlay file systems, as in containers, refuse to rename a directory of a lower layer. The probe renames
    `path` onto a scratch directory that has an entry. Every file system refuses this (rename(2)), but overlay
    file systems report EXDEV, because they check the layer before the entries.

    Args:
        path: The directory to rename.
        scratch: A temporary name on the same file system that no other process uses. If its directory does
            not exist, that is also created and removed.

    Raises:
        StorageError: The file system cannot rename the directory.
        OSError: The probe cannot be made or removed.
    """
    occupied = scratch / "occupied"
    parent = [] if scratch.parent.exists() else [scratch.parent]
    try:
        occupied.mkdir(parents=True, exist_ok=True)
        path.rename(scratch)
        # No file system is known to allow this rename. If one does, the directory must not keep the scratch
        # name.
        scratch.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            for item in (occupied, scratch, *parent):
                with suppress(OSError):
                    item.rmdir()
            if error.errno == errno.EXDEV:
                raise rename_error(path, error) from error
            raise
    # A scratch directory that cannot be removed would remain after the command, so it stops before writing.
    for item in (occupied, scratch):
        with suppress(FileNotFoundError):
            item.rmdir()
    for item in parent:
        with suppress(OSError):
            item.rmdir()


def moved_error(directory: Path) -> StorageError:
    """Return the error for a directory that another process moved during the write."""
    return StorageError(
        f"{directory} was removed, moved or replaced while it was written",
        expected="the directory that this command created, under the same path until the command ends",
        hint=f"find the process that moved it or changed a link in its path; then {retry_term()}",
    )


def rename_error(path: Path | str, error: OSError) -> StorageError:
    """Return the error for a file or directory that the system cannot rename."""
    if error.errno != errno.EXDEV:
        return storage_error("cannot rename", path, error)
    return StorageError(
        f"the file system cannot rename {path}",
        got=f"{error.strerror} (errno {error.errno}), as for directories in a lower layer of an overlay "
        "(a container image)",
        expected="a directory that can be renamed in one step, so that an interrupted run loses nothing",
        hint="copy it to a volume and work there; deleting files of an image's layer frees no space",
    )


def names_in(directory: Path) -> list[str]:
    """Return the sorted names in a directory.

    Raises:
        OSError: The directory cannot be listed.
    """
    return sorted(location.name for location in directory.iterdir())


def remove_tree(path: Path, last: str = "") -> None:
    """Remove a directory tree if it exists; symbolic links are removed but not followed.

    Args:
        path: The directory to remove.
        last: Name of a file in the directory that is removed last.

    Raises:
        StorageError: A file system is mounted at or below the directory. Nothing is removed.
        OSError: A file cannot be removed. The error has its full path.
    """
    if not os.path.lexists(path):
        return
    check_no_mount(path)
    is_directory = path.is_dir() and not path.is_symlink()
    for name in sorted(names_in(path), key=last.__eq__) if is_directory else ():
        _remove_entry(path / name)
    _remove_entry(path)


def check_no_mount(path: Path) -> None:
    """Raise StorageError if a file system is mounted at or below a directory that will be removed."""
    mount = first_mount(path)
    if mount is not None:
        raise StorageError(
            f"{path} was not removed: it contains a mount point",
            location=mount,
            expected="a directory of one file system: mounted files would be deleted, too",
            hint=f"umount {mount}, then {retry_term()}",
        )


def _remove_entry(location: Path) -> None:
    if location.is_dir() and not location.is_symlink():
        # The system's own error has only the last component of a nested path.
        shutil.rmtree(location, onerror=_raise_with_path)
    else:
        location.unlink()


def _raise_with_path(function: Callable[..., object], path: str, error: tuple[Any, Any, Any]) -> NoReturn:
    raised = error[1]
    raised.filename = path
    raise raised


@contextmanager
def errors_of(location: Path) -> Iterator[None]:
    """Convert OSErrors in a `with` block to errors that name the location."""
    try:
        yield
    except OSError as error:
        raise write_error(error.filename or location, error) from error
