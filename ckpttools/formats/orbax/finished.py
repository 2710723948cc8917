"""Determine whether a step is a finished save, even with a conversion in progress or only commit files."""

from __future__ import annotations

from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import Step
from ckpttools.stores.publishing import find_unfinished, read_unfinished


def unfinished_reason(step: Step, *, is_asked: bool = True) -> str | None:
    """Return why a step is not a finished save; None if it is, even without a tree (such as only metrics).

    Args:
        step: The step to check.
        is_asked: Whether to check for a conversion in progress in the step.

    Raises:
        StorageError: The step cannot be accessed.
    """
    if is_asked and (find_unfinished(step.path) or read_unfinished(step.path)):
        return "a conversion is being written to it"
    if step.is_being_deleted:
        return step.why_unfinished
    # Orbax versions that do not record a commit time wrote this file last.
    declared = step.declared.fields.get("commit_timestamp_nsecs")
    if step.path.store.streams and declared is None and not (step.path / COMMIT_FILE).is_file():
        return f"no {COMMIT_FILE} and no commit time: it is unknown whether the save was completed"
    if step.others:
        faults = [fault for fault in step.faults(()) if not fault.startswith("no tree")]
        return ", ".join(faults) or None
    return step.why_unfinished
