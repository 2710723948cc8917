"""Directories of work that was interrupted or replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckpttools.doctor.base import INFO, WARNING, Check, Finding, on_disk
from ckpttools.doctor.inventory import SET_ASIDE, Inventory
from ckpttools.formats.interrupted import next_step
from ckpttools.formats.orbax.steps import IN_PROGRESS
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import begun_at, unfinished_at

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def _look(inventory: Inventory) -> Iterator[Finding]:
    beside = begun_at(inventory.path)
    for place in [*inventory.leftovers, *([beside.place] if beside else [])]:
        size, age = _measured(place)
        what = f"{_kind(place)}: {size:,} bytes, last changed {age} ago"
        yield _left(place, what)
    if IN_PROGRESS in inventory.path.name:
        why = "Orbax renames such a directory when the save is finished; this one was not, or not yet"
        yield Finding(
            INFO, str(inventory.path), "the directory of an unfinished save", why, "open a finished step"
        )


def _kind(place: Place) -> str:
    if IN_PROGRESS in place.name:
        return "an unfinished save of Orbax"
    if place.name.endswith(SET_ASIDE):
        return "an unfinished save that was set aside"
    return "an interrupted conversion"


def _why(place: Place) -> str:
    if unfinished_at(place):
        return "it is not a checkpoint yet; its finished parts will be reused"
    return "no loader reads it, but it takes up space, and a save under the same name may fail because of it"


def _left(place: Place, what: str) -> Finding:
    remove: str | None = f"rm -r {on_disk(place)}"
    left = unfinished_at(place)
    if left and left.replaced:
        do, remove = next_step(left), None
    elif left:
        do = f"run the same command again to resume; or, to discard it, {remove}"
    else:
        do = f"when nothing writes to it: {remove}"
    return Finding(WARNING, str(place), what, _why(place), do, command=remove)


def _measured(top: Place) -> tuple[int, str]:
    """Bytes at and below a directory, and the time since anything in it was changed, in words."""
    size, changed = 0, 0.0
    for place in (top, *(top / name for name, _ in top.below())):
        status = place.status()
        if status is not None:
            changed = max(changed, (status.modified or 0) / 10**9)
            size += status.size
    seconds = max(0, int(time.time() - changed))
    count, unit = next(((seconds // n, unit) for n, unit in _UNITS if seconds >= 2 * n), (seconds, "seconds"))
    return size, f"{count} {unit}"


CHECK = Check("leftovers", f"unfinished saves ({IN_PROGRESS}*), interrupted conversions", _look)
