"""Hard links: additional names of existing files, which take no space and remain if the first name is
removed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ckpttools.stores.base import File, check_unchanged
from ckpttools.stores.local.file import LocalFile
from ckpttools.stores.local.files import write_all_at
from ckpttools.stores.local.journal import CONTENT
from ckpttools.stores.publishing import SUFFIX

# Errors for refused links: another file system, another owner's file (`fs.protected_hardlinks`), too many
# links, or no support for links.
_REFUSALS = frozenset(
    (
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
    )
)
_COPY_BYTES = 8 << 20
# Prefix of trial links: second names of weight files that exist for the duration of a system call.
_TRIAL = re.compile(r"\.ckpttools-trial-[0-9a-f]{16}")


class LocalTrials:
    """Tests whether files can be linked into a directory by linking one file per group of similar files."""

    def __init__(self, directory: Path) -> None:
        """Create a tester for links in a directory.

        Args:
            directory: Directory of the future links. Trials are made in its staging directory, so that
                existing files are not affected.
        """
        self._near = next(location for location in directory.absolute().parents if location.is_dir())
        self._directories = directory, directory.with_name(directory.name + SUFFIX) / CONTENT
        self._known: dict[tuple[object, ...], str | None] = {}
        _remove_trials(self._near)

    def refusal(self, source: File) -> str | None:
        """Return the system's reason why a file cannot be linked; None if it can."""
        if not isinstance(source, LocalFile):
            return "it is not a local file"
        try:
            real = Path(source.path).resolve(strict=True)
            status = real.stat()
        except OSError as error:
            return error.strerror or str(error)
        if status.st_nlink > 1 and (status.st_dev, status.st_ino) in self._linked:
            # A trial would change the ctime, by which an interrupted run recognizes its sources.
            return None
        kind = (real.parent, status.st_dev, status.st_uid, status.st_mode)
        if kind not in self._known:
            self._known[kind] = self._try_link(real)
        return self._known[kind]

    @cached_property
    def _linked(self) -> frozenset[tuple[int, int]]:
        """Return the device and inode of the files that an earlier run linked."""
        result = set()
        for directory in self._directories:
            for parent, _, names in os.walk(directory):
                for name in names:
                    with suppress(OSError):
                        status = Path(parent, name).lstat()
                        result.add((status.st_dev, status.st_ino))
        return frozenset(result)

    def _try_link(self, real: Path) -> str | None:
        name = self._near / f".ckpttools-trial-{os.urandom(8).hex()}"
        try:
            os.link(real, name)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with suppress(OSError):
                name.unlink()
        return None


def _remove_trials(directory: Path) -> None:
    """Remove trial links that killed processes left, which would keep the weights from being deleted.

    Concurrent trials are not affected, because their link has already succeeded.
    """
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _TRIAL.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)


def link(source: LocalFile, target: Path) -> bool:
    """Link a file to `target`, unless it is already linked there.

    Returns:
        Whether the file is linked; False if the file system refuses.

    Raises:
        FormatError: The file has changed since it was opened.
        StorageError: The file no longer exists.
        OSError: The system reports any other error.
    """
    check_unchanged([source])
    # Python's `os.link` would link the symbolic link itself, and files in the Hugging Face cache are symbolic
    # links.
    real = Path(os.path.realpath(source.path))
    try:
        if os.path.lexists(target):
            if real.samefile(target):
                return True
            target.unlink()
        os.link(real, target)
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    return True


def copy_parts(source: File, target: Path, parts: Iterable[tuple[int, int]]) -> None:
    """Create a sparse file of the same length with the same bytes in the given ranges.

    Args:
        source: The file to copy from.
        target: The new file, which must not exist, because an existing one might be a link.
        parts: (start, stop) of each range.

    Raises:
        FormatError, StorageError: The source cannot be read.
        OSError: The target cannot be written.
    """
    buffer = memoryview(bytearray(_COPY_BYTES))
    with target.open("xb", buffering=0) as file:
        file.truncate(source.size)
        for start, stop in parts:
            for offset in range(start, stop, _COPY_BYTES):
                piece = buffer[: min(_COPY_BYTES, stop - offset)]
                source.read_into(offset, piece)
                write_all_at(file.fileno(), offset, piece)
