"""Runs of which no command opens the latest step, because it is damaged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckpttools.doctor.base import WARNING, Check, Finding, told
from ckpttools.doctor.scene import Scene
from ckpttools.errors import CheckpointError, UnfinishedStepWarning
from ckpttools.formats.orbax_steps import DamagedStepError, find_item

_WHY = "Orbax takes it for the latest and fails; an older step would be other weights, without a word"
_DO = "fetch that step again; until then say with --step N which one is to be opened"


def _look(scene: Scene) -> Iterator[Finding]:
    listed = {directory.path for directory in scene.directories}
    steps = [*(step.path for step in scene.steps), *(item.step for item in scene.items)]
    for run in sorted({step.parent for step in steps} & listed):
        error = _damaged(run)
        if error is not None:
            # What is wrong with the step is an error of another check.
            yield replace(told(error, run, WARNING, _WHY), do=_DO)


def _damaged(run: Path) -> DamagedStepError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnfinishedStepWarning)
            find_item(run, None)
    except DamagedStepError as error:
        return error
    except CheckpointError:
        pass  # said by other checks
    return None


CHECK = Check("latest", "runs whose latest step is damaged, so that no command opens it", _look)
