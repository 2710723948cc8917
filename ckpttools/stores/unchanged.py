"""A source is what it was when it was planned: looked at again when it was read, and when it is linked."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.core.errors import SourceChangedError
from ckpttools.stores.local import LocalFile
from ckpttools.stores.times import iso_time


def check_unchanged(sources: Iterable[object]) -> None:
    """Compares files with what they were when they were first looked at.

    Args:
        sources: what was read; others than local files cannot change.

    Raises:
        SourceChangedError: a file was changed, so what was read of it may be of two states.
        FormatError: it is gone.
        StorageError: it may not be looked at.
    """
    for source in sources:
        if isinstance(source, LocalFile) and not source.is_unchanged():
            raise _changed(source, LocalFile.at(source.path))


def _changed(before: LocalFile, now: LocalFile) -> SourceChangedError:
    if before.identity not in (None, now.identity):
        got = f"another file has the name: {_described(now)}"
    elif (now.size, now.version) == (before.size, before.version):
        got = f"its header was rewritten: {_described(now)}"
    else:
        got = _described(now)
    return SourceChangedError(
        f"{before.path} was changed while it was read",
        got=got,
        wanted=f"the file as it was when it was looked at first: {_described(before)}",
        hint="wait until nothing writes to it, then run the command again",
    )


def _described(file: LocalFile) -> str:
    return f"{file.size} bytes, changed at {iso_time(int(file.version))}"
