"""Finding the item in an Orbax path: a run directory, a step directory or the item itself may be given.

Of a run the latest finished step is opened. A later one is passed over with a warning: a job that runs leaves
unfinished ones, and steps need not have a tree. But one whose save has ended with a tree that cannot be read
now is an error: Orbax (0.12.8), too, takes it for the latest, and fails; nobody would notice older weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ckpttools.array.tree import Tree
from ckpttools.core.errors import FormatError, LaterStepWarning, UsageError, listing
from ckpttools.formats.orbax.hosts import hosts_at, not_together
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import TREE_FILE
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    NO_TREE,
    directories,
    faults,
    is_bare,
    is_damaged,
    is_item,
    is_step,
    items_of,
    number_of,
    other_items,
    prefix_of,
    why_unfinished,
)
from ckpttools.stores.local import storage_error


@dataclass(frozen=True, slots=True)
class Item:
    """One pytree item on disk.

    Attributes:
        directory: where its `_METADATA` lies.
        step_directory: the directory above it that is a step, or the item's own.
        step: number of the step, or None where the name tells none.
    """

    directory: Path
    step_directory: Path
    step: int | None

    @property
    def name(self) -> str | None:
        """What the step calls it, or None where it is all there is of the step, or of no step."""
        named = self.step is not None and self.directory != self.step_directory
        return self.directory.name if named else None


class DamagedStepError(FormatError):
    """A tree was saved to the end, in a later step than all whole ones, and cannot be read."""


def why_not(path: Path) -> str | None:
    """None if there is an Orbax pytree at or below `path`, or the start of one; else what is missing.

    Raises:
        StorageError: `path` may not be looked into.
    """
    if not path.is_dir():
        return "not a directory"
    _listed(path)
    try:
        if is_item(path) or is_step(path) or _steps(_run(path)) or hosts_at(path):
            return None
    except OSError as error:
        return f"cannot look at {error.filename}: {error.strerror}"
    reason = f"no {TREE_FILE} here, in a sub-directory or in a step directory"
    if (path / MANIFEST).is_file() or processes_of(path):
        reason = f"there is an OCDBT database, but no {TREE_FILE}: an unfinished save, or an incomplete copy"
    return reason


def find_item(path: Path, step: int | None) -> Item:
    """The item that a path and a step mean; without a step the latest finished one.

    Warns with `LaterStepWarning` of later steps that are passed over.

    Raises:
        DamagedStepError: the latest that was finished is not whole.
        FormatError: a step without a finished tree, no finished one, or several items to choose from.
        StorageError: a directory may not be looked into.
        UsageError: the step asked for is not there.
    """
    try:
        return _found(path, step)
    except OSError as error:
        raise storage_error("cannot look at", error.filename, error) from error


class Beside(NamedTuple):
    """Other steps of a run that cannot be read: name of the directory -> what is missing.

    Attributes:
        unfinished: those whose save has not ended.
        damaged: those whose save has.
    """

    unfinished: dict[str, str]
    damaged: dict[str, str]


def not_whole_beside(tree: Tree) -> Beside:
    """Later or half-written steps of the run that a tree is of.

    Args:
        tree: as its format opened it; there is nothing to say of formats without steps.

    Raises:
        StorageError: the run may not be looked into.
    """
    item = Path(tree.metadata.place)
    step = item if is_bare(item) else item.parent
    if tree.metadata.format != "orbax" or number_of(step) is None:
        return Beside({}, {})
    found = Beside({}, {})
    try:
        for place in directories(step.parent):
            if _may_be_later(place, step) and not other_items(place):
                reason = why_unfinished(place)
                if reason:
                    (found.damaged if is_damaged(place) else found.unfinished)[place.name] = reason
    except OSError as error:
        raise storage_error("cannot look at", error.filename, error) from error
    return found


def remains_after(step_directory: Path) -> list[Path]:
    """Later directories with names as this step's that are no steps: they are begun, or have lost much.

    Others may end in a number, too: runs, exports, whatever lies beside the steps.
    """
    number = number_of(step_directory)
    return [
        place
        for place in directories(step_directory.parent)
        if prefix_of(place) == prefix_of(step_directory)
        and (number_of(place) or 0) > (number or 0)
        and not is_step(place)
        and not any(map(is_step, directories(place)))
    ]


def _may_be_later(place: Path, step_directory: Path) -> bool:
    if prefix_of(place) != prefix_of(step_directory) or number_of(place) is None:
        return False
    if (number_of(place) or 0) > (number_of(step_directory) or 0):
        return is_step(place) or place in remains_after(step_directory)
    return IN_PROGRESS in place.name and is_step(place)


def _found(path: Path, step: int | None) -> Item:
    if is_item(path):
        step_directory = path if is_bare(path) else path.parent
        return _checked(Item(path, step_directory, number_of(step_directory)), step)
    items = items_of(path)
    if items:
        return _checked(_only(items, path), step)
    if is_step(path):
        raise _unfinished_error(path, number_of(path), why_unfinished(path))
    return _in_run(_run(path), step)


def _run(path: Path) -> Path:
    """The directory with the steps; MaxText keeps them one level below the run."""
    below, beside = path / "checkpoints", _steps(path)
    if not below.is_dir() or any(not prefix_of(place) for place in beside.values()):
        return path
    # A backup beside `checkpoints` is no step of the run.
    return below if _steps(below) or not beside else path


def _checked(item: Item, step: int | None) -> Item:
    """The item that a path names, if it is of the step asked for and finished."""
    if step is not None and item.step not in (None, step):
        raise UsageError(
            f"there is no step {step}",
            place=item.directory,
            got=f"step {item.step}",
            hint="give the run directory",
        )
    # Other items of the step do not matter to whoever names this one.
    reason = ", ".join(faults(item.step_directory, [item.directory]))
    if reason:
        raise _unfinished_error(item.step_directory, item.step, reason)
    return item


def _unfinished_error(place: Path, step: int | None, reason: str | None) -> FormatError:
    subject = "this" if step is None else f"step {step}"
    is_finished = reason is not None and reason.startswith(NO_TREE)
    return FormatError(
        f"{subject} has {reason}"
        if is_finished
        else f"{subject} is an unfinished save: {reason or f'no {TREE_FILE}'}",
        place=place,
        hint="open an earlier step, or the run directory for the latest finished one",
    )


def _in_run(path: Path, step: int | None) -> Item:
    steps = _steps(path)
    hosts = {} if steps else hosts_at(path)
    if hosts:
        raise not_together(path, hosts)
    if step is not None:
        place = _finished_step(path, steps, step)
        return _only(items_of(place), place)
    reasons: dict[int, str] = {}
    for number in sorted(steps, reverse=True):
        reason = why_unfinished(steps[number])
        if reason is None:
            later = [place for at, place in steps.items() if at > number]
            _tell_of_later(steps[number], [*later, *remains_after(steps[number])])
            return _only(items_of(steps[number]), steps[number])
        reasons[number] = reason
    lines = [f"step {number}: {reason}" for number, reason in sorted(reasons.items())]
    raise FormatError("no step is a finished save" + listing(lines), place=path)


def _tell_of_later(opened: Path, later: Collection[Path]) -> None:
    """Warns of later steps that are not opened.

    Raises:
        DamagedStepError: one of them is damaged.
    """
    ordered = sorted(later, key=lambda place: (number_of(place) or 0, place.name))
    run = quote(str(opened.parent))
    reasons = {place: f"step {number_of(place)}: {why_unfinished(place)}" for place in ordered}
    damaged = [reason for place, reason in reasons.items() if is_damaged(place)]
    if damaged:
        raise DamagedStepError(
            "the latest step is damaged, and an older one is not taken in its place" + listing(damaged),
            place=opened.parent,
            hint=f"`ckpt doctor {run}` says more; the latest that is whole is {quote(str(opened))}",
        )
    if reasons:
        text = (
            f"step {number_of(opened)} of {opened.parent} is opened; later ones have no finished tree"
            + listing(list(reasons.values()))
        )
        if not all(map(other_items, ordered)):
            text += f"\n  next   `ckpt doctor {run}` says more"
        warnings.warn(text, LaterStepWarning, stacklevel=2)


def _only(items: list[Path], step_directory: Path) -> Item:
    if len(items) > 1:
        names = ", ".join(item.name for item in items)
        raise FormatError(
            "there are several items", place=step_directory, got=names, hint="name one of them in the path"
        )
    return Item(items[0], step_directory, number_of(step_directory))


def _finished_step(path: Path, steps: dict[int, Path], step: int) -> Path:
    """The directory of the step asked for."""
    if step not in steps:
        raise UsageError(
            f"there is no step {step}", place=path, wanted="one of " + ", ".join(map(str, sorted(steps)))
        )
    reason = why_unfinished(steps[step])
    if reason:
        raise _unfinished_error(path, step, reason)
    return steps[step]


def _steps(path: Path) -> dict[int, Path]:
    """Sub-directories that look like a step, finished or not, and are named alike but for their number.

    Plain numbers go first, as Orbax looks for one prefix only, and for none unless it is told; else the
    prefix that most have.
    """
    named: dict[str, dict[int, Path]] = {}
    for place in sorted(directories(path), key=lambda place: IN_PROGRESS not in place.name):
        number = number_of(place)
        if number is not None and is_step(place):
            named.setdefault(prefix_of(place), {})[number] = place
    return named.get("") or max(named.values(), key=len, default={})


def _listed(path: Path) -> None:
    """Raises what listing a directory raises, in our words."""
    try:
        next(path.iterdir(), None)
    except OSError as error:
        raise storage_error("cannot list", path, error) from error
