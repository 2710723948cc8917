"""What is at a name already, and whether a checkpoint can have it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckpttools.core.errors import DestinationExistsError
from ckpttools.stores.local.file import storage_error
from ckpttools.stores.local.mounts import first_mount


def is_free(path: Path) -> bool:
    """Whether a directory can be renamed to this name without anything being lost."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None and first_mount(path) is None
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def check_directory(destination: Path) -> None:
    """Raises DestinationExistsError if something is there that no checkpoint can replace."""
    what = None
    hint = "choose another destination"
    mount = first_mount(destination)
    if destination.is_symlink():
        what = f"is a symbolic link to {destination.readlink()}"
    elif not destination.is_dir():
        what = "is a file"
    elif mount == destination.resolve():
        what = "is where a file system is mounted, and a mount point cannot be replaced"
    elif mount is not None:
        what = f"holds what is mounted at {mount}, and would be deleted with what is replaced"
        hint = f"{hint}, or umount {mount}"
    if what:
        raise DestinationExistsError(
            f"{destination} {what}",
            expected="a new name, or an empty directory",
            hint=hint,
        )


def allocated(path: Path) -> int:
    """Bytes on disk of all files below `path` that are not shared with another checkpoint."""
    result = 0
    # Another process may be giving it its name, or removing it, meanwhile.
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                each = Path(directory, name).lstat()
                result += each.st_blocks * 512 * (each.st_nlink == 1)
    return result
