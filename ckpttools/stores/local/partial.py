"""The directory beside a destination in which a checkpoint grows: its names, and how it is known."""

from __future__ import annotations

from pathlib import Path

from ckpttools.stores.publishing import SUFFIX

JOURNAL = "journal.ckpttools"
CONTENT, REPLACED, REMOVED = "content", "replaced", "removed"


def is_staging(path: Path) -> bool:
    """Whether a directory is one in which a conversion grows, or grew until it was interrupted."""
    return path.name.endswith(SUFFIX) and (path / JOURNAL).is_file()
