"""A source is what it was when it was planned: looked at again when it was read, and when it is linked."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.stores.base import File


def check_unchanged(sources: Iterable[object]) -> None:
    """Compares files with what they were when they were first looked at.

    Args:
        sources: what was read; what is not a file of a store cannot change.

    Raises:
        SourceChangedError, FormatError, StorageError: as `File.check_unchanged`.
    """
    for source in sources:
        if isinstance(source, File):
            source.check_unchanged()
