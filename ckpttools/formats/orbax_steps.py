"""Finding the item in an Orbax path: a run directory, a step directory or the item itself may be given.

Whether a step is finished is judged by what is in it. Orbax judges by the scheme of the path (a rename, or a
commit file on gs://), so a copy from one kind of store to the other misleads it.

Of a run the latest finished step is opened. A later one whose save has not ended is passed over with a
warning: a job that runs leaves such a step. A later one whose save has ended, and which cannot be read now,
is an error: Orbax (0.12.8), too, takes it for the latest, and fails; nobody would notice older weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from ckpttools.errors import CheckpointError, FormatError, UnfinishedStepWarning, UsageError, listing
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax_entries import MANIFEST, PROCESSES, processes_of
from ckpttools.formats.orbax_metadata import CHECKPOINT_FILE, COMMIT_FILE, SHARDING_FILE, TREE_FILE
from ckpttools.ir.tree import Tree
from ckpttools.stores.local import storage_error

# What Orbax appends to the name of a directory that it is still writing; old versions add a time.
_IN_PROGRESS = ".orbax-checkpoint-tmp"
_TREE_HANDLERS = ("PyTree", "Standard")


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
    """A step was saved to the end, is later than all whole ones, and cannot be read."""


def why_not(path: Path) -> str | None:
    """None if there is an Orbax pytree at or below `path`, or the start of one; else what is missing.

    Raises:
        StorageError: `path` may not be looked into.
    """
    if not path.is_dir():
        return "not a directory"
    _listed(path)
    try:
        if _is_item(path) or _is_step(path) or _steps(_run(path)):
            return None
    except OSError as error:
        return f"cannot look at {error.filename}: {error.strerror}"
    reason = f"no {TREE_FILE} here, in a sub-directory or in a step directory"
    if (path / MANIFEST).is_file() or processes_of(path):
        reason = f"there is an OCDBT database, but no {TREE_FILE}: an unfinished save, or an incomplete copy"
    return reason


def find_item(path: Path, step: int | None) -> Item:
    """The item that a path and a step mean; without a step the latest finished one.

    Warns with `UnfinishedStepWarning` of later steps whose save has not ended.

    Raises:
        DamagedStepError: the latest that was finished is not whole.
        FormatError: an unfinished step, no finished one, or several items to choose from.
        StorageError: a directory may not be looked into.
        UsageError: the step asked for is not there.
    """
    try:
        return _found(path, step)
    except OSError as error:
        raise storage_error("cannot look at", error.filename, error) from error


def unfinished_beside(tree: Tree) -> dict[str, str]:
    """Later or half-written steps of the run that a tree is of: name of the directory -> what is missing.

    Args:
        tree: as its format opened it; there is nothing to say of formats without steps.

    Raises:
        StorageError: the run may not be looked into.
    """
    item = Path(tree.metadata.place)
    step = item if _is_bare(item) else item.parent
    number = _number(step)
    if tree.metadata.format != "orbax" or number is None:
        return {}
    try:
        later = [place for place in _directories(step.parent) if _may_be_later(place, number)]
        reasons = {place.name: _unfinished(place) for place in later if _is_step(place)}
    except OSError as error:
        raise storage_error("cannot look at", error.filename, error) from error
    return {name: reason for name, reason in reasons.items() if reason}


def _may_be_later(place: Path, number: int) -> bool:
    other = _number(place)
    return other is not None and (other > number or _IN_PROGRESS in place.name)


def _found(path: Path, step: int | None) -> Item:
    if _is_item(path):
        step_directory = path if _is_bare(path) else path.parent
        return _checked(Item(path, step_directory, _number(step_directory)), step)
    items = _items(path)
    if items:
        return _checked(_only(items, path), step)
    if _is_step(path):
        raise _unfinished_error(path, _number(path), _unfinished(path))
    return _in_run(_run(path), step)


def _run(path: Path) -> Path:
    """The directory with the steps; MaxText keeps them one level below the run."""
    below = path / "checkpoints"
    return below if below.is_dir() and not _steps(path) else path


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
    reason = ", ".join(_faults(item.step_directory, [item.directory]))
    if reason:
        raise _unfinished_error(item.step_directory, item.step, reason)
    return item


def _unfinished_error(place: Path, step: int | None, reason: str | None) -> FormatError:
    subject = "this" if step is None else f"step {step}"
    return FormatError(
        f"{subject} is an unfinished save: {reason or f'no {TREE_FILE}'}",
        place=place,
        hint="open an earlier step, or the run directory for the latest finished one",
    )


def _in_run(path: Path, step: int | None) -> Item:
    steps = _steps(path)
    if step is not None:
        place = _finished_step(path, steps, step)
        return _only(_items(place), place)
    reasons: dict[int, str] = {}
    for number in sorted(steps, reverse=True):
        reason = _unfinished(steps[number])
        if reason is None:
            _refuse_damaged(path, steps, number, reasons)
            _warn_of_unfinished(path, number, reasons)
            return _only(_items(steps[number]), steps[number])
        reasons[number] = reason
    raise FormatError("no step is a finished save" + _listed_reasons(reasons), place=path)


def _listed_reasons(reasons: Mapping[int, str]) -> str:
    return listing([f"step {number}: {reason}" for number, reason in sorted(reasons.items())])


def _refuse_damaged(path: Path, steps: Mapping[int, Path], whole: int, reasons: Mapping[int, str]) -> None:
    """An error if a step later than the whole one was saved to the end."""
    damaged = {number: reason for number, reason in reasons.items() if _was_finished(steps[number])}
    if damaged:
        raise DamagedStepError(
            "the latest step is damaged, and an older one is not taken in its place"
            + _listed_reasons(damaged),
            place=path,
            hint=f"`ckpt doctor {quote(str(path))}` says more; --step {whole} opens the latest that is whole",
        )


def _warn_of_unfinished(path: Path, whole: int, reasons: Mapping[int, str]) -> None:
    if reasons:
        text = (
            f"step {whole} of {path} is opened; later ones are unfinished saves{_listed_reasons(reasons)}\n"
            f"  next   `ckpt doctor {quote(str(path))}` says more; with --step {whole} this is not said"
        )
        warnings.warn(text, UnfinishedStepWarning, stacklevel=2)


def _was_finished(step_directory: Path) -> bool:
    """Whether the save of a step has ended: what it lacks was then lost later, or not copied."""
    if _IN_PROGRESS in step_directory.name:
        return False
    try:
        return _checkpoint(step_directory).get("commit_timestamp_nsecs", 0) is not None
    except CheckpointError:
        return True


def _only(items: list[Path], step_directory: Path) -> Item:
    if len(items) > 1:
        names = ", ".join(item.name for item in items)
        raise FormatError(
            "there are several items", place=step_directory, got=names, hint="name one of them in the path"
        )
    return Item(items[0], step_directory, _number(step_directory))


def _unfinished(step_directory: Path) -> str | None:
    """Why a step is not a finished save, judged by its content; None if it is one."""
    items = _items(step_directory)
    names = {item.name for item in items}
    lost = [name for name in _named_items(step_directory) if items and name not in names]
    return (
        ", ".join([*_faults(step_directory, items), *(f"no {TREE_FILE} in {name}" for name in lost)]) or None
    )


def _faults(step_directory: Path, items: list[Path]) -> Iterator[str]:
    """What a finished save has and this one has not, as far as it matters to some of its items."""
    if _IN_PROGRESS in step_directory.name:
        yield f"its name is still {step_directory.name}"
    if not items:
        yield f"no {TREE_FILE}"
    for item in items:
        if _lacks_index(item):
            yield f"no {MANIFEST} in {item.name}"
    try:
        if _checkpoint(step_directory).get("commit_timestamp_nsecs", 0) is None:
            yield "commit timestamp null"
    except CheckpointError as error:
        yield error.message


def _checkpoint(step_directory: Path) -> dict[str, Any]:
    """The `_CHECKPOINT_METADATA` of a step; nothing where there is none, as in old versions."""
    return read_json(step_directory / CHECKPOINT_FILE) if _has_checkpoint_file(step_directory) else {}


def _named_items(step_directory: Path) -> list[str]:
    """The pytree items that the metadata of a step names."""
    try:
        handlers = _checkpoint(step_directory).get("item_handlers")
    except CheckpointError:
        return []  # a fault of its own
    named = handlers.items() if isinstance(handlers, dict) else ()
    return [
        name
        for name, handler in named
        if isinstance(handler, str) and any(kind in handler for kind in _TREE_HANDLERS)
    ]


def _lacks_index(item: Path) -> bool:
    """Whether the arrays are said to be in OCDBT and there is none, merged or not."""
    if (item / MANIFEST).is_file() or processes_of(item):
        return False
    try:
        return read_json(item / TREE_FILE).get("use_ocdbt") is True
    except CheckpointError:
        return False  # said with more detail when it is opened


def _finished_step(path: Path, steps: dict[int, Path], step: int) -> Path:
    """The directory of the step asked for."""
    if step not in steps:
        raise UsageError(
            f"there is no step {step}", place=path, wanted="one of " + ", ".join(map(str, sorted(steps)))
        )
    reason = _unfinished(steps[step])
    if reason:
        raise _unfinished_error(path, step, reason)
    return steps[step]


def _steps(path: Path) -> dict[int, Path]:
    """Sub-directories whose name ends in a number and that look like a step, finished or not."""
    steps: dict[int, Path] = {}
    for place in sorted(_directories(path), key=lambda place: _IN_PROGRESS not in place.name):
        number = _number(place)
        if number is not None and (_is_step(place) or _was_step(place)):
            steps[number] = place
    return steps


def _was_step(path: Path) -> bool:
    """Whether something is left of a step that has lost the files by which it is told."""
    if path.match(PROCESSES):
        return False  # the number is that of a process
    return (path / COMMIT_FILE).is_file() or any(map(_was_item, [path, *_directories(path)]))


def _was_item(path: Path) -> bool:
    return any((path / name).is_file() for name in (MANIFEST, SHARDING_FILE)) or bool(processes_of(path))


def _is_step(path: Path) -> bool:
    return _has_checkpoint_file(path) or bool(_items(path))


def _has_checkpoint_file(path: Path) -> bool:
    return (path / CHECKPOINT_FILE).is_file()


def _is_item(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def _is_bare(path: Path) -> bool:
    """Whether an item is a step of its own: `Checkpointer.save` puts both levels into one directory.

    Old versions wrote nothing at the step; then its name tells.
    """
    may_be = _has_checkpoint_file(path) or path.name.isdecimal()
    return may_be and _is_item(path) and not _has_checkpoint_file(path.parent)


def _items(path: Path) -> list[Path]:
    """The items of a step. None for a run, even where its steps are bare ones."""
    if _is_bare(path):
        return [path]
    items = [place for place in _directories(path) if _is_item(place) and _IN_PROGRESS not in place.name]
    return [place for place in items if _number(place) is None or not _is_bare(place)]


def _directories(path: Path) -> list[Path]:
    return sorted(place for place in path.iterdir() if place.is_dir()) if path.is_dir() else []


def _listed(path: Path) -> None:
    """Raises what listing a directory raises, in our words."""
    try:
        next(path.iterdir(), None)
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def _number(path: Path) -> int | None:
    """The step number in a directory's name: `100`, `00100`, `step_100`, `100.orbax-checkpoint-tmp`."""
    digits = path.name.partition(_IN_PROGRESS)[0].rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None
