"""Probe paths without raising errors. Inaccessible paths count as absent."""

from __future__ import annotations

from ckpttools.core.errors import StorageError
from ckpttools.stores.location import Location


def is_file(path: Location) -> bool:
    """Return whether a regular file, or a link to one, exists."""
    try:
        return path.is_file()
    except StorageError:
        return False


def is_directory(path: Location) -> bool:
    """Return whether a directory, or a link to one, exists."""
    try:
        return path.is_dir()
    except StorageError:
        return False
