"""What kind of checkpoint lies in a directory: one is replaced by another of its kind alone."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.text import plural
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, orbax_at
from ckpttools.formats.registry import find_unowned_files, open_tree
from ckpttools.stores.location import Location


def kind_of(location: Location) -> str:
    """What a directory holds, in words that are the same for what may replace each other.

    Raises:
        StorageError: it cannot be looked into.
    """
    result = orbax_at(location)
    if isinstance(result, OrbaxItem):
        return "an item of Orbax"
    if not isinstance(result, OrbaxRun):
        return "a step of Orbax"
    if result.steps:
        return f"a run with {plural(len(result.steps), 'step')}"
    try:
        return f"a checkpoint of format {open_tree(location).metadata.format}"
    except StorageError:
        raise
    except CheckpointError:
        return "not a readable checkpoint"


def find_fault(location: Location) -> str | None:
    """Return the file that cannot be read as part of a checkpoint, and the reason.

    Returns:
        None if the directory is a readable checkpoint, or not a checkpoint at all.

    Raises:
        StorageError: it cannot be accessed.
    """
    try:
        open_tree(location)
    except StorageError:
        raise
    except CheckpointError as error:
        return f"{error.location}: {error.line}" if error.location not in (None, str(location)) else None
    return None


def find_unowned_entries(location: Location) -> Iterable[str]:
    """What lies in a directory with a checkpoint and is no part of it, such as another checkpoint.

    Raises:
        StorageError: it cannot be looked into.
    """
    result = orbax_at(location)
    if not isinstance(result, OrbaxRun) or result.steps:
        return ()
    try:
        return sorted(find_unowned_files(location, open_tree(location)))
    except StorageError:
        raise
    except CheckpointError:
        return ()
