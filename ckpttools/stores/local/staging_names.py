"""Names in a staging directory, and the mark that names the plan of an unpublished checkpoint."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckpttools.stores.local.file import read_whole, storage_error
from ckpttools.stores.local.files import sync_directory
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX

JOURNAL = "journal.ckpttools"
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
