"""The local file system as a store. Keys are paths as written by `pathlib`; "" is the current directory."""

from __future__ import annotations

import errno
import os
import stat as modes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ckpttools.core.errors import StorageError
from ckpttools.stores.abilities import CopyIdentity, LinkTrials
from ckpttools.stores.base import LARGEST_WHOLE, DirEntry, File, FileKind, Status, Store
from ckpttools.stores.local.file import LocalFile, read_whole, storage_error
from ckpttools.stores.local.mounts import LOCAL_CTIME_TYPES, boot_id, file_system_type
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX, JobInfo, Unfinished

if TYPE_CHECKING:
    from ckpttools.stores.local.shared_staging import SharedLocalStaging
    from ckpttools.stores.location import Location

# Network file systems, on which clusters store checkpoints: each host reads the same files.
_SHARED = frozenset(("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph"))
# Errors that `pathlib` treats as "does not exist", including link cycles. A file cannot have a name that is
# too long.
_MISSING_ERRNOS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG))


def _stat_result(key: str) -> os.stat_result | None:
    """Return the status of a file or directory; None if it does not exist."""
    try:
        return os.stat(key or ".")
    except ValueError:  # A file cannot have a name with a NUL byte.
        return None
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return None
        raise storage_error("cannot inspect", key or ".", error) from error


class LocalStore(Store):
    """The files of this machine and its mounts."""

    scheme: ClassVar[str] = "file"

    def stat(self, key: str) -> Status | None:
        result = _stat_result(key)
        if result is None:
            return None
        kind, time = _kind(result.st_mode), result.st_mtime_ns
        size, version = (result.st_size, str(time)) if kind is FileKind.FILE else (0, "")
        return Status(kind, size, version, (result.st_dev, result.st_ino), time, result.st_nlink)

    def copy_identity(self, key: str) -> CopyIdentity:
        """Return the inode, size and times of a file; see `SupportsCopyIdentity`."""
        status = _stat_result(key)
        if status is None:
            return CopyIdentity("")
        file = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        kind = file_system_type(key, status.st_dev)
        mount = "" if kind in _SHARED else f"{boot_id()} {status.st_dev}"
        # Tools that build images set the ctime to full seconds, and Lustre stores full seconds.
        is_clock = kind == "lustre" or status.st_ctime_ns % 10**9 != 0
        return CopyIdentity(file, mount, is_clock and kind in _SHARED | LOCAL_CTIME_TYPES)

    def list(self, key: str) -> Iterator[DirEntry]:
        try:
            with os.scandir(key or ".") as entries:
                yield from map(_entry, entries)
        except OSError as error:
            raise storage_error("cannot list", key or ".", error) from error
        except ValueError as error:  # A name with a NUL byte is invalid.
            raise StorageError(f"cannot list {key!r}", got=error) from error

    def open(self, key: str, status: Status | None = None) -> LocalFile:
        if status is None:
            return LocalFile.at(key)
        return LocalFile(key, status.size, status.version, status.identity)

    def read(self, key: str, limit: int = LARGEST_WHOLE) -> bytes:
        return read_whole(Path(key), limit)

    def uri(self, key: str) -> str:
        return key or "."

    def absolute(self, key: str) -> str:
        # Not `abspath`, because `..` after a link leads to the parent of its target.
        return str(Path(key).absolute())

    def real(self, key: str) -> str:
        return os.path.realpath(key)

    def aliases(self, key: str) -> Iterator[object]:
        """Yield the inode and the path within the file system; see `SupportsAliases`."""
        from ckpttools.stores.local.mounts import path_in_file_system

        if (status := _stat_result(key)) is not None:
            yield status.st_dev, status.st_ino
        if (path := path_in_file_system(Path(key))) is not None:
            yield path

    def parent_aliases(self, key: str) -> Iterator[object]:
        """See `SupportsAliases`."""
        from ckpttools.stores.local.mounts import path_in_file_system

        for parent in Path(key).parents:
            if (status := _stat_result(str(parent))) is not None:
                yield status.st_dev, status.st_ino
        if (result := path_in_file_system(Path(key))) is not None:
            device, path = result
            yield from ((device, parent) for parent in path.parents)

    def link_target(self, key: str) -> str | None:
        try:
            return os.readlink(key)
        except (OSError, ValueError):
            return None

    def may_read(self, key: str) -> bool:
        return os.access(key or ".", os.R_OK)

    def rename(self, old: str, new: str) -> None:
        from ckpttools.stores.local.files import make_directory, rename_error, sync_directory

        try:
            make_directory(Path(new).absolute().parent)
            Path(old).rename(new)
            for location in (Path(new), Path(old)):
                sync_directory(location.absolute().parent)
        except OSError as error:
            raise rename_error(old, error) from error

    def check_can_rename(self, key: str, scratch: str) -> None:
        """Check that a directory can be renamed; see `SupportsRename.check_can_rename`."""
        from ckpttools.stores.local.files import check_can_rename

        with _writing(key):
            check_can_rename(Path(key), Path(scratch))

    def claim(self, key: str, content: bytes) -> bool:
        """See `SupportsRemove.claim`."""
        from ckpttools.stores.local.files import claim

        with _writing(key):
            return claim(Path(key), content)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """See `SupportsRemove.locked`. The directory itself is locked, so that no lock file remains."""
        import fcntl

        from ckpttools.stores.local.journal import locked_error

        with _writing(key):
            descriptor = os.open(key or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # Some file systems do not support locks.
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise locked_error("another process holds its lock", key, descriptor) from None
            yield
        finally:
            os.close(descriptor)

    def remove(self, key: str) -> None:
        """See `SupportsRemove.remove`."""
        from ckpttools.stores.local.files import remove_tree, sync_directory

        with _writing(key):
            remove_tree(Path(key))
            if Path(key).absolute().parent.is_dir():
                sync_directory(Path(key).absolute().parent)

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """See `SupportsWalk`. Links to files are followed, links to directories are not."""
        waiting = [""]
        while waiting:
            start = waiting.pop()
            for entry in self.list(_relative_key(key, start)):
                name = start + entry.name
                if entry.is_own_dir:
                    waiting.append(f"{name}/")
                elif entry.is_file and (result := self.stat(_relative_key(key, name))):
                    yield name, result

    def put(self, key: str, content: bytes) -> None:
        from ckpttools.stores.local.files import make_directory, write_atomically

        with _writing(key):
            make_directory(Path(key).parent)
            write_atomically(Path(key), content)

    def write(self, key: str, content: bytes) -> None:
        from ckpttools.stores.local.files import write_file

        with _writing(key):
            write_file(Path(key), content)

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        with _writing(key), Path(key).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def link_trials(self, key: str) -> LinkTrials:
        from ckpttools.stores.local.links import LocalTrials

        return LocalTrials(Path(key))

    def link(self, source: File, key: str) -> bool:
        from ckpttools.stores.local.links import link

        if not isinstance(source, LocalFile):
            return False
        with _writing(key):
            Path(key).parent.mkdir(parents=True, exist_ok=True)
            return link(source, Path(key))

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        from ckpttools.stores.local.links import copy_parts

        with _writing(key):
            copy_parts(source, Path(key), parts)

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> SharedLocalStaging:
        from ckpttools.stores.local.shared_staging import SharedLocalStaging

        return SharedLocalStaging(Path(key), overwrite, check_replaced)

    def unfinished(self, key: str) -> Unfinished | None:
        if not key.endswith(SUFFIX):
            return None
        from ckpttools.stores.local.journal import JOURNAL, REPLACED, read_job_info

        journal = self.stat(_relative_key(key, JOURNAL))
        if journal is None or journal.kind is not FileKind.FILE:
            return None
        replaced = _relative_key(key, REPLACED)
        result = self.stat(replaced)
        is_there = result is not None and result.kind is FileKind.DIRECTORY
        job_info = read_job_info(Path(key, JOURNAL)) or JobInfo("")
        return Unfinished(
            _location(key),
            _location(replaced) if is_there else None,
            job_info.command,
            directory=job_info.directory,
            plan=job_info.plan,
            division=job_info.division,
        )

    def find_unfinished(self, key: str) -> Unfinished | None:
        path = Path(key)
        if path.name in ("", ".."):
            return None
        moved = path / PLAN_MARK
        if (result := self.unfinished(str(path) + SUFFIX)) or not self.stat(str(moved)):
            return result
        from ckpttools.stores.local.journal import is_journal, read_job_info

        if not is_journal(moved):
            return None
        job_info = read_job_info(moved) or JobInfo("")
        return Unfinished(
            _location(str(path) + SUFFIX),
            None,
            job_info.command,
            directory=job_info.directory,
            plan=job_info.plan,
            division=job_info.division,
        )


def _entry(entry: os.DirEntry[str]) -> DirEntry:
    is_link = entry.is_symlink()
    try:
        is_file, is_dir = entry.is_file(), entry.is_dir()
    except OSError:  # Link cycles, or targets without permission.
        is_file, is_dir = False, False
    kind = FileKind.FILE if is_file else FileKind.DIRECTORY if is_dir else FileKind.OTHER
    return DirEntry(entry.name, kind, is_link)


def _relative_key(key: str, name: str) -> str:
    return os.path.join(key, name)  # The target is not normalized.


def _kind(mode: int) -> FileKind:
    if modes.S_ISREG(mode):
        return FileKind.FILE
    return FileKind.DIRECTORY if modes.S_ISDIR(mode) else FileKind.OTHER


@contextmanager
def _writing(key: str) -> Iterator[None]:
    from ckpttools.stores.local.files import write_error

    try:
        yield
    except OSError as error:
        raise write_error(error.filename or key, error) from error


def _location(key: str) -> Location:
    from ckpttools.stores.location import Location

    return Location(STORE, key)


STORE = LocalStore()
