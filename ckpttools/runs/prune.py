"""Decide what happens to each step of a run: it is kept, stripped of its optimizer, deleted, or left alone.

Anything unknown is left alone: a step is deleted only if it is a finished save in which every file is
known, and no rule, link or running operation prevents it.

Hard links need no care: a file exists as long as it has a name.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError, suppress_step_warnings
from ckpttools.core.text import sample_names
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, TREE_FILE, V1_FILE
from ckpttools.formats.orbax.owned_files import find_unowned_in_item
from ckpttools.formats.orbax.steps import IN_PROGRESS, OrbaxItem, OrbaxRun, Step
from ckpttools.formats.registry import open_tree
from ckpttools.runs.journal import fingerprint
from ckpttools.runs.listing import RECORD, RunListing, StepListing, list_run, measure_usage
from ckpttools.runs.policy import Keep
from ckpttools.stores.base import DirEntry
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

Outcome = Literal["kept", "stripped", "deleted", "left alone"]
_STEP_FILES = frozenset((CHECKPOINT_FILE, COMMIT_FILE, RECORD, V1_FILE))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome for one step.

    Attributes:
        step: Step number.
        name: Name of the directory.
        outcome: "kept", "stripped", "deleted" or "left alone".
        reason: Reason for the outcome.
        nbytes: Size of the files, in bytes.
        freed_bytes: Bytes that deleting only this step would free.
    """

    step: int
    name: str
    outcome: Outcome
    reason: str
    nbytes: int
    freed_bytes: int = 0


@dataclass(frozen=True)
class PruneDecision:
    """The outcome for all steps of a run.

    Attributes:
        run: The run with all of its steps.
        listing: The run's contents.
        outcomes: Outcome for each step, in order.
        fingerprints: Fingerprint of each step by name, which distinguishes it from a later step with the same
            name.
        freed_bytes: Bytes that deleting all of these steps frees, including files that only these steps
            share.
    """

    run: OrbaxRun
    listing: RunListing
    outcomes: tuple[StepOutcome, ...]
    fingerprints: Mapping[str, str]
    freed_bytes: int

    def names_with(self, outcome: Outcome) -> list[str]:
        """Return the names of the steps with an outcome."""
        return [item.name for item in self.outcomes if item.outcome == outcome]


def decide(run: OrbaxRun, keep: Keep, strip_older: bool) -> PruneDecision:
    """Decide what happens to the steps of a run. Reads indexes and metadata.

    Args:
        run: The run with its steps.
        keep: Rules for finished steps to keep.
        strip_older: Whether kept steps that are not among the latest by `keep.last` lose their optimizer.

    Raises:
        FormatError: No step is finished, so nothing may be deleted.
        UsageError: No step has the metric of the rule.
        StorageError: The store cannot be read.
    """
    # Compute fingerprints first: a step that is saved again after this point counts as another step.
    names = [step.path.name for step in run.steps.values()]
    prints = map_concurrently(run.path.store, lambda name: fingerprint(run.path / name), names)
    listing = list_run(run)
    complete = {item.step: item for item in listing.steps if _incomplete_reason(item) is None}
    if not complete:
        raise _no_complete_step_error(listing, run.path)
    reasons = keep.reasons({number: item.metrics for number, item in complete.items()})
    latest = sorted(complete)[-keep.last :] if keep.last else [max(complete)]
    last = {max(complete): "the last finished step"}
    if listing.latest is not None:
        last.setdefault(listing.latest, "the step that Orbax considers the latest")
    links = find_links_into(run.path)

    def decide_step(item: StepListing) -> StepOutcome:
        reason = _incomplete_reason(item)
        if item.step not in run.steps:
            reason = reason or f"{_foreign_layout(run.path / item.name)}, which prune does not delete"
        elif reason is None and item.step > max(complete):
            reason = "it is later than the last finished step"
        if reason is not None:
            return _make_outcome(item, "left alone", reason)
        kept = (
            *((last[item.step],) if item.step in last else ()),
            *reasons[item.step],
        )
        if kept and not (strip_older and item.step not in latest and item.step not in last):
            return _make_outcome(item, "kept", ", ".join(kept))
        step = run.steps[item.step]
        if obstacle := next(_find_obstacles(step, links), None):
            return _make_outcome(item, "kept" if kept else "left alone", obstacle)
        if not kept:
            return _make_outcome(item, "deleted", "no rule keeps it", item.own_bytes)
        if unfit := _strip_refusal(item):
            return _make_outcome(item, "kept", f"{', '.join(kept)}; {unfit}")
        return _make_outcome(item, "stripped", ", ".join(kept))

    outcomes = tuple(map_concurrently(run.path.store, decide_step, listing.steps))
    deleted = [run.path / item.name for item in outcomes if item.outcome == "deleted"]
    return PruneDecision(
        run, listing, outcomes, dict(zip(names, prints, strict=True)), measure_usage(*deleted).own
    )


def _no_complete_step_error(listing: RunListing, run: Location) -> FormatError:
    """Return the error for a run without a complete step."""
    return FormatError(
        "no step of this run is finished and complete, so none is deleted",
        location=run,
        got=sample_names([f"{item.name}: {_incomplete_reason(item)}" for item in listing.steps]) or "no step",
    )


def _foreign_layout(step: Location) -> str:
    """Describe the layout of a step without `_METADATA`."""
    return f"it has the layout of Orbax before {TREE_FILE}" if step.is_dir() else "it is a file of Flax"


def _make_outcome(step: StepListing, outcome: Outcome, reason: str, freed_bytes: int = 0) -> StepOutcome:
    return StepOutcome(step.step, step.name, outcome, reason, step.nbytes, freed_bytes)


def _incomplete_reason(step: StepListing) -> str | None:
    """Return why a step is not a finished save with a complete tree; None if it is."""
    if step.unfinished_reason is not None:
        return step.unfinished_reason
    if step.item_being_deleted is not None:
        return f"Orbax is deleting its item {step.item_being_deleted}, or was interrupted: retry with Orbax"
    trees = [item for item in step.items if item.arrays or item.kind == "unreadable"]
    if not trees:
        return "it has no tree"
    broken = [item.name for item in trees if item.kind == "unreadable" or item.missing_chunks]
    return f"{', '.join(broken) or 'its tree'} cannot be read, or lacks chunks" if broken else None


def _strip_refusal(step: StepListing) -> str | None:
    trees = [item for item in step.items if item.arrays]
    if len(trees) != 1 or not trees[0].name:
        return "it is not stripped: only a step with one named tree is"
    return None if trees[0].kind.endswith("training") else "it has no optimizer to strip"


def _find_obstacles(step: Step, links: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield reasons that prevent a change of the step."""
    if step.path.is_link():
        yield f"it is a link to {step.path.readlink()}"
    if step.path.name in links:
        yield f"links lead into it: {sample_names(links[step.path.name])}"
    try:
        unowned_files = list(_find_unowned(step))
    except StorageError:
        raise
    except CheckpointError as error:
        yield error.raw.message
        return
    if unowned_files:
        yield f"it contains files that are not part of a checkpoint: {sample_names(unowned_files)}"


def _find_unowned(step: Step) -> Iterator[str]:
    """Yield the files in a step that do not belong to any format."""
    handlers = step.declared.handlers
    known = set(handlers) if isinstance(handlers, dict) else set()
    items = {item.directory: item for item in step.items}
    if step.path in items:
        yield from _find_unowned_in_item(items[step.path])
        return
    for entry in step.path.entries():
        location = step.path / entry.name
        if location in items:
            yield from (f"{entry.name}/{name}" for name in _find_unowned_in_item(items[location]))
        elif entry.is_link or IN_PROGRESS in entry.name or entry.name not in _known_names(entry, known):
            yield entry.name


def _known_names(entry: DirEntry, items: set[str]) -> Collection[str]:
    """Return the names that a directory, or a file, of a step may have."""
    return items if entry.is_dir else _STEP_FILES


def _find_unowned_in_item(item: OrbaxItem) -> list[str]:
    with suppress_step_warnings():
        tree = open_tree(item.directory)
    metadata_files = {V1_FILE, RECORD} if item.directory == item.step.path else set()
    return [name for name in find_unowned_in_item(item.directory, tree) if name not in metadata_files]


def commit_texts(run: Location, names: list[str]) -> dict[str, str]:
    """Return the content of each step's commit file, by name, for steps that have one."""
    files = {name: run / name / COMMIT_FILE for name in names}
    return {
        name: file.read_bytes().decode(errors="replace") for name, file in files.items() if file.is_file()
    }


# Depth of the search in directories next to the run: RUN/../other/checkpoints/STEP/ITEM.
_MAX_DEPTH = 4
MAX_LINKS_NEARBY = 20_000
"""Number of directories next to the run to search, nearest first.

Directories beyond this number do not belong to runs.
"""


def find_links_into(run: Location) -> Mapping[str, tuple[str, ...]]:
    """Return the links into each step, from anywhere in the run and from sibling directories.

    Raises:
        StorageError: The run cannot be listed.
    """
    if run.store.scheme != "file":
        return {}
    top, result = run.resolve(), defaultdict(list)
    for location in chain(_links_within(run), _nearby_links(run.absolute())):
        target = location.resolve()
        try:
            name = target.relative_to(top).partition("/")[0]
        except ValueError:
            continue
        # A link inside a step is deleted with the step.
        if name and not _is_inside(location, run / name):
            result[name].append(str(location))
    return {name: tuple(links) for name, links in result.items()}


def _is_inside(location: Location, directory: Location) -> bool:
    return directory.absolute() in location.absolute().parents


def _links_within(directory: Location) -> Iterator[Location]:
    """Yield all links in a directory and below it."""
    for entry in directory.entries():
        if entry.is_link:
            yield directory / entry.name
        elif entry.is_dir:
            yield from _links_within(directory / entry.name)


def _nearby_links(run: Location) -> Iterator[Location]:
    """Yield the links in the directory that contains a run, and below it, except for those in the run."""
    waiting = deque([(run.parent, 0)])
    for _ in range(MAX_LINKS_NEARBY):
        if not waiting:
            return
        directory, depth = waiting.popleft()
        try:
            entries = directory.entries()
        except StorageError:
            continue  # The directory belongs to another user.
        for entry in entries:
            location = directory / entry.name
            if entry.is_link:
                yield location
            elif entry.is_dir and depth < _MAX_DEPTH and location != run:
                waiting.append((location, depth + 1))
