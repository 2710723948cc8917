"""Where file systems are mounted: what is deleted below a mount lies elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

# One line for each mount that this process can see; its place is the fifth word (proc(5)).
_TABLE = "/proc/self/mountinfo"
_PLACE = 4
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def first_mount(path: Path) -> Path | None:
    """The first place at or below a path where something is mounted, also from the same file system.

    Args:
        path: a file or directory, or nothing; a link that has the last name is not followed.
    """
    place = Path(os.path.realpath(path.absolute().parent), path.name)
    return min((each for each in _mounts(place) if each == place or place in each.parents), default=None)


def _mounts(place: Path) -> Iterator[Path]:
    """All mounts; without a table of them those at and below a place that have another device."""
    try:
        with open(_TABLE, "rb") as table:  # noqa: PTH123
            lines = table.read().splitlines()
    except OSError:
        below = (Path(top, name) for top, inner, files in os.walk(place) for name in (*inner, *files))
        yield from (each for each in (place, *below) if os.path.ismount(each))
        return
    for line in lines:
        escaped = line.split(b" ")[_PLACE]
        yield Path(os.fsdecode(_ESCAPED.sub(lambda match: bytes((int(match[1], 8),)), escaped)))
