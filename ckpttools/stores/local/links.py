"""Hard links: a second name for a file that is there already, which takes no room and outlives the first."""

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
from ckpttools.stores.local.staging_names import CONTENT
from ckpttools.stores.publishing import SUFFIX

# What a file system or the kernel answers where it does not link: another file system, a file of somebody
# else's (`fs.protected_hardlinks`), too many names, no links at all.
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
# A trial is a second name for weights, for as long as a system call takes.
_TRIAL = re.compile(r"\.ckpttools-trial-[0-9a-f]{16}")


class LocalTrials:
    """Finds out whether files can be linked into a directory, by doing it: once for files that are alike."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: where links would go. The trials are made beside it, where it grows until it gets its
                name: what is in it now is not touched.
        """
        self._near = next(location for location in directory.absolute().parents if location.is_dir())
        self._directories = directory, directory.with_name(directory.name + SUFFIX) / CONTENT
        self._known: dict[tuple[object, ...], str | None] = {}
        _remove_trials(self._near)

    def refusal(self, source: File) -> str | None:
        """Why a file cannot be linked, in the system's words; None if it can."""
        if not isinstance(source, LocalFile):
            return "it is not a local file"
        try:
            real = Path(source.path).resolve(strict=True)
            status = real.stat()
        except OSError as error:
            return error.strerror or str(error)
        if status.st_nlink > 1 and (status.st_dev, status.st_ino) in self._linked:
            # A trial would change the ctime, by which an interrupted run knows its sources again.
            return None
        kind = (real.parent, status.st_dev, status.st_uid, status.st_mode)
        if kind not in self._known:
            self._known[kind] = self._tried(real)
        return self._known[kind]

    @cached_property
    def _linked(self) -> frozenset[tuple[int, int]]:
        """The files that an earlier run has linked."""
        result = set()
        for directory in self._directories:
            for parent, _, names in os.walk(directory):
                for name in names:
                    with suppress(OSError):
                        status = Path(parent, name).lstat()
                        result.add((status.st_dev, status.st_ino))
        return frozenset(result)

    def _tried(self, real: Path) -> str | None:
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
    """Removes trials that a killed process left: they would keep the weights from being deleted.

    One that is going on right now loses nothing by it: that its link was made is known already.
    """
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _TRIAL.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)


def link(source: LocalFile, target: Path) -> bool:
    """Gives a file the name `target`, too, unless it has it already.

    Returns:
        Whether that was done; False where the file system refuses it.

    Raises:
        FormatError: the file is not what it was when it was opened.
        StorageError: it is not there any more.
        OSError: anything else that the system reports.
    """
    check_unchanged([source])
    # Python's `os.link` links a symbolic link itself, and all files of the Hugging Face cache are such.
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
    """Makes a file of the same length that has the same bytes in some parts, and holes between them.

    Args:
        source: the file.
        target: the new one, which must not be there: what has that name might be a link.
        parts: (start, stop) of each part.

    Raises:
        FormatError, StorageError: reading fails.
        OSError: writing fails.
    """
    buffer = memoryview(bytearray(_COPY_BYTES))
    with target.open("xb", buffering=0) as file:
        file.truncate(source.size)
        for start, stop in parts:
            for offset in range(start, stop, _COPY_BYTES):
                piece = buffer[: min(_COPY_BYTES, stop - offset)]
                source.read_into(offset, piece)
                write_all_at(file.fileno(), offset, piece)
