"""Report steps and items without the file that marks them as finished for Orbax on object stores."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.message_terms import call
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding, Fix, fix_command
from ckpttools.diagnosis.inventory import Directory, Inventory
from ckpttools.diagnosis.safe_files import write_new
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, COMMIT_TEXT, V1_FILE
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    OrbaxRun,
    Step,
    StepMetadata,
    commits_by_file,
    is_committed,
)
from ckpttools.stores.location import Location

_REASON = (
    "on gs:// Orbax considers it unfinished: it is not listed, not loaded, and may be deleted by a clean-up"
)


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        metadata = StepMetadata.at(step.path)
        if not (metadata.fault or metadata.is_uncommitted or IN_PROGRESS in step.path.name):
            items = (
                []
                if _is_v1(step, metadata)
                else [i.directory for i in inventory.items if i.step == step.path]
            )
            for fromkey in dict.fromkeys([step, *items]):
                if COMMIT_FILE not in fromkey.files:
                    yield _missing_marker_finding(inventory, fromkey.path)
    steps = {step.path for step in inventory.steps}
    for item in inventory.items:
        if steps.isdisjoint((item.step, *item.step.parents)):
            reason = "CheckpointManager and readers of custom metadata such as scan_layers need it"
            command = call("convert", item.path, "DST", format="orbax")
            do = f"restore it with a target, or write it again: {command}"
            problem = f"no {CHECKPOINT_FILE} here or above"
            yield Finding(INFO, str(item.path), problem, reason, do, command=command)


def _missing_marker_finding(inventory: Inventory, location: Location) -> Finding:
    command = fix_command(inventory, "commit-marker")
    later = _step_orbax_resumes(location)
    reason = f"{_REASON}; a run resumes from step {later.name} instead" if later else _REASON
    do = f"{command} writes it; Orbax before 0.12.3 did not on local disks"
    return Finding(WARNING, str(location), f"no {COMMIT_FILE}", reason, do, "commit-marker", command=command)


def _step_orbax_resumes(step: Location) -> Location | None:
    """Return the latest step that Orbax lists instead of an uncommitted later step on gs://."""
    number = Step(step).number
    if number is None or not commits_by_file(step):
        return None
    result = OrbaxRun(step.parent).steps
    committed = [number for number, item in result.items() if is_committed(item.path)]
    return result[max(committed)].path if committed and max(committed) < number else None


def _is_v1(step: Directory, metadata: StepMetadata) -> bool:
    """Return whether Orbax v1 wrote the step; v1 marks only steps, not items."""
    return V1_FILE in step.files or ".v1." in str(metadata.handlers)


def _mark(location: Location, read: ReadOptions) -> str:
    path = location / COMMIT_FILE
    write_new(path, COMMIT_TEXT)
    return f"{path} was written"


CHECK = Check(
    "commit",
    f"finished steps and items without {COMMIT_FILE}",
    _examine,
    Fix("commit-marker", f"write {COMMIT_FILE} if there are no errors", _mark, needs_health=True),
)
