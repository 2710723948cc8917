"""Report directories of interrupted or replaced work."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckpttools.core.message_terms import call
from ckpttools.core.text import format_age, plural, sort_naturally
from ckpttools.diagnosis.base import ERROR, INFO, WARNING, Check, Finding, on_disk
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.safe_files import is_directory
from ckpttools.formats.detect import SET_ASIDE
from ckpttools.formats.interrupted import going_on, next_step
from ckpttools.formats.orbax.steps import IN_PROGRESS, PRUNE_DIRECTORY, Step
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import CONTENT, SUFFIX, find_unfinished, read_unfinished

_PRUNE_STATES = {
    "stripped": "stripped, but not yet in place",
    "removed": "moved here, still complete",
    "deleting": "partly deleted",
}


def _look(inventory: Inventory) -> Iterator[Finding]:
    for location in _locations(inventory):
        if location.name == PRUNE_DIRECTORY:
            yield _left_by_prune(location)
            continue
        size, since = _measured(location)
        what = f"{_kind(location)}: {size:,} bytes, last changed {since} ago"
        yield _left(location, what)
    if Step(inventory.path).is_being_deleted:
        what = "a step that is no longer complete: a prune was interrupted while deleting it"
        command = call("prune.run", inventory.path.parent, finish=True)
        why = "no command reads it, and deleted files cannot be restored"
        yield Finding(ERROR, str(inventory.path), what, why, f"delete the rest: {command}", command=command)
    if IN_PROGRESS in inventory.path.name:
        why = "Orbax renames such a directory when the save is finished; this one was not, or not yet"
        yield Finding(
            INFO, str(inventory.path), "the directory of an unfinished save", why, "open a finished step"
        )


def _left_by_prune(location: Location) -> Finding:
    """Report an interrupted prune, with the commands that finish or undo it."""
    names = {
        state: sort_naturally(step.name for step in (location / state).entries())
        for state in _PRUNE_STATES
        if is_directory(location / state)
    }
    steps = [
        f"{plural(len(names[state]), 'step')} {words} ({', '.join(names[state])})"
        for state, words in _PRUNE_STATES.items()
        if names.get(state)
    ]
    run = location.parent
    if not (location / "plan.json").exists() and not names.get("removed") and not names.get("deleting"):
        what = "an interrupted prune that did not delete anything"
        command = (
            f"rm -r {on_disk(location)}"
            if location.store.streams is None
            else location.store.removal(location.key)
        )
        why = "it takes up space; the next prune removes it"
        return Finding(
            WARNING, str(location), what, why, f"when no prune is running: {command}", command=command
        )
    what = f"an interrupted prune: {', '.join(steps) or 'no step is moved or partly deleted'}"
    why = "no other prune of this run can start before this one is finished or undone"
    command = call("prune.run", run, finish=True)
    undo = call("prune.run", run, undo=True)
    do = f"finish it: {command}; or put back every step that is still complete: {undo}"
    return Finding(WARNING, str(location), what, why, do, command=command)


def _locations(inventory: Inventory) -> list[Location]:
    """Return leftovers; for a conversion to a bucket, the location of its journal."""
    beside = find_unfinished(inventory.path)
    result = [*inventory.leftovers, *([beside.location] if beside and beside.location.lexists() else [])]
    return [location for location in result if location.with_name(location.name + SUFFIX) not in result]


def _kind(location: Location) -> str:
    if IN_PROGRESS in location.name:
        return "an unfinished save of Orbax"
    if location.name.endswith(SET_ASIDE):
        return "an unfinished save that was set aside"
    left = read_unfinished(location)
    return f"an interrupted {left.kind if left else 'conversion'}"


def _why(location: Location) -> str:
    if _is_orphaned(location):
        return "without a journal no command resumes it, and a conversion may be refused"
    if read_unfinished(location):
        return "it is not a checkpoint yet; its finished parts will be reused"
    return "no loader reads it, but it takes up space, and a save under the same name may fail because of it"


def _left(location: Location, what: str) -> Finding:
    remove = _removal(location)
    left = read_unfinished(location)
    if left and left.writer:
        do, remove = f"{left.writer}, is writing it: {left.wait}", None
    elif left and left.replaced:
        do, remove = next_step(left), None
    elif remove is None:
        do = "run the same command again: the previous checkpoint may be gone, and this is the only copy"
    elif _is_orphaned(location):
        do = f"inspect it; when nothing writes to it: {remove}"
    elif left:
        do = f"{going_on(left)} to resume; or, to discard it, {remove}"
    else:
        do = f"when nothing writes to it: {remove}"
    return Finding(WARNING, str(location), what, _why(location), do, command=remove)


def _is_orphaned(location: Location) -> bool:
    """Return whether a location has the remains of a conversion to a bucket whose journal is lost."""
    name = location.name.removesuffix(SUFFIX)
    is_alongside = name != location.name and location.store.streams is not None
    return (
        is_alongside
        and read_unfinished(location) is not None
        and find_unfinished(location.with_name(name)) is None
    )


def _removal(location: Location) -> str | None:
    """Return the command that removes the leftovers; None if that would delete the only copy of something."""
    if location.store.streams is None:
        return f"rm -r {on_disk(location)}"
    if not location.name.endswith(SUFFIX):
        return location.store.removal(location.key)
    parts = _parts(location)
    if len(parts) > 1 and is_directory(location / CONTENT):
        return None
    return "; ".join(part.store.removal(part.key) for part in parts)


def _parts(location: Location) -> list[Location]:
    """Return the location of the leftovers and, in a bucket, of the unfinished conversion next to them."""
    destination = location.with_name(location.name.removesuffix(SUFFIX))
    is_alongside = location.store.streams is not None and destination != location
    return [location, destination] if is_alongside and read_unfinished(destination) else [location]


def _measured(top: Location) -> tuple[int, str]:
    """Return the size of the leftovers in bytes, and a description of the time since the last change."""
    size, changed = 0, 0.0
    tops = [part for part in _parts(top) if part.exists()]
    for location in (*tops, *(item / name for item in tops for name, _ in item.below())):
        status = location.status()
        if status is not None:
            changed = max(changed, (status.modified or 0) / 10**9)
            size += status.size
    return size, format_age(time.time() - changed)


CHECK = Check("leftovers", f"unfinished saves ({IN_PROGRESS}*), interrupted conversions", _look)
