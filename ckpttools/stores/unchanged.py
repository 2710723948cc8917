"""A source is what it was when it was planned: looked at again when it has been read."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.errors import FormatError
from ckpttools.stores.local import LocalFile


def check_unchanged(sources: Iterable[object]) -> None:
    """Compares files with what they were when they were first looked at.

    Args:
        sources: what was read; others than local files cannot change.

    Raises:
        FormatError: a file was changed, so what was read of it may be of two states.
        StorageError: it is not there any more.
    """
    for source in sources:
        if isinstance(source, LocalFile) and not source.is_unchanged():
            now = LocalFile.at(source.path)
            raise FormatError(
                f"{source.path} was changed while it was read",
                got=f"{now.size} bytes, changed at {now.version}",
                wanted=f"{source.size} bytes, changed at {source.version}, as when it was looked at first",
                hint="wait until nothing writes to it, then run the command again",
            )
