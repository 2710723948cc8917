"""Looking at paths without ever raising: what may not be looked at counts as not there."""

from __future__ import annotations

from pathlib import Path


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one."""
    try:
        return path.is_file()
    except OSError:  # pathlib lets through what is neither "yes" nor "no", such as no permission
        return False


def is_directory(path: Path) -> bool:
    """Whether there is a directory, or a link to one."""
    try:
        return path.is_dir()
    except OSError:
        return False
