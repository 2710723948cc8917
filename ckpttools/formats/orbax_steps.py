"""Finding the item in an Orbax path: a run directory, a step directory or the item itself may be given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.formats.orbax_metadata import CHECKPOINT_FILE, TREE_FILE, read_json


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


def why_not(path: Path) -> str | None:
    """None if there is an Orbax pytree at or below `path`, else what is missing."""
    if not path.is_dir():
        return "not a directory"
    if _is_item(path) or _items(path) or _steps(_run(path)):
        return None
    return f"no {TREE_FILE} here, in a sub-directory or in a step directory"


def find_item(path: Path, step: int | None) -> Item:
    """The item that a path and a step mean; without a step the latest finished one.

    Raises:
        FormatError: an unfinished step, no finished one, or several items to choose from.
        UsageError: the step asked for is not there.
    """
    if _is_item(path):
        step_directory = path if _is_bare(path) else path.parent
        return _checked(Item(path, step_directory, _number(step_directory)), step)
    items = _items(path)
    if items:
        return _checked(_only(items, path), step)
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
    reason = _unfinished(item.step_directory)
    if reason:
        raise FormatError("this is an unfinished save", place=item.step_directory, got=reason)
    return item


def _in_run(path: Path, step: int | None) -> Item:
    steps = _steps(path)
    finished = {number: place for number, place in steps.items() if _unfinished(place) is None}
    if step is not None and step not in steps:
        raise UsageError(
            f"there is no step {step}", place=path, wanted="one of " + ", ".join(map(str, sorted(steps)))
        )
    if step is not None and step not in finished:
        raise FormatError(f"step {step} is an unfinished save", place=path, got=_unfinished(steps[step]))
    if not finished:
        reasons = [f"step {number}: {_unfinished(place)}" for number, place in sorted(steps.items())]
        raise FormatError("no step is a finished save" + listing(reasons), place=path)
    chosen = max(finished) if step is None else step
    return _only(_items(finished[chosen]), finished[chosen])


def _only(items: list[Path], step_directory: Path) -> Item:
    if len(items) > 1:
        names = ", ".join(item.name for item in items)
        raise FormatError(
            "there are several items", place=step_directory, got=names, hint="name one of them in the path"
        )
    return Item(items[0], step_directory, _number(step_directory))


def _unfinished(step_directory: Path) -> str | None:
    """Why a step is not a finished save, judged by its content; None if it is one."""
    reasons: list[str] = []
    if not _items(step_directory):
        reasons.append(f"no {TREE_FILE}")
    metadata = step_directory / CHECKPOINT_FILE
    if metadata.is_file():
        try:
            if read_json(metadata).get("commit_timestamp_nsecs") is None:
                reasons.append("commit timestamp null")
        except CheckpointError as error:
            reasons.append(error.message)
    return ", ".join(reasons) or None


def _steps(path: Path) -> dict[int, Path]:
    """Sub-directories whose name ends in a number and that look like a step, finished or not."""
    numbered = ((_number(place), place) for place in _directories(path))
    return {number: place for number, place in numbered if number is not None and _is_step(place)}


def _is_step(path: Path) -> bool:
    return _has_checkpoint_file(path) or bool(_items(path))


def _has_checkpoint_file(path: Path) -> bool:
    return (path / CHECKPOINT_FILE).is_file()


def _is_item(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def _is_bare(path: Path) -> bool:
    """Whether an item is a step of its own: `Checkpointer.save` puts both levels into one directory."""
    return _is_item(path) and _has_checkpoint_file(path) and not _has_checkpoint_file(path.parent)


def _items(path: Path) -> list[Path]:
    """The items of a step. None for a run, even where its steps are bare ones."""
    if _is_bare(path):
        return [path]
    items = [place for place in _directories(path) if _is_item(place)]
    return [place for place in items if _number(place) is None or not _is_bare(place)]


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(place for place in path.iterdir() if place.is_dir())
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The step number in a directory's name: `100`, `00100`, `step_100`."""
    digits = path.name.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None
