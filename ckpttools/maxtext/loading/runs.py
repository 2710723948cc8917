"""Which step of a run Orbax takes for the latest: by names and commit files, not by what is in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import natural_key, plural
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import IN_PROGRESS, Step, directories, is_committed
from ckpttools.stores.location import Location
from ckpttools.stores.thread_map import at_once

EMERGENCY_ITEMS = ("state", "default")
_STEP = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class OrbaxSteps:
    """A directory of steps as Orbax lists it.

    Attributes:
        directory: above the steps.
        steps: those that it takes for finished, by number.
        passed_over: name of what looks like a step and is not listed -> why.
    """

    directory: Location
    steps: Mapping[int, Location]
    passed_over: Mapping[str, str]

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def text(self) -> str:
        """What there is, in a line."""
        if not self.steps and not self.passed_over:
            return "no step is there" if self.directory.is_dir() else "not there"
        listed = "no finished step"
        if self.steps:
            listed = f"{plural(len(self.steps), 'step')}, the latest {self.latest}"
        skipped = [f"{name} is passed over: {reason}" for name, reason in self.passed_over.items()]
        return "; ".join([listed, *skipped])


def listed_by_manager(directory: Location) -> OrbaxSteps:
    """What Orbax's manager lists in a directory.

    Raises:
        StorageError: it may not be looked into.
    """
    steps: dict[int, Location] = {}
    passed: dict[str, str] = {}
    result = sorted(directories(directory), key=lambda location: natural_key(location.name))
    for location, reason in zip(result, at_once(directory.store, _why_not, result), strict=True):
        if reason is None:
            steps[int(location.name)] = location
        elif Step(location).number is not None:
            passed[location.name] = reason
    return OrbaxSteps(directory, steps, passed)


def _why_not(location: Location) -> str | None:
    """Why a directory is not listed as a step; None for one that is."""
    if IN_PROGRESS in location.name:
        return "an unfinished save"
    if not _STEP.fullmatch(location.name):
        return "a name that Orbax does not take for a step"
    if is_committed(location):
        return None
    return ", ".join(filter(None, (f"no {COMMIT_FILE}", Step(location).why_unfinished)))
