"""Report runs whose latest step cannot be opened, because it is damaged or mostly missing."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError, suppress_step_warnings
from ckpttools.core.message_terms import action
from ckpttools.diagnosis.base import ERROR, WARNING, Check, Finding, fix_command, quote_path
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, TREE_FILE
from ckpttools.formats.orbax.runs import find_items, remains_after
from ckpttools.formats.orbax.steps import IN_PROGRESS, OrbaxRun, commits_by_file, orbax_at
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.location import Location

_LATEST_REASON = "Orbax treats it as the latest and fails; an older step would silently have other weights"
_REASON = f"{action('copy')} refuses the run; other commands open another step"
_EMPTY_REASON = "Orbax treats it as the latest step and fails; other commands open an earlier one"
_LOST_REASON = "every command skips it: it has lost too much to be recognized as a step, or was only started"


def _examine(inventory: Inventory) -> Iterator[Finding]:
    paths = {directory.path for directory in inventory.directories}
    steps = [*(step.path for step in inventory.steps), *(item.step for item in inventory.items)]
    for run in sorted({step.parent for step in steps} & paths):
        yield from _damaged_steps(run, inventory)
        yield from _later(run, inventory)
    if inventory.path in steps and inventory.path.parent not in paths:
        result = _damaged_steps(inventory.path.parent, inventory)
        yield from (entry for entry in result if entry.location == str(inventory.path))


def _damaged_steps(run: Location, inventory: Inventory) -> Iterator[Finding]:
    """Report damaged steps of a run that has complete steps to resume from."""
    steps = OrbaxRun(run).steps
    # The list of steps reads no index.
    reasons = {
        item.step: f"{item.database.raw.message} ({item.path.name})"
        for item in inventory.items
        if isinstance(item.database, CheckpointError)
    }
    reasons |= {step.path: step.unfinished_reason for step in steps.values() if step.unfinished_reason}
    complete = [number for number, step in steps.items() if step.path not in reasons]
    if not complete:
        return
    # The list of steps does not contain a step that lacks both its metadata and its tree.
    for step in (*steps.values(), *remains_after(steps[max(complete)])):
        reason_text = reasons.get(step.path, step.unfinished_reason)
        is_unfinished = step.unfinished_reason is not None and not step.is_damaged
        if reason_text is None or is_unfinished or step.declared.is_uncommitted:
            continue
        is_latest = (step.number or 0) > max(complete)
        problem = f"{'the latest step' if is_latest else 'a step'} is damaged: {reason_text}"
        do = f"fetch that step again; until then open {quote_path(run / steps[max(complete)].path.name)}"
        fix, command = None, None
        if isinstance(run.store, SupportsRename):
            fix, command = "set-aside", fix_command(inventory, "set-aside")
            do = f"fetch that step again; or rename it, so that the run resumes from another one: {command}"
        reason = _LATEST_REASON if is_latest else _REASON
        # Another check reports the fault of the step as an error.
        yield Finding(WARNING, str(step.path), problem, reason, do, fix, command=command)


def _later(run: Location, inventory: Inventory) -> Iterator[Finding]:
    """Report later directories with the name of a step, which Orbax considers the latest step."""
    try:
        with suppress_step_warnings():
            opened = find_items(orbax_at(run), None)[0].step
    except CheckpointError:
        return  # Reported above, or by other checks.
    for step in remains_after(opened):
        if not any(IN_PROGRESS in item.name for item in (step.path, *step.path.iterdir())):
            problem = (
                f"named as a step after {opened.path.name}, but without {TREE_FILE} and {CHECKPOINT_FILE}"
            )
            do = "fetch it again, if it was a step"
            if commits_by_file(step.path) or not isinstance(run.store, SupportsRename):
                yield Finding(WARNING, str(step.path), problem, _LOST_REASON, do)
                continue
            command = fix_command(inventory, "set-aside")
            do = f"{do}; or rename it, so that the run resumes from {opened.path.name}: {command}"
            yield Finding(ERROR, str(step.path), problem, _EMPTY_REASON, do, "set-aside", command=command)


CHECK = Check(
    "latest",
    "damaged steps that prevent opening or copying a run, and remains of later steps",
    _examine,
)
