"""List all files of a directory. Files that cannot be copied raise an error, so nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.base import DirEntry, FileKind, Status
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK


def files_below(directory: Location) -> Mapping[str, Status]:
    """Return the status of each file below a directory, sorted by "/"-separated name.

    Links to files are followed.

    Raises:
        FormatError: The directory contains something other than files and directories, or a link to a
            directory.
        StorageError: The directory does not exist, or the store cannot be read.
    """
    names = sorted(_names(directory))
    result = map_concurrently(directory.store, lambda name: (directory / name).stat(), names)
    for name, status in zip(names, result, strict=True):
        if status.kind is not FileKind.FILE:
            raise _refused(directory / name, "something that was a file when it was listed")
    return dict(zip(names, result, strict=True))


def _names(directory: Location) -> Iterator[str]:
    for name, entry in directory.below():
        if entry.is_own_dir:
            continue
        if not entry.is_file:
            raise _refused(directory / name, _what(entry))
        # The plan mark belongs to the command that wrote this checkpoint, not to a copy.
        if name != PLAN_MARK:
            yield name


def _what(entry: DirEntry) -> str:
    if entry.is_dir:
        return "a link to a directory"
    return "a link that leads to no file" if entry.is_link else "neither a file nor a directory"


def _refused(location: Location, got: str) -> FormatError:
    return FormatError(
        "not everything here can be copied",
        location=location,
        got=got,
        expected="files, links to files, and directories",
        hint=f"remove it, or replace it with its target; then {retry_term()}",
    )
