"""Doing one task after another with the same buffers."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path
from ckpttools.core.region import Region
from ckpttools.plan.plan import Plan
from ckpttools.run.bindings import BindingSink
from ckpttools.run.entries import FinishedTask
from ckpttools.run.events import Watch
from ckpttools.run.run_task import run_task
from ckpttools.stores.publishing import Sink


class DoesTasks(Protocol):
    """A worker: what does tasks, one at a time."""

    def __call__(self, number: int, sink: Sink) -> FinishedTask:
        """Does a task.

        Args:
            number: of the task in its plan.
            sink: takes its bytes.

        Raises:
            CheckpointError: of any kind.
        """


def see_nothing(path: Path, region: Region, values: np.ndarray) -> None:
    """Watches nothing."""


class InThread:
    """Does tasks in the thread that calls it; see `DoesTasks`."""

    def __init__(self, plan: Plan, watch: Watch = see_nothing) -> None:
        """Allocates what a task takes at most.

        Args:
            plan: the one the tasks are of.
            watch: sees what is made, as of `ckpttools.run.executor.execute`.
        """
        self._plan = plan
        self._watch = watch
        self._scratch, self._buffer = Scratch(plan.scratch_bytes), Scratch(plan.buffer_bytes)

    def __call__(self, number: int, sink: Sink) -> FinishedTask:
        """As `DoesTasks`."""
        watch = see_nothing if sink.is_rehearsal else self._watch
        bound = BindingSink(sink)
        task = self._plan.tasks[number]
        chunks, digest = run_task(self._plan, task, bound, self._buffer, self._scratch, watch)
        return FinishedTask(number, chunks, self._scratch.take_counts(), bound.bindings, digest)
