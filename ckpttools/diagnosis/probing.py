"""Probing paths without ever raising: what cannot be accessed counts as absent."""

from __future__ import annotations

from ckpttools.core.errors import StorageError
from ckpttools.stores.location import Location


def is_file(path: Location) -> bool:
    """Whether there is a regular file, or a link to one."""
    try:
        return path.is_file()
    except StorageError:
        return False


def is_directory(path: Location) -> bool:
    """Whether there is a directory, or a link to one."""
    try:
        return path.is_dir()
    except StorageError:
        return False
