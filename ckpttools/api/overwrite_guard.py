"""Decide whether a new checkpoint may replace the contents of its destination.

Only a checkpoint of the kind that is being written may be replaced, and only if every file there belongs to
it. Runs of several steps, other items, files and directories next to the weights, and optimizer state that
the new checkpoint lacks are never replaced.
"""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    StorageError,
    listing,
    suppress_step_warnings,
)
from ckpttools.core.message_terms import option
from ckpttools.core.text import first_names, sort_naturally
from ckpttools.formats.base import Writer, WritesSteps
from ckpttools.formats.detect import Detected, detect
from ckpttools.formats.interrupted import begun_in, next_step
from ckpttools.formats.orbax.steps import OrbaxRun
from ckpttools.formats.registry import find_unowned_files, open_detected, open_tree
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.maxtext.view import view_of
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK
from ckpttools.stores.sharing import is_of_repository

_SHOWN = 5


def check_replaceable(destination: Location, tree: Tree, writer: Writer) -> None:
    """Refuse to replace a destination with data that would be lost.

    Args:
        destination: A directory that is not empty.
        tree: The tree to write.
        writer: The writer of the tree.

    Raises:
        DestinationExistsError: The destination may not be replaced. The message describes its contents.
        StorageError: The system reports an error.
    """
    detected = detect(destination)
    old = _opened(detected)
    if old.metadata.format != writer.name:
        raise _refused(
            destination,
            f"holds a checkpoint of format {old.metadata.format}",
            f"a checkpoint of format {writer.name}",
        )
    _check_steps(detected, writer)
    result = find_unowned_files(destination, old, writer) - {PLAN_MARK, *_made_by(writer)}
    unowned_files = sorted(name for name in result if not is_of_repository(destination, name))
    if unowned_files:
        raise _refused(
            destination,
            f"holds files that are not part of the checkpoint: {first_names(unowned_files, _SHOWN)}",
            "one checkpoint, laid out as this command writes it, and nothing else",
        )
    optimizer = view_of(old).optimizer
    if optimizer and not view_of(tree).optimizer:
        step = "" if old.metadata.step is None else f" of step {old.metadata.step}"
        raise _refused(
            destination,
            f"holds a training checkpoint{step}, with the state of its optimizer ({optimizer.name})",
            "no optimizer state, because the replacement has none",
        )


def _made_by(writer: Writer) -> tuple[str, ...]:
    """Return patterns of the files that the writer creates with weights or next to them."""
    if not isinstance(writer, WithSidecars) or writer.directory:
        return ()
    return (*writer.built, *writer.sidecars.files)


def _check_steps(detected: Detected, writer: Writer) -> None:
    """Refuse to replace a run whose step differs from the requested one."""
    new = writer.step_said if isinstance(writer, WritesSteps) else None
    run = detected.orbax
    if new is None or not isinstance(run, OrbaxRun):
        return
    other = next((step.path.name for number, step in run.steps.items() if number != new), None)
    if other is not None:
        beside = run.path / str(new)
        raise _refused(
            detected.location,
            f"is a run with step {other}, which would be lost: the new step is {new}",
            f"a run whose only step is {new}",
            f"to add the step to the run, write it to {beside} with {option('level', 'step')}",
        )


def optimizer_in(location: Location) -> str | None:
    """Return the name of a checkpoint's optimizer state; None if there is none or it cannot be read."""
    try:
        with suppress_step_warnings():
            optimizer = view_of(open_tree(location)).optimizer
    except StorageError:
        raise
    except CheckpointError:
        return None
    return optimizer.name if optimizer else None


def _opened(detected: Detected) -> Tree:
    destination = detected.location
    try:
        with suppress_step_warnings():
            return open_detected(detected)
    except StorageError:
        raise
    except CheckpointError as error:
        names = sort_naturally(entry.name for entry in destination.entries())
        left = begun_in(destination)
        raise _refused(
            destination,
            "is not a readable checkpoint" + listing(names, _SHOWN),
            "a complete checkpoint of the same kind",
            f"{next_step(left)}; or choose another destination" if left else None,
        ) from error


def _refused(
    destination: Location, got: str, expected: str, hint: str | None = None
) -> DestinationExistsError:
    return DestinationExistsError(
        f"{destination} is not replaced: it {got}",
        expected=expected,
        hint=hint or "choose another destination, or move the existing content away",
    )
