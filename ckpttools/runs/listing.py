"""The steps of a run: contents, metrics, disk usage, and whether each is finished or being deleted.

While Orbax (v1) deletes an item of a step, a file `_CHECKPOINT_DELETION` in the step records it. Until
then all readers consider the item deleted, and nothing else may change the step. Deleting a complete step
leaves no such record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import TypeVar

from ckpttools.array.gaps import missing_chunks
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError, suppress_step_warnings
from ckpttools.core.message_terms import action
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import plural, sample_names
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import Detected, LocationKind, detect, wrap_identified
from ckpttools.formats.flax.format import numbered_states
from ckpttools.formats.interrupted import empty_error
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.naming import ITEM
from ckpttools.formats.orbax.runs import one_item
from ckpttools.formats.orbax.steps import (
    FLAX_PREFIX,
    IN_PROGRESS,
    OrbaxItem,
    OrbaxRun,
    Step,
    directories,
    unfinished_reason,
)
from ckpttools.formats.registry import not_opened, open_detected, open_tree
from ckpttools.formats.zarr.legacy_runs import LegacyRun, legacy_items, legacy_run, legacy_run_in
from ckpttools.maxtext.loading.paths import EMERGENCY_ITEMS, list_committed_steps
from ckpttools.maxtext.view import view_of
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_T = TypeVar("_T")
# Number of times that a changing run is listed again.
_MAX_LISTINGS = 10
# Prefixes of the kinds of trees with MaxText's layout.
_MAXTEXT = ("stacked", "unstacked")


@dataclass(frozen=True, slots=True)
class ItemListing:
    """An item of a step.

    Attributes:
        name: Name of the item's directory; "" if the step is the item itself.
        kind: For a tree, "stacked-training" and so on, as in `ckpttools.inspect`, or "training",
            "parameters", "optimizer" or "other" if it is not a MaxText tree; "adapter" for LoRA factors;
            "metrics"; "files" for anything else; "unreadable" for a tree that cannot be opened.
        arrays: Number of arrays in a tree.
        nbytes: Total size of the arrays, in bytes.
        missing_chunks: Number of missing chunks. Each host stores only a part of an emergency checkpoint.
        is_resumable: Whether training can resume from the item: it has optimizer state, even if that has no
            arrays.
    """

    name: str
    kind: str
    arrays: int = 0
    nbytes: int = 0
    missing_chunks: int = 0
    is_resumable: bool = False


@dataclass(frozen=True, slots=True)
class StepListing:
    """A step of a run.

    Attributes:
        step: Step number.
        name: Name of the directory.
        items: Items in the step.
        nbytes: Bytes of all files, counting each file once.
        own_bytes: Bytes of files without links elsewhere, which deleting the step would free.
        saved_at: Time when the step was finished or last changed, in seconds since 1970; None if unknown.
        unfinished_reason: Why the step is not a finished save; None if it is finished.
        metrics: Metrics stored next to the trees; None if there are none.
        item_being_deleted: Name of an item that is being deleted; None if there is none.
        is_damaged: Whether the step was saved completely but has lost data since; see `unfinished_reason`.
    """

    step: int
    name: str
    items: tuple[ItemListing, ...]
    nbytes: int
    own_bytes: int
    saved_at: float | None
    unfinished_reason: str | None = None
    metrics: Mapping[str, float] | None = None
    item_being_deleted: str | None = None
    is_damaged: bool = False

    @property
    def shared_bytes(self) -> int:
        """Bytes of files with links outside the step, such as in a checkpoint with references."""
        return self.nbytes - self.own_bytes

    @property
    def missing_chunks(self) -> int:
        """Number of missing chunks of all trees."""
        return sum(item.missing_chunks for item in self.items)

    @property
    def kind(self) -> str:
        """The kinds of the step's trees, separated by commas."""
        kinds = dict.fromkeys(item.kind for item in self.items if item.kind not in ("files", "metrics"))
        return ", ".join(kinds)


@dataclass(frozen=True, repr=False)
class RunListing(Tabular):
    """A run.

    Attributes:
        path: Directory that contains the steps.
        steps: The steps in order.
        latest: The step that Orbax considers the latest, or that `tracker` names; None if there is none.
        resume_step: `latest`, if a restarted run resumes from it; otherwise None.
        resume_item: Name of the tree in `latest` that MaxText loads; None if no tree has that name.
        blocked_by: Why a restarted run does not resume from `latest`; "" if it does, or if there is no step.
        skipped: Entries that look like later steps, with the reason why Orbax does not list them.
        other_entries: Names of other files and directories.
        tracker: Name of the file in which a PyTorch trainer records `latest`; "" if there is none; None in
            runs of Orbax.
    """

    rows_field = "steps"

    path: str
    steps: tuple[StepListing, ...]
    latest: int | None
    resume_step: int | None
    resume_item: str | None
    blocked_by: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)
    other_entries: tuple[str, ...] = ()
    tracker: str | None = None

    @property
    def finished(self) -> tuple[StepListing, ...]:
        """The finished steps."""
        return tuple(step for step in self.steps if step.unfinished_reason is None)

    def __repr__(self) -> str:
        taken = "" if self.resume_step is None else f", {self.resume_step} would be resumed"
        steps = f"{plural(len(self.steps), 'step')}, {len(self.finished):,} finished"
        return f"<RunListing of {self.path}: {steps}{taken}>"


def find_run(path: Location) -> OrbaxRun:
    """Return the run at a path, or the run that contains the step or item at the path.

    Raises:
        StorageError: The path does not exist or cannot be read.
        FormatError: The path is not a run.
    """
    detected = detect(path.absolute(), is_content=True)
    run = run_of(detected)
    if run is None:
        raise no_run_error(detected, path)
    return run


def run_of(detected: Detected) -> OrbaxRun | None:
    """Return the Orbax or Flax run at a location or above it; None if there is none.

    Raises:
        StorageError: A directory cannot be listed, or a file cannot be read.
    """
    match detected.orbax:
        case OrbaxItem(step=step) if step.number is not None:
            return OrbaxRun(step.path.parent)
        case Step() as step if step.number is not None:
            return OrbaxRun(step.path.parent)
        case OrbaxRun() as run if run.steps:
            return run
    if detected.hosts or detected.is_empty or not detected.is_directory:
        return None
    if isinstance(detected.orbax, OrbaxRun) and detected.flax_states:
        return OrbaxRun(detected.location)
    # Only this format recognizes legacy Orbax runs and their items.
    may_be_legacy = detected.format is None or detected.format.name == "zarr-tree"
    legacy = _find_legacy_run(detected.location) if may_be_legacy else None
    return None if legacy is None else OrbaxRun(legacy.path)


def no_run_error(detected: Detected, path: Location) -> FormatError:
    """Return the error for a location that is neither a run of Orbax or Flax nor inside one.

    Args:
        detected: The result of detection at the location.
        path: The location as the user passed it.

    Raises:
        StorageError: A directory cannot be listed.
    """
    if hosts := detected.hosts:
        return FormatError(
            f"{path} holds the parts that {plural(len(hosts), 'host')} of a job saved",
            hint=f"{action('list_saves', str(path))} lists the steps",
        )
    if detected.is_empty:
        return empty_error(path)
    if detected.format is None and detected.kind is LocationKind.COLLECTION:
        return not_opened(replace(detected, location=path))
    return FormatError(
        f"{path} is not a run with steps",
        expected="a directory with steps of Orbax or of a trainer, in it or in its subdirectory checkpoints",
        hint=f"{action('summary', str(path))} identifies it",
    )


def _find_legacy_run(path: Location) -> LegacyRun | None:
    """Return the legacy Orbax run at a path, or the one that contains the step or item at the path."""
    if run := legacy_run(path):
        return run
    for step in (path, path.parent):
        run = legacy_run_in(step.parent) if Step(step).number is not None else None
        if run is not None and step in run.steps.values():
            return run
    return None


def list_consistently(run: OrbaxRun, inspect: Callable[[OrbaxRun], _T]) -> _T:
    """Inspect a run, and repeat if a job starts, finishes or deletes steps in the meantime.

    Raises:
        StorageError: The store cannot be read, or the run keeps changing.
    """
    for _ in range(_MAX_LISTINGS):
        try:
            return inspect(run)
        except StorageError:
            current = find_run(run.path)
            if _names(current) == _names(run):
                raise
            run = current
    return inspect(run)


def _names(run: OrbaxRun) -> set[str]:
    return {step.path.name for step in run.steps.values()}


def list_run(run: OrbaxRun) -> RunListing:
    """List the contents of a run. Reads indexes and metadata, but no arrays.

    Raises:
        StorageError: The store cannot be read.
    """
    committed = list_committed_steps(run.path)
    latest = None if committed.latest is None else Step(committed.steps[committed.latest])
    steps = map_concurrently(run.path.store, list_step, run.steps.values())
    steps = sorted([*steps, *_list_flax_steps(run), *_list_legacy_steps(run)], key=lambda step: step.step)
    names = _names(run) | {step.name for step in steps}
    item = None if latest is None else _resumed_item(latest)
    blocked_by = "" if latest is None else _resume_obstacle(latest, item, steps)
    return RunListing(
        str(run.path),
        tuple(steps),
        committed.latest,
        None if blocked_by else committed.latest,
        item,
        blocked_by,
        {name: reason for name, reason in committed.skipped.items() if name in names},
        tuple(entry.name for entry in run.path.entries() if entry.name not in names),
    )


def _list_flax_steps(run: OrbaxRun) -> Iterator[StepListing]:
    """Yield the steps that `flax.training.checkpoints` wrote as files next to those of Orbax."""
    if run.steps and not any(step.prefix == FLAX_PREFIX for step in run.steps.values()):
        return
    for step, location in numbered_states(run.path).items():
        status = location.stat()
        try:
            item = list_tree(open_tree(location), "")
        except StorageError:
            raise
        except CheckpointError:
            item = ItemListing("", "unreadable")
        is_damaged = item.kind == "unreadable"
        fault = "it cannot be read" if is_damaged else None
        modified = status.modified / 1e9 if status.modified else None
        yield StepListing(
            step, location.name, (item,), status.size, status.size, modified, fault, is_damaged=is_damaged
        )


def _list_legacy_steps(run: OrbaxRun) -> Iterator[StepListing]:
    """Yield the steps of older Orbax versions next to those with `_METADATA`."""
    legacy = legacy_run_in(run.path, [step.path for step in run.steps.values()])
    if legacy is None:
        return
    for number, location in legacy.steps.items():
        if run.steps and number not in legacy.legacy:
            continue
        usage = measure_usage(location)
        items = [_list_legacy_item(item, location) for item in legacy_items(location)]
        fault = legacy.mismatch_reason(number) or next((fault for _, fault in items if fault), None)
        modified = None if usage.modified is None else usage.modified / 1e9
        yield StepListing(
            number,
            location.name,
            tuple(item for item, _ in items),
            usage.nbytes,
            usage.own,
            modified,
            fault,
            _read_metrics(Step(location)),
        )


def _list_legacy_item(location: Location, step: Location) -> tuple[ItemListing, str | None]:
    """List an item of a legacy run. Returns the item, and the reason if it cannot be opened."""
    name = "" if location == step else location.name
    try:
        return list_tree(open_tree(location), name), None
    except StorageError:
        raise
    except CheckpointError as error:
        return ItemListing(name, "unreadable"), error.raw.line


def _resumed_item(step: Step) -> str | None:
    """Return the item that MaxText restores: `items`, or the corresponding name in emergency checkpoints."""
    names = {item.directory.name for item in step.items} or {item.name for item in legacy_items(step.path)}
    return next((name for name in (ITEM, *EMERGENCY_ITEMS) if name in names), None)


def _resume_obstacle(latest: Step, item: str | None, steps: Sequence[StepListing]) -> str:
    """Return why a run does not resume from a step; "" if it does."""
    latest_listing = next((step for step in steps if step.name == latest.path.name), None)
    if latest_listing is None or latest_listing.unfinished_reason is not None:
        return "which Orbax considers finished although it is not: loading it fails"
    if unreadable := [
        entry.name or "(the step)" for entry in latest_listing.items if entry.kind == "unreadable"
    ]:
        return f"which cannot be read ({sample_names(unreadable)}): {action('doctor')} says why"
    if latest_listing.missing_chunks:
        is_part = any(is_part_of_a_host(entry.directory) for entry in latest.items)
        others = f": this is one host's part, and {action('assemble')} assembles those of all hosts"
        return f"which lacks {plural(latest_listing.missing_chunks, 'chunk')} here{others if is_part else ''}"
    states = [entry.name for entry in latest_listing.items if entry.is_resumable]
    if states and item not in (None, *states):
        return f"whose optimizer state is in {sample_names(states)}: MaxText restores only {item}"
    if not states:
        loaded = ": MaxText loads it with load_parameters_path"
        is_maxtext = any(entry.kind.startswith(_MAXTEXT) for entry in latest_listing.items)
        return f"which has no optimizer state{loaded * is_maxtext}"
    return ""


def list_step(step: Step) -> StepListing:
    """List one step; raises the errors of `list_run`."""
    usage = measure_usage(step.path)
    committed = step.declared.fields.get("commit_timestamp_nsecs")
    saved = committed if isinstance(committed, int) else usage.modified
    deletion = read_deletion(step.path)
    unfinished = unfinished_reason(step)
    return StepListing(
        step.number or 0,
        step.path.name,
        tuple(_list_items(step)),
        usage.nbytes,
        usage.own,
        None if saved is None else saved / 1e9,
        unfinished,
        _read_metrics(step),
        None if deletion is None else deletion.item,
        is_damaged=unfinished is not None and step.is_damaged,
    )


def _read_metrics(step: Step) -> Mapping[str, float] | None:
    try:
        return load_step_metrics(step.path)
    except StorageError:
        raise
    except CheckpointError:
        return None  # The step is usable, and doctor reports the problem.


def _list_items(step: Step) -> Iterator[ItemListing]:
    trees = {item.directory for item in step.items}
    if step.path in trees:
        yield list_item(OrbaxItem(step.path, step), "")
        return
    step_tree = _open_all_items(step) if len(trees) > 1 else None
    for location in directories(step.path):
        if location in trees:
            yield list_item(OrbaxItem(location, step), location.name, step_tree)
        elif IN_PROGRESS not in location.name:
            yield ItemListing(location.name, METRICS if location.name == METRICS else "files")


def _open_all_items(step: Step) -> Tree | None:
    """Open all items of a step as one tree. Returns None if an item cannot be opened."""
    try:
        with suppress_step_warnings():
            return open_detected(wrap_identified(step), ReadOptions(all_items=True))
    except StorageError:
        raise
    except CheckpointError:
        return None  # Items are listed one by one, as far as they can be opened.


def list_item(item: OrbaxItem, name: str, step_tree: Tree | None = None) -> ItemListing:
    """List a tree as far as it can be opened.

    Args:
        item: The item.
        name: Its name in the listing.
        step_tree: All items of the step as one tree, if there are several; the other items help to identify
            the kind of this one.
    """
    try:
        with suppress_step_warnings():
            tree = open_detected(wrap_identified(item)) if step_tree is None else one_item(step_tree, name)
    except StorageError:
        raise
    except CheckpointError:
        return ItemListing(name, "unreadable")
    return list_tree(tree, name, step_tree)


def _is_factor(path: Path) -> bool:
    """Return whether a path has the name of a LoRA factor in JAX trainers."""
    return any("lora_a" in str(key) or "lora_b" in str(key) for key in path[-2:])


def list_tree(tree: Tree, name: str, step_tree: Tree | None = None) -> ItemListing:
    """List an open tree as the item with the given name; see `list_item` for `step_tree`."""
    view = view_of(tree)
    has_parameters, has_optimizer = bool(view.of_role("parameter")), bool(view.of_role("optimizer"))
    is_state = view.is_training
    if step_tree is not None and tree.arrays and view.kind is None:
        step_roles = view_of(step_tree).roles
        roles = {step_roles.of((name, *path)) for path in tree.arrays}
        has_parameters, has_optimizer = "parameter" in roles, "optimizer" in roles
        is_state |= has_optimizer
    plain = "training" if has_optimizer else "parameters"
    separate_kind = "optimizer" if has_optimizer else "other"
    kind = view.kind or (plain if has_parameters and tree.arrays else separate_kind)
    if has_parameters and all(map(_is_factor, view.of_role("parameter"))):
        kind = "adapter"
    arrays = tree.arrays.values()
    gaps = missing_chunks(arrays)
    missing = 0 if gaps is None else gaps.missing
    nbytes = sum(array.nbytes for array in arrays)
    return ItemListing(name, kind, len(arrays), nbytes, missing, is_state)


METRICS = "metrics"
"""Name of the item, and of the only file in it."""


def load_step_metrics(step: Location) -> Mapping[str, float] | None:
    """Return the metrics by name, with nested names joined by "/"; None if there are none.

    Raises:
        FormatError, StorageError: The file is not a JSON object, or cannot be read.
    """
    location = step / METRICS / METRICS
    return dict(_numeric_metrics(read_json(location), "")) if location.is_file() else None


def _numeric_metrics(document: Mapping[str, object], above: str) -> Iterator[tuple[str, float]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _numeric_metrics(value, f"{above}{name}/")
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            # Integers beyond the range of float64 become infinite. Values that JSON cannot represent, such as
            # an array of one number, are often saved as text.
            with suppress(ValueError):
                yield f"{above}{name}", float(str(value))


RECORD = "_CHECKPOINT_DELETION"


@dataclass(frozen=True, slots=True)
class Deletion:
    """An item of a step that is being deleted.

    Attributes:
        item: Name of the item.
        destination: Location to which the item is moved; None if it is removed.
    """

    item: str
    destination: str | None


def read_deletion(step: Location) -> Deletion | None:
    """Return a step's running or interrupted deletion; None if there is none.

    Raises:
        FormatError: The record is invalid.
        StorageError: The record cannot be read.
    """
    location = step / RECORD
    if not location.is_file():
        return None
    document = read_json(location)
    item, destination = document.get("checkpointable_name"), document.get("destination")
    if not isinstance(item, str) or not item or not isinstance(destination, str | None):
        raise FormatError(
            "not a record of a deletion",
            location=location,
            expected="checkpointable_name, and destination or null",
            hint="retry the deletion with Orbax, or restore the step from another copy",
        )
    return Deletion(item, destination)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of files, counting each file once even if it has several names.

    Attributes:
        nbytes: Size of all files, in bytes.
        own: Bytes of files without links elsewhere, which deleting the directories frees.
        files: Number of files.
        modified: Time of the last change, in nanoseconds since 1970; None if the store does not report it.
    """

    nbytes: int
    own: int
    files: int
    modified: int | None

    @property
    def shared(self) -> int:
        """Bytes of files that have a name elsewhere, too, so that deleting these names frees nothing."""
        return self.nbytes - self.own


def measure_usage(*directories: Location) -> Usage:
    """Measure several disjoint directories together; StorageError if one cannot be listed."""
    names: dict[object, int] = {}
    sizes: dict[object, int] = {}
    links: dict[object, int] = {}
    newest: int | None = None
    for location, result in (
        (directory / name, result) for directory in directories for name, result in directory.walk()
    ):
        # In a store without links, each name is a separate file.
        file = str(location) if result.identity is None else result.identity
        names[file] = names.get(file, 0) + 1
        sizes[file], links[file] = result.size, result.links
        if result.modified is not None:
            newest = max(newest or 0, result.modified)
    own = sum(sizes[file] for file, count in names.items() if count >= links[file])
    return Usage(sum(sizes.values()), own, sum(names.values()), newest)
