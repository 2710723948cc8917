"""What kind of checkpoint lies in a directory: one is replaced by another of its kind alone."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.text import plural
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, orbax_at
from ckpttools.formats.registry import open_tree, strangers_in
from ckpttools.stores.place import Place


def kind_of(place: Place) -> str:
    """What a directory holds, in words that are the same for what may replace each other.

    Raises:
        StorageError: it cannot be looked into.
    """
    found = orbax_at(place)
    if isinstance(found, OrbaxItem):
        return "an item of Orbax"
    if not isinstance(found, OrbaxRun):
        return "a step of Orbax"
    if found.steps:
        return f"a run with {plural(len(found.steps), 'step')}"
    try:
        return f"a checkpoint of format {open_tree(place).metadata.format}"
    except StorageError:
        raise
    except CheckpointError:
        return "not a readable checkpoint"


def fault_in(place: Place) -> str | None:
    """Return the file that cannot be read as part of a checkpoint, and the reason.

    Returns:
        None if the directory is a readable checkpoint, or not a checkpoint at all.

    Raises:
        StorageError: it cannot be accessed.
    """
    try:
        open_tree(place)
    except StorageError:
        raise
    except CheckpointError as error:
        return f"{error.place}: {error.line}" if error.place not in (None, str(place)) else None
    return None


def others_in(place: Place) -> Iterable[str]:
    """What lies in a directory with a checkpoint and is no part of it, such as another checkpoint.

    Raises:
        StorageError: it cannot be looked into.
    """
    found = orbax_at(place)
    if not isinstance(found, OrbaxRun) or found.steps:
        return ()
    try:
        return sorted(strangers_in(place, open_tree(place)))
    except StorageError:
        raise
    except CheckpointError:
        return ()
