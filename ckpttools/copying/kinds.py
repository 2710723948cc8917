"""Describe checkpoints, because a checkpoint may be replaced only by one of the same kind."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.text import plural
from ckpttools.formats.detect import Detected
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step
from ckpttools.formats.registry import find_unowned_files, open_detected


def kind_of(detected: Detected) -> str:
    """Describe a directory in the same words for all checkpoints that may replace each other.

    Raises:
        StorageError: The directory cannot be read.
    """
    match detected.orbax:
        case OrbaxItem():
            return "an item of Orbax"
        case Step():
            return "a step of Orbax"
        case OrbaxRun(steps=steps) if steps:
            return f"a run with {plural(len(steps), 'step')}"
    try:
        return f"a checkpoint of format {open_detected(detected).metadata.format}"
    except StorageError:
        raise
    except CheckpointError:
        return "not a readable checkpoint"


def find_fault(detected: Detected) -> str | None:
    """Find a file that cannot be read as part of a checkpoint, and the reason.

    Returns:
        None if the directory is a readable checkpoint, or not a checkpoint at all.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        open_detected(detected)
    except StorageError:
        raise
    except CheckpointError as error:
        if error.location not in (None, str(detected.location)):
            return f"{error.location}: {error.raw.line}"
    return None


def find_unowned_entries(detected: Detected) -> Iterable[str]:
    """Return the files next to a checkpoint that are not part of it, such as another checkpoint.

    Raises:
        StorageError: The directory cannot be read.
    """
    if not isinstance(detected.orbax, OrbaxRun) or detected.orbax.steps:
        return ()
    try:
        return sorted(find_unowned_files(detected.location, open_detected(detected)))
    except StorageError:
        raise
    except CheckpointError:
        return ()
