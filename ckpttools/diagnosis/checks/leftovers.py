"""Report directories of interrupted or replaced work."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckpttools.core.message_terms import call
from ckpttools.core.text import format_age, plural, sort_naturally
from ckpttools.diagnosis.base import ERROR, INFO, WARNING, Check, Finding, quote_local_path
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.safe_files import is_directory
from ckpttools.formats.detect import SET_ASIDE_SUFFIX
from ckpttools.formats.interrupted import next_step, resume_hint
from ckpttools.formats.orbax.steps import IN_PROGRESS, PRUNE_DIRECTORY, Step
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import CONTENT, SUFFIX, find_unfinished, read_unfinished

_PRUNE_STATES = {
    "stripped": "stripped, but not yet in place",
    "removed": "moved here, still complete",
    "deleting": "partly deleted",
}


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for location in _locations(inventory):
        if location.name == PRUNE_DIRECTORY:
            yield _left_by_prune(location)
            continue
        size, since = _measure(location)
        problem = f"{_kind(location)}: {size:,} bytes, last changed {since} ago"
        yield _leftover_finding(location, problem)
    if Step(inventory.path).is_being_deleted:
        problem = "a step that is no longer complete: a prune was interrupted while deleting it"
        command = call("prune.run", inventory.path.parent, finish=True)
        reason = "no command reads it, and deleted files cannot be restored"
        yield Finding(
            ERROR, str(inventory.path), problem, reason, f"delete the rest: {command}", command=command
        )
    if IN_PROGRESS in inventory.path.name:
        reason = "Orbax renames such a directory when the save is finished; this one was not, or not yet"
        yield Finding(
            INFO, str(inventory.path), "the directory of an unfinished save", reason, "open a finished step"
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
        problem = "an interrupted prune that did not delete anything"
        command = (
            f"rm -r {quote_local_path(location)}"
            if location.store.streams is None
            else location.store.removal(location.key)
        )
        reason = "it takes up space; the next prune removes it"
        return Finding(
            WARNING, str(location), problem, reason, f"when no prune is running: {command}", command=command
        )
    problem = f"an interrupted prune: {', '.join(steps) or 'no step is moved or partly deleted'}"
    reason = "no other prune of this run can start before this one is finished or undone"
    command = call("prune.run", run, finish=True)
    undo = call("prune.run", run, undo=True)
    do = f"finish it: {command}; or put back every step that is still complete: {undo}"
    return Finding(WARNING, str(location), problem, reason, do, command=command)


def _locations(inventory: Inventory) -> list[Location]:
    """Return leftovers; for a conversion to a bucket, the location of its journal."""
    unfinished = find_unfinished(inventory.path)
    result = [
        *inventory.leftovers,
        *([unfinished.location] if unfinished and unfinished.location.lexists() else []),
    ]
    return [location for location in result if location.with_name(location.name + SUFFIX) not in result]


def _kind(location: Location) -> str:
    if IN_PROGRESS in location.name:
        return "an unfinished save of Orbax"
    if location.name.endswith(SET_ASIDE_SUFFIX):
        return "an unfinished save that was set aside"
    left = read_unfinished(location)
    return f"an interrupted {left.kind if left else 'conversion'}"


def _reason(location: Location) -> str:
    if _is_orphaned(location):
        return "without a journal no command resumes it, and a conversion may be refused"
    if read_unfinished(location):
        return "it is not a checkpoint yet; its finished parts will be reused"
    return "no loader reads it, but it takes up space, and a save under the same name may fail because of it"


def _leftover_finding(location: Location, problem: str) -> Finding:
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
        do = f"{resume_hint(left)} to resume; or, to discard it, {remove}"
    else:
        do = f"when nothing writes to it: {remove}"
    return Finding(WARNING, str(location), problem, _reason(location), do, command=remove)


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
        return f"rm -r {quote_local_path(location)}"
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


def _measure(top: Location) -> tuple[int, str]:
    """Return the size of the leftovers in bytes, and a description of the time since the last change."""
    size, changed = 0, 0.0
    tops = [part for part in _parts(top) if part.exists()]
    for location in (*tops, *(item / name for item in tops for name, _ in item.below())):
        status = location.status()
        if status is not None:
            changed = max(changed, (status.modified or 0) / 10**9)
            size += status.size
    return size, format_age(time.time() - changed)


CHECK = Check("leftovers", f"unfinished saves ({IN_PROGRESS}*), interrupted conversions", _examine)
