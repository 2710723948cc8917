"""The mark that names the plan of a checkpoint, from its first to its last moment in our hands."""

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
    """Whether a directory is one in which a conversion grows, or grew until it was interrupted."""
    return path.name.endswith(SUFFIX) and (path / JOURNAL).is_file()


_LONGEST_MARK = 1 << 10


def mark_of(location: Path) -> str | None:
    """The plan that a directory is marked with; None if it is not there or not marked.

    Raises:
        StorageError: the system does not tell.
    """
    mark = location / PLAN_MARK
    try:
        status = mark.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error("cannot look at", mark, error) from error
    is_ours = stat.S_ISREG(status.st_mode) and status.st_size <= _LONGEST_MARK
    return read_whole(mark).decode(errors="replace") if is_ours else ""


def unmark(location: Path) -> None:
    """Takes the mark out of a checkpoint, durably, if there is one."""
    mark = location / PLAN_MARK
    if os.path.lexists(mark):
        mark.unlink()
        sync_directory(location)
