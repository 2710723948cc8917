"""Runs whose latest step no command opens: it is damaged, or little is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttools.core.errors import CheckpointError
from ckpttools.core.step_warnings import unwarned
from ckpttools.doctor.base import WARNING, Check, Finding, finding_of
from ckpttools.doctor.inventory import Inventory
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, TREE_FILE
from ckpttools.formats.orbax.runs import DamagedStepError, find_items, remains_after
from ckpttools.formats.orbax.steps import IN_PROGRESS
from ckpttools.stores.place import Place

_WHY = "Orbax treats it as the latest and fails; an older step would silently be other weights"
_DO = "fetch that step again; until then name the directory of the step that is to be opened"
_LOST = "every command skips it: it has lost too much to be recognised as a step, or was only begun"


def _look(inventory: Inventory) -> Iterator[Finding]:
    listed = {directory.path for directory in inventory.directories}
    steps = [*(step.path for step in inventory.steps), *(item.step for item in inventory.items)]
    for run in sorted({step.parent for step in steps} & listed):
        yield from _later(run)


def _later(run: Place) -> Iterator[Finding]:
    try:
        with unwarned():
            opened = find_items(run, None)[0].step
    except DamagedStepError as error:
        # The fault of the step is an error of another check.
        yield replace(finding_of(error, run, WARNING, _WHY), do=_DO)
        return
    except CheckpointError:
        return  # reported by other checks
    for step in remains_after(opened):
        if not any(IN_PROGRESS in each.name for each in (step.path, *step.path.iterdir())):
            what = f"named as a step after {opened.path.name}, but without {TREE_FILE} and {CHECKPOINT_FILE}"
            yield Finding(WARNING, str(step.path), what, _LOST, "fetch it again, if it was a step")


CHECK = Check("latest", "runs whose latest step no command opens: damaged, or little is left of it", _look)
