"""Runs of Orbax before `_METADATA`, whose steps store their tree and small arrays in a file `checkpoint`.

That version considers a step finished if its directory has its final name, which a rename sets, or on gs://
if it has a commit file; see `is_checkpoint_finalized` in orbax/checkpoint/utils.py of February 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, LaterStepWarning, UsageError, listing, warn_step
from ckpttools.core.text import first_and_last
from ckpttools.formats.flax.format import has_state_header
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE
from ckpttools.formats.orbax.steps import Step, directories
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

STATE = "checkpoint"


@dataclass(frozen=True)
class LegacyRun:
    """A directory of steps from Orbax versions before `_METADATA`.

    Attributes:
        path: The directory.
        steps: Directories with the final name of a step, sorted by number, without steps of newer versions.
        temporary: Directories whose names mark an unfinished save.
    """

    path: Location
    steps: Mapping[int, Location]
    temporary: tuple[Step, ...]

    def chosen(self, number: int | None) -> Location:
        """Return a step by number; by default, the latest finished step.

        Emits `LaterStepWarning` for later unfinished steps.

        Raises:
            FormatError: The step is unfinished, or it is unclear whether the latest step is finished.
            StorageError: A directory cannot be read.
            UsageError: The step does not exist.
        """
        if number is not None and number not in self.steps:
            expected = f"one of {first_and_last([*self.steps])}"
            raise UsageError(f"step {number} does not exist", location=self.path, expected=expected)
        skipped: dict[int, str] = {}
        candidates = list(self.steps)[::-1] if number is None else [number]
        for candidate in candidates:
            reason = self.mismatch_reason(candidate)
            if reason is None:
                self._warn_of_later(candidate, skipped)
                return self.steps[candidate]
            skipped[candidate] = reason
            if not self.is_skippable(candidate):
                break
        raise self._unfinished_error(skipped)

    @property
    def finished(self) -> list[Location]:
        """The finished steps of the run.

        Raises:
            StorageError: A directory cannot be read.
        """
        return [location for number, location in self.steps.items() if self.mismatch_reason(number) is None]

    @cached_property
    def legacy(self) -> frozenset[int]:
        """Numbers of the steps in the layout before `_METADATA`, finished or not.

        Raises:
            StorageError: A directory cannot be read.
        """
        answers = map_concurrently(self.path.store, is_legacy_step, self.steps.values())
        return frozenset(number for number, answer in zip(self.steps, answers, strict=True) if answer)

    def mismatch_reason(self, number: int) -> str | None:
        """Return why a step is not known to be finished; None for a finished step."""
        location = self.steps[number]
        if not is_legacy_step(location):
            return f"no file {STATE} and no step metadata"
        if (location / COMMIT_FILE).is_file():
            return None
        if location.store.streams:
            return f"no {COMMIT_FILE}"
        # A copy of a bucket keeps its commit files. There, an unfinished step has its final name.
        return f"no {COMMIT_FILE}, which other steps have" if self._has_commit_file else None

    @cached_property
    def _has_commit_file(self) -> bool:
        # Steps with `_METADATA` in the same run are from a newer version, whose commit files prove nothing.
        steps = self.steps.values()
        return any((location / COMMIT_FILE).is_file() and is_legacy_step(location) for location in steps)

    def is_skippable(self, number: int) -> bool:
        """Return whether an unfinished step may be skipped in favor of an earlier one.

        This applies to a bucket, where an interrupted save leaves a step without a commit file.
        """
        location = self.steps[number]
        return bool(location.store.streams) and is_legacy_step(location) and self._has_commit_file

    def _warn_of_later(self, opened: int, skipped: Mapping[int, str]) -> None:
        reasons = dict(skipped)
        for step in self.temporary:
            if step.number is not None and step.number > opened:
                reasons[step.number] = f"temporary name {step.path.name}"
        if reasons:
            lines = [f"step {number}: {reason}" for number, reason in sorted(reasons.items())]
            text = f"step {opened} of {self.path} is opened; later steps are not finished" + listing(lines)
            warn_step(text, LaterStepWarning)

    def _unfinished_error(self, skipped: Mapping[int, str]) -> FormatError:
        number, reason = max(skipped.items())
        finished = self.finished
        instead = f"; the latest finished step is {quote(str(finished[-1]))}" if finished else ""
        return FormatError(
            f"step {number} is not known to be a finished save: {reason}",
            location=self.path,
            hint=f"open it by its own path if it is complete: {quote(str(self.steps[number]))}{instead}",
        )


def has_state(path: Location) -> bool:
    """Return whether a directory has a file `checkpoint` that Flax wrote."""
    location = path / STATE
    return location.is_file() and has_state_header(location)


def legacy_items(step: Location) -> list[Location]:
    """Return the items of a step of Orbax before `_METADATA`: the step itself, or directories in it."""
    return [step] if has_state(step) else [path for path in directories(step) if has_state(path)]


def is_legacy_step(path: Location) -> bool:
    """Return whether a directory, or an item in it, is a step of Orbax before `_METADATA`."""
    if not path.is_dir():
        return False
    entries = path.entries()
    files = {entry.name for entry in entries if not entry.is_dir}
    if CHECKPOINT_FILE in files:
        return False
    is_item = STATE in files and has_state_header(path / STATE)
    return is_item or any(has_state(path / entry.name) for entry in entries if entry.is_dir)


def legacy_run(path: Location) -> LegacyRun | None:
    """Return the run at a path or in its directory `checkpoints`; None if it has no step of that layout.

    Raises:
        StorageError: A directory cannot be read.
    """
    return legacy_run_in(path) or legacy_run_in(path / "checkpoints")


def legacy_run_in(directory: Location, known: Collection[Location] = ()) -> LegacyRun | None:
    """Return the run whose steps are in a directory; None if it has no step of that layout.

    Args:
        directory: The directory to search.
        known: Steps with `_METADATA` in the directory. They are not probed, and other steps must have the
            same prefix.

    Raises:
        StorageError: A directory cannot be read.
    """
    numbered = [step for step in map(Step, directories(directory)) if step.number is not None]
    if not numbered or has_state(directory):
        return None  # An item may have arrays in numbered directories.
    others = {*known}
    named: dict[str, dict[int, Location]] = {}
    for step in numbered:
        if not (step.is_in_progress or step.path in others):
            named.setdefault(step.prefix, {})[step.number or 0] = step.path
    # As in runs with metadata, plain numbers take precedence, then the most frequent prefix.
    prefixes = sorted(named, key=lambda prefix: (prefix != "", -len(named[prefix])))
    if others:
        own = {Step(path).prefix for path in others}
        prefixes = [prefix for prefix in prefixes if prefix in own]
    for prefix in prefixes:
        temporary = [step for step in numbered if step.is_in_progress and step.prefix == prefix]
        run = LegacyRun(directory, dict(sorted(named[prefix].items())), tuple(temporary))
        # In most runs the latest step has this layout, so the others need not be probed.
        *earlier, latest = run.steps.values()
        if is_legacy_step(latest) or any(map_concurrently(directory.store, is_legacy_step, earlier)):
            return run
    return None
