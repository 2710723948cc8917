"""Report steps whose names look finished but whose contents are not."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import action
from ckpttools.core.text import sort_naturally
from ckpttools.diagnosis.base import ERROR, WARNING, Check, Finding, Fix, fix_command, quote_path
from ckpttools.diagnosis.inventory import Directory, Inventory, ListedItem
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import SET_ASIDE_SUFFIX
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, TREE_FILE
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    OrbaxRun,
    StepMetadata,
    commits_by_file,
    is_skipped,
    remedy,
)
from ckpttools.formats.zarr.legacy_runs import LegacyRun
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.location import Location

# A running save changes its files more often than this.
_QUIET_SECONDS = 3600


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        items = [item for item in inventory.items if item.step == step.path]
        metadata = StepMetadata.at(step.path)
        if metadata.is_uncommitted:
            yield _unfinished_finding(step, inventory)
        else:
            yield from _incomplete(step, items, metadata)
    for run in inventory.legacy_runs:
        yield from _legacy(run, inventory)


def _legacy(run: LegacyRun, inventory: Inventory) -> Iterator[Finding]:
    """Report legacy steps (without `_METADATA`) that are unfinished or prevent newer steps from opening.

    Next to steps with `_METADATA`, a numbered directory without a tree is not a step.
    """
    newer = OrbaxRun(run.path).steps
    is_part = inventory.path not in (run.path, *run.path.parents)
    for number, location in run.steps.items():
        if is_part and location not in (inventory.path, inventory.path.parent):
            continue
        is_step = not newer or number in run.legacy
        if is_step and (reason := run.mismatch_reason(number)):
            yield _unfinished_legacy_finding(run, number, reason, inventory)
        elif is_step and newer and number > max(newer):
            problem = f"the latest step has the layout of Orbax before {TREE_FILE}, unlike other steps"
            do = f"open it by its own path: {quote_path(location)}"
            yield Finding(ERROR, str(location), problem, "no command opens the run without a step", do)


def _unfinished_legacy_finding(run: LegacyRun, number: int, reason: str, inventory: Inventory) -> Finding:
    location = run.steps[number]
    problem = f"not known to be a finished save: {reason}"
    mark = f"if it is complete, create an empty file {COMMIT_FILE} in it"
    if run.is_skippable(number):
        return Finding(WARNING, str(location), problem, "Orbax and all commands skip it", mark)
    consequence = f"{action('copy')} refuses the run"
    if number == max(run.steps):
        consequence = "Orbax takes it for the latest step; no command opens or copies the run"
    do = mark if number in run.legacy else "fetch it again"
    if not isinstance(location.store, SupportsRename):
        return Finding(ERROR, str(location), problem, consequence, do)
    command = fix_command(inventory, "set-aside")
    do = f"{do}; or rename it, so that the run resumes from another one: {command}"
    return Finding(ERROR, str(location), problem, consequence, do, "set-aside", command=command)


def _unfinished_finding(step: Directory, inventory: Inventory) -> Finding:
    problem = "an unfinished save: its commit timestamp is null"
    others = _other_committed_steps(step.path, inventory)
    earlier = f"open another step ({', '.join(others)})" if others else "open another step"
    if IN_PROGRESS in step.path.name:
        return Finding(ERROR, str(step.path), problem, "it has no complete arrays", earlier)
    if is_skipped(step.path):
        # In a run, this is one of several saves. A request for this step finds nothing else.
        level = WARNING if others else ERROR
        reason = (
            "no loader takes it, but it takes up space, and a save under the same name may fail because of it"
        )
        command = step.path.store.removal(step.path.key)
        do = f"when nothing writes to it: {command}"
        return Finding(level, str(step.path), problem, reason, do, command=command)
    fix = remedy(step.path, inventory.path, is_uncommitted=True)
    told_by = COMMIT_FILE if commits_by_file(step.path) else "their names"
    reason = f"Orbax recognizes finished steps by {told_by}, so it mistakes this for one and fails to load it"
    do = f"{earlier}; or {fix.words}: {fix.command}"
    return Finding(ERROR, str(step.path), problem, reason, do, fix.fix, command=fix.command)


def _other_committed_steps(step: Location, inventory: Inventory) -> list[str]:
    """Return the names of the other committed steps of the run."""
    sibling_steps = [
        item.path for item in inventory.steps if item.path.parent == step.parent and item.path != step
    ]
    names = [item.name for item in sibling_steps if IN_PROGRESS not in item.name]
    return sort_naturally(name for name in names if not StepMetadata.at(step.with_name(name)).is_uncommitted)


def _incomplete(step: Directory, items: list[ListedItem], metadata: StepMetadata) -> Iterator[Finding]:
    if not (items or metadata.trees or metadata.others or metadata.fault):
        yield _lost_finding(step.path, f"no {TREE_FILE}, which describes the arrays")
    item_names = {item.path.name for item in items}
    for name in metadata.trees:
        if name not in item_names:
            problem = f"the item {name!r} does not exist, although {CHECKPOINT_FILE} names it"
            yield _lost_finding(step.path / name, problem)
    for item in items:
        if TREE_FILE not in item.directory.files:
            yield _lost_finding(item.path, f"an item without {TREE_FILE}, which describes the arrays")


def _lost_finding(location: Location, problem: str) -> Finding:
    reason = "no loader can open it"
    do = "copy the complete step again: cp -a SRC DST, or gcloud storage cp -r SRC DST"
    return Finding(ERROR, str(location), problem, reason, do)


def _set_aside_command(step: Location, read: ReadOptions) -> str:
    age = time.time() - _last_change(step)
    if age < _QUIET_SECONDS:
        raise FormatError(
            "this save may still be running",
            location=step,
            got=f"a change {age:.0f} seconds ago",
            expected=f"no change in the last {_QUIET_SECONDS:,} seconds",
            hint="wait for the job and for this time; or, if the job has certainly ended, rename the step to "
            f"{step.name}{SET_ASIDE_SUFFIX}",
        )
    target = step.with_name(step.name + SET_ASIDE_SUFFIX)
    if target.lexists():
        raise FormatError(f"{target} already exists", location=step, hint="rename that one")
    step.rename(target)
    return f"{step} is now {target}"


def _last_change(top: Location) -> float:
    """Return the time of the last change at or below a directory."""
    result = (location.status() for location in (top, *(top / name for name, _ in top.below())))
    return max(((item.modified or 0) / 10**9 for item in result if item), default=0.0)


CHECK = Check(
    "unfinished",
    "steps with a final name whose save did not finish, or whose copy is incomplete",
    _examine,
    Fix("set-aside", f"rename an unfinished or damaged step to STEP{SET_ASIDE_SUFFIX}", _set_aside_command),
)
