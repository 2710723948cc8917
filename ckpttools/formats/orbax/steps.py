"""What a directory of Orbax is: an item, a step, a finished one.

Whether a step is finished is judged by what is in it. Orbax judges by the scheme of the path (a rename, or a
commit file on gs://), so a copy from one kind of store to the other misleads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, SHARDING_FILE, TREE_FILE
from ckpttools.formats.orbax.ocdbt import MANIFEST

IN_PROGRESS = ".orbax-checkpoint-tmp"
"""What Orbax appends to the name of a directory that it is still writing; old versions add a time."""
NO_TREE = "no tree"
_TREE_HANDLERS = ("PyTree", "Standard")


def number_of(path: Path) -> int | None:
    """The step number in a directory's name: `100`, `00100`, `step_100`, `100.orbax-checkpoint-tmp`."""
    digits = path.name.partition(IN_PROGRESS)[0].rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def prefix_of(path: Path) -> str:
    """What stands before the number in the name of a step."""
    return "".join(path.name.partition(IN_PROGRESS)[0].rpartition("_")[:2])


def is_step(path: Path) -> bool:
    return _has_checkpoint_file(path) or bool(items_of(path))


def is_item(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def is_bare(path: Path) -> bool:
    """Whether an item is a step of its own: `Checkpointer.save` puts both levels into one directory.

    Old versions wrote nothing at the step; then its name tells.
    """
    may_be = _has_checkpoint_file(path) or path.name.isdecimal()
    return may_be and is_item(path) and not _has_checkpoint_file(path.parent)


def items_of(path: Path) -> list[Path]:
    """The items of a step. None for a run, even where its steps are bare ones."""
    if is_bare(path):
        return [path]
    items = [place for place in directories(path) if is_item(place) and IN_PROGRESS not in place.name]
    return [place for place in items if number_of(place) is None or not is_bare(place)]


def directories(path: Path) -> list[Path]:
    return sorted(place for place in path.iterdir() if place.is_dir()) if path.is_dir() else []


def why_unfinished(step_directory: Path) -> str | None:
    """Why a step is not a finished save, judged by its content; None if it is one.

    Raises:
        StorageError: the system does not let that be looked at, so nothing is known.
    """
    items = items_of(step_directory)
    names = {item.name for item in items}
    lost = [name for name in _named_items(step_directory) if items and name not in names]
    return (
        ", ".join([*faults(step_directory, items), *(f"no {TREE_FILE} in {name}" for name in lost)]) or None
    )


def faults(step_directory: Path, items: list[Path]) -> Iterator[str]:
    """What a finished save has and this one has not, as far as it matters to some of its items."""
    if IN_PROGRESS in step_directory.name:
        yield f"its name is still {step_directory.name}"
    if not items:
        others = other_items(step_directory)
        yield f"{NO_TREE}, but {', '.join(others)}" if others else f"no {TREE_FILE}"
    for item in items:
        if _lacks_index(item):
            yield f"no {MANIFEST} in {item.name}"
    try:
        if _checkpoint(step_directory).get("commit_timestamp_nsecs", 0) is None:
            yield "commit timestamp null"
    except FormatError as error:
        yield f"{CHECKPOINT_FILE}: {error.message}"


def _lacks_index(item: Path) -> bool:
    """Whether the arrays are said to be in OCDBT and there is none, merged or not."""
    if (item / MANIFEST).is_file() or processes_of(item):
        return False
    try:
        return read_json(item / TREE_FILE).get("use_ocdbt") is True
    except CheckpointError:
        return False  # said with more detail when it is opened


def other_items(step_directory: Path) -> list[str]:
    """The items of a step, where all are something else than trees, such as metrics."""
    try:
        document = _checkpoint(step_directory)
    except FormatError:
        return []  # a fault of its own
    handlers = document.get("item_handlers")
    if not isinstance(handlers, dict) or _name_tree(handlers) or items_of(step_directory):
        return []
    return sorted(handlers)


def is_damaged(step_directory: Path) -> bool:
    """Whether a tree was saved to the end here: what it lacks was lost later, or not copied."""
    if any(IN_PROGRESS in place.name for place in (step_directory, *directories(step_directory))):
        return False
    try:
        document = _checkpoint(step_directory)
    except FormatError:
        # It is written anew when the save ends, and empty for a moment.
        return (step_directory / CHECKPOINT_FILE).stat().st_size > 0
    ended = document.get("commit_timestamp_nsecs", (step_directory / COMMIT_FILE).is_file() or None)
    handlers = document.get("item_handlers")
    return ended is not None and (_name_tree(handlers) if handlers else _holds_arrays(step_directory))


def _holds_arrays(step_directory: Path) -> bool:
    """Whether there is an item, or what is left of one."""
    places = [step_directory, *directories(step_directory)]
    files = (TREE_FILE, MANIFEST, SHARDING_FILE)
    return any((place / name).is_file() for place in places for name in files) or any(
        map(processes_of, places)
    )


def _named_items(step_directory: Path) -> list[str]:
    """The pytree items that the metadata of a step names."""
    try:
        handlers = _checkpoint(step_directory).get("item_handlers")
    except FormatError:
        return []  # a fault of its own
    named = handlers.items() if isinstance(handlers, dict) else ()
    return [name for name, handler in named if _is_of_trees(handler)]


def _name_tree(handlers: object) -> bool:
    """Whether a step's metadata say that an item is a tree: by name, or all there is."""
    return any(map(_is_of_trees, handlers.values() if isinstance(handlers, dict) else [handlers]))


def _is_of_trees(handler: object) -> bool:
    return isinstance(handler, str) and any(kind in handler for kind in _TREE_HANDLERS)


def _checkpoint(step_directory: Path) -> dict[str, Any]:
    """The `_CHECKPOINT_METADATA` of a step; nothing where there is none, as in old versions."""
    return read_json(step_directory / CHECKPOINT_FILE) if _has_checkpoint_file(step_directory) else {}


def _has_checkpoint_file(path: Path) -> bool:
    return (path / CHECKPOINT_FILE).is_file()
