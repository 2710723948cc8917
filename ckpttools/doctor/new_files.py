"""New files, as fixes write them: whole or not at all, and never in the place of another one."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttools.core.errors import FormatError
from ckpttools.doctor.looking import is_file
from ckpttools.stores.local.file import storage_error


def write_new(path: Path, content: bytes) -> None:
    """Writes a file under another name, then gives it its own.

    What an interrupted run left under that other name is the beginning of the same file: it is written again.

    Raises:
        FormatError: one of the two is there already.
        StorageError: it cannot be written.
    """
    refuse_existing(path)
    beside = path.with_name(path.name + ".new")
    try:
        if not _is_beginning(beside, content):
            refuse_existing(beside)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except OSError as error:
        raise storage_error("cannot write", path, error) from error


def refuse_existing(path: Path) -> None:
    """Raises FormatError if there is anything of this name, be it a link to nothing."""
    if os.path.lexists(path):
        raise FormatError(f"{path} is there already", hint="give it another name, then run the command again")


def holds(path: Path, content: bytes) -> bool:
    """Whether there is a file with these bytes."""
    return is_file(path) and path.read_bytes() == content


def _is_beginning(path: Path, content: bytes) -> bool:
    return is_file(path) and not path.is_symlink() and content.startswith(path.read_bytes())
