"""Directories of work that was interrupted or replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ckpttools.doctor.base import INFO, WARNING, Check, Finding, pasted
from ckpttools.doctor.looking import is_directory
from ckpttools.doctor.scene import SET_ASIDE, Scene
from ckpttools.formats.interrupted import next_step, partial_of
from ckpttools.formats.orbax.steps import IN_PROGRESS
from ckpttools.stores.local.partial import REPLACED, SUFFIX, is_staging

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def _look(scene: Scene) -> Iterator[Finding]:
    beside = partial_of(scene.path)
    for place in [*scene.leftovers, *([beside] if beside else [])]:
        size, age = _measured(place)
        what = f"{_kind(place)}: {size:,} bytes, last changed {age} ago"
        yield _left(place, what)
    if IN_PROGRESS in scene.path.name:
        why = "Orbax renames such a directory when the save is finished; this one was not, or not yet"
        yield Finding(
            INFO, str(scene.path), "the directory of an unfinished save", why, "open a finished step"
        )


def _kind(place: Path) -> str:
    if IN_PROGRESS in place.name:
        return "an unfinished save of Orbax"
    if place.name.endswith(SET_ASIDE):
        return "an unfinished save that was set aside"
    return "an interrupted conversion"


def _why(place: Path) -> str:
    if is_staging(place):
        return "it is no checkpoint yet; its finished parts need not be made again"
    return "no loader takes it, but it keeps its space, and a save under the same name may fail on it"


def _left(place: Path, what: str) -> Finding:
    remove: str | None = f"rm -r {pasted(place)}"
    if is_directory(place / REPLACED):
        do, remove = next_step(place), None
    elif is_staging(place):
        do = f"run the same command again to go on; or, to give it up, {remove}"
    else:
        do = f"when nothing writes to it: {remove}"
    return Finding(WARNING, str(place), what, _why(place), do, command=remove)


def _measured(top: Path) -> tuple[int, str]:
    """Bytes at and below a directory, and the time since anything in it was changed, in words."""
    size, changed = 0, 0.0
    for place, _, names in os.walk(top):
        for path in map(Path(place).joinpath, ("", *names)):
            try:
                status = path.lstat()
            except OSError:
                continue
            changed = max(changed, status.st_mtime)
            size += status.st_size if path != Path(place) else 0
    seconds = max(0, int(time.time() - changed))
    count, unit = next(((seconds // n, unit) for n, unit in _UNITS if seconds >= 2 * n), (seconds, "seconds"))
    return size, f"{count} {unit}"


CHECK = Check("leftovers", f"unfinished saves ({IN_PROGRESS}*), interrupted conversions ({SUFFIX})", _look)
