"""What the files of a checkpoint are when it gets its name, so that it shows later whether they still are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpttools.core.errors import DestinationExistsError
from ckpttools.stores.publishing import PLAN_MARK
from ckpttools.stores.times import iso_time


def inventory(directory: Path) -> Iterator[str]:
    """A line for each file at and below a directory: its length in bytes, when it was changed in nanoseconds,
    and its name. The mark of the plan is left out: it goes when all is done.

    Raises:
        OSError: the system reports an error.
    """
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif Path(entry.path) != directory / PLAN_MARK:
                    yield _line(Path(entry.path), directory)


def check_inventory(directory: Path, lines: Iterable[str], hint: str) -> None:
    """Compares the files of a checkpoint with its inventory; what was added since does not matter.

    Args:
        directory: the checkpoint.
        lines: its inventory.
        hint: the next step where it is not what it was.

    Raises:
        DestinationExistsError: a file was changed, or is not there any more.
        OSError: the system reports an error.
    """
    for line in lines:
        name = line.split(" ", 2)[2]
        try:
            now = _line(directory / name, directory)
        except (FileNotFoundError, NotADirectoryError):
            now = None
        if now != line:
            raise DestinationExistsError(
                f"{directory} was changed since a conversion put it there that was stopped before it could "
                "say so",
                location=directory / name,
                got=_described(now),
                expected=_described(line),
                hint=hint,
            )


def _line(path: Path, directory: Path) -> str:
    status = path.lstat()
    return f"{status.st_size} {status.st_mtime_ns} {path.relative_to(directory).as_posix()}"


def _described(line: str | None) -> str:
    if line is None:
        return "no such file"
    size, time, _ = line.split(" ", 2)
    return f"{size} bytes, changed at {iso_time(int(time))}"
