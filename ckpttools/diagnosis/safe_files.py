"""Probe files without raising errors, and create new ones without replacing others."""

from __future__ import annotations

from ckpttools.core.errors import FormatError, StorageError
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


def write_new(path: Location, content: bytes) -> None:
    """Write a file that appears only once it is complete.

    Raises:
        FormatError: The file already exists.
        StorageError: The file cannot be written.
    """
    refuse_existing(path)
    path.put(content)


def refuse_existing(path: Location) -> None:
    """Raise FormatError if anything has this name, even a broken link."""
    if path.lexists():
        raise FormatError(f"{path} already exists", hint="rename it, then run the command again")


def holds(path: Location, content: bytes) -> bool:
    """Return whether a file with these bytes exists."""
    return is_file(path) and path.read_bytes() == content
