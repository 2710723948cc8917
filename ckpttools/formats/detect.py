"""Identify a location: a checkpoint, step, run, adapter, plan or leftover, or a collection of these.

All identification is done by `detect`. `open_tree` opens its result, and commands that list, copy, prune,
replace or describe a location use the same result. A directory of several checkpoints is a collection
(`LocationKind.COLLECTION`) and is never opened as one of them.

Detection reads names, and a few bytes of files without a suffix. Properties are computed on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from functools import cached_property

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.text import plural, sort_naturally
from ckpttools.formats.adapters import ADAPTER, is_adapter_alone
from ckpttools.formats.base import Format, ReadOptions, SupportsLocation
from ckpttools.formats.interrupted import absent
from ckpttools.formats.known_formats import built_in_formats, format_named, formats_in_turn
from ckpttools.formats.orbax.hosts import hosts_at
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, TREE_FILE
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    PRUNE_DIRECTORY,
    OrbaxItem,
    OrbaxRun,
    Step,
    directories,
    orbax_at,
    unfinished_reason,
)
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.base import FileKind
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_KINDS, SUFFIX, Unfinished, read_unfinished
from ckpttools.stores.registry import LocationLike, parse

_ORBAX = "orbax"
SET_ASIDE_SUFFIX = ".unfinished"
"""Suffix of directories that the `set-aside` fix of `ckpt doctor` has renamed."""
# Files written by torch.save. A directory may mix them with anything else, so they are opened by path.
_SAVED_BY_TORCH = (".pth", ".pt", ".ckpt")
# The maximum number of levels below a directory to search for checkpoints, and of directories to search.
# Searching a local directory takes 0.5 ms; in a bucket, it takes several requests.
_MAX_LEVELS, _MAX_SEARCHED, _MAX_SEARCHED_LOCALLY = 4, 200, 2000
# Levels that are searched below a trainer's step, as in `global_step_10/actor/huggingface`.
_MAX_LEVELS_IN_STEP = 2
# Maximum number of trainer steps that are searched for a checkpoint.
_MAX_STEPS_SEARCHED = 20

TRAINER_STEP = re.compile(r"(?:global_step|step|checkpoint|iter)[-_]?(?P<number>\d{1,18})", re.DOTALL)
"""Names of step directories of PyTorch trainers."""
PLAIN_STEP = re.compile(r"(?P<number>\d{1,18})", re.ASCII)
"""Names of step directories that lack the files by which Orbax steps are recognized."""


class LocationKind(StrEnum):
    """The kind of checkpoint or directory at a location."""

    ITEM = "item"
    """One tree in an Orbax step."""
    STEP = "step"
    """An Orbax step, with items."""
    RUN = "run"
    """A directory of steps, written by Orbax in any layout, by Flax, or by a PyTorch trainer."""
    HOSTS = "hosts"
    """Directories of several hosts of a job; each stores a part of every step."""
    MODEL = "model"
    """A model directory as on the Hugging Face Hub, with weights and `config.json`."""
    ADAPTER = "adapter"
    """A directory with a PEFT adapter, without its base model."""
    CHECKPOINT = "checkpoint"
    """A directory that is a single checkpoint in any other format."""
    FILE = "file"
    """A single file that is a checkpoint or a shard of one."""
    PLAN = "plan"
    """A file with a conversion plan."""
    COLLECTION = "collection"
    """A directory of unrelated checkpoints or runs."""
    INTERRUPTED = "interrupted conversion"
    """A directory that a running or interrupted conversion is writing to."""
    PRUNE = "interrupted prune"
    """The directory in which a prune records and removes steps."""
    SAVE = "unfinished save"
    """The remains of an interrupted Orbax save."""
    EMPTY = "empty directory"
    OTHER = "other"
    """Anything else."""


class LocationState(StrEnum):
    """Whether the checkpoint or run at a location can be used."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """A save in progress, or one that was interrupted."""
    DAMAGED = "damaged"
    """A finished save that has since lost files."""
    INTERRUPTED = "interrupted"
    """An operation of ckpttools that the same command resumes."""


@dataclass(frozen=True)
class Detected:
    """The result of identifying a location; created by `detect`.

    Attributes:
        location: The identified location.
        format: The format that opens it; None if no format does.
        orbax: The Orbax item, step or run at a directory; a run without steps if Orbax did not write it.
        hosts: The host directories, with their items.
        unfinished: The conversion in progress at the location, or None.
        is_directory: Whether the location is a directory.
        is_empty: Whether the location is an empty directory.
        reasons: Why each format does not recognize the location, by format name.
    """

    location: Location
    format: Format | None = None
    orbax: OrbaxItem | Step | OrbaxRun | None = None
    hosts: Mapping[Location, Sequence[Location]] = field(default_factory=dict)
    unfinished: Unfinished | None = None
    is_directory: bool = True
    is_empty: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def kind(self) -> LocationKind:
        """The kind of the location.

        Raises:
            StorageError: A directory cannot be listed, or a file cannot be read.
        """
        return self._decision[0]

    @property
    def evidence(self) -> str:
        """The file, directory or format that determined the kind; raises the same errors as `kind`."""
        return self._decision[1]

    @cached_property
    def _decision(self) -> tuple[LocationKind, str]:
        leftover = _leftover_of(self.location, self.unfinished)
        if leftover is not None and (self.format is None or leftover[0] is not LocationKind.SAVE):
            return leftover
        if self.is_empty:
            return LocationKind.EMPTY, ""
        if self.hosts:
            return LocationKind.HOSTS, next(iter(self.hosts)).name
        if not self.is_directory:
            return self._decide_file()
        if self.format is None:
            return self._decide_unopened()
        return self._decide_orbax() or self._decide_directory(self.format)

    def _decide_file(self) -> tuple[LocationKind, str]:
        if self.format is not None:
            return LocationKind.FILE, self.format.name
        return (LocationKind.PLAN, PLAN_KINDS) if _is_plan(self.location) else (LocationKind.OTHER, "")

    def _decide_orbax(self) -> tuple[LocationKind, str] | None:
        match self.orbax:
            case OrbaxItem(name=None):
                return LocationKind.CHECKPOINT, TREE_FILE
            case OrbaxItem():
                return LocationKind.ITEM, TREE_FILE
            case Step(items=items):
                return LocationKind.STEP, items[0].directory.name if items else CHECKPOINT_FILE
            case OrbaxRun(steps=steps) if steps:
                return LocationKind.RUN, list(steps.values())[-1].path.name
        return None

    def _decide_directory(self, format: Format) -> tuple[LocationKind, str]:
        if format.name == "flax-msgpack" and self.flax_states:
            return LocationKind.RUN, list(self.flax_states.values())[-1].name
        if format.name == "zarr-tree" and (run := _legacy_run(self.location)):
            return LocationKind.RUN, run[-1]
        if format.name.startswith("deepspeed") and isinstance(format, SupportsLocation):
            step = format.checkpoint_location(self.location)
            if step != self.location:
                return LocationKind.RUN, step.name
        if is_adapter_alone(self.location):
            return LocationKind.ADAPTER, ADAPTER
        if (self.location / CONFIG).is_file():
            return LocationKind.MODEL, CONFIG
        return LocationKind.CHECKPOINT, format.name

    def _decide_unopened(self) -> tuple[LocationKind, str]:
        if self.trainer_steps:
            return LocationKind.RUN, self.trainer_steps[-1].name
        if self.members:
            return LocationKind.COLLECTION, self.members[0].name_below(self.location)
        return LocationKind.OTHER, ""

    @cached_property
    def state(self) -> LocationState:
        """Whether the location can be used; raises the same errors as `kind`."""
        if self.kind in (LocationKind.INTERRUPTED, LocationKind.PRUNE):
            return LocationState.INTERRUPTED
        if self.unfinished_reason is None:
            return LocationState.COMPLETE
        step = self._latest_step
        is_damaged = step is not None and step.is_damaged
        return LocationState.DAMAGED if is_damaged else LocationState.UNFINISHED

    @property
    def _latest_step(self) -> Step | None:
        """The Orbax step at this location, or the latest step of a run."""
        match self.orbax:
            case OrbaxItem(step=step):
                return step
            case Step() as step:
                return step
            case OrbaxRun(steps=steps) if steps:
                return list(steps.values())[-1]
        return None

    @cached_property
    def unfinished_reason(self) -> str | None:
        """Why a save may be unfinished; None if it is finished or only `state` shows it. Raises as `kind`.

        For a run without a finished step, this is the reason of the latest step.
        """
        match self.orbax:
            case OrbaxItem() as item:
                return ", ".join(item.step.faults([item])) or None
            case Step() as step:
                return unfinished_reason(step)
            case OrbaxRun(steps=steps) if steps:
                reasons = map(unfinished_reason, reversed(list(steps.values())))
                first = next(reasons)
                return None if first is None or None in reasons else first
        if self.kind is LocationKind.SAVE:
            return f"temporary name {self.location.name}"
        # In a bucket, a conversion writes under its final name.
        grows = self.location.store.streams is not None and read_unfinished(self.location) is not None
        return "a conversion is being written to it" if grows else None

    @cached_property
    def flax_states(self) -> Mapping[int, Location]:
        """Checkpoint files of `flax.training.checkpoints` in a directory, by step.

        Raises:
            StorageError: The directory or a file cannot be read.
        """
        from ckpttools.formats.flax.format import numbered_states

        return numbered_states(self.location) if self.is_directory else {}

    @cached_property
    def trainer_steps(self) -> Sequence[Location]:
        """Steps of a PyTorch trainer in a directory, if any has a checkpoint; raises as `kind`."""
        return find_trainer_steps(self.location) if self.is_directory else ()

    @cached_property
    def step_count(self) -> int | None:
        """The number of steps of a run; None for other kinds. Raises the same errors as `kind`."""
        if self.kind is not LocationKind.RUN:
            return None
        if isinstance(self.orbax, OrbaxRun) and self.orbax.steps:
            return len(self.orbax.steps)
        if self.format is not None and self.format.name == "flax-msgpack":
            return len(self.flax_states)
        if self.format is not None and self.format.name == "zarr-tree":
            return len(_legacy_run(self.location))
        return len(self.trainer_steps)

    @property
    def format_name(self) -> str | None:
        """The name of the format; for a run that is opened through its steps, the format of the last step."""
        if self.format is not None:
            return self.format.name
        steps = self.trainer_steps if self.kind is LocationKind.RUN else ()
        members = (item for step in reversed(steps) for item in find_in_step(step).values())
        return next((item.format.name for item in members if item.format is not None), None)

    @cached_property
    def members(self) -> Sequence[Detected]:
        """The checkpoints, runs and interrupted conversions below a collection, ordered by level.

        At most 2,000 directories on four levels are searched, or 200 in a bucket; `is_truncated` tells
        whether there are more.

        Raises:
            StorageError: The directory cannot be listed.
        """
        if not self.is_directory or self.format is not None:
            return ()
        return _with_leftovers([*_search(self.location, _MAX_LEVELS, self._budget)])

    @cached_property
    def _budget(self) -> _SearchLimit:
        is_local = self.location.store.scheme == "file"
        return _SearchLimit(_MAX_SEARCHED_LOCALLY if is_local else _MAX_SEARCHED)

    @property
    def is_truncated(self) -> bool:
        """Whether the search for `members` reached the limit on directories."""
        return len(self.members) > 0 and self._budget.left == 0

    def name_below(self, above: Location) -> str:
        """Return the path of this location relative to a parent directory."""
        return self.location.relative_to(above)

    def open(self, options: ReadOptions) -> Tree:
        """Open the checkpoint with its format; reads headers and indexes but no array data.

        Raises:
            CheckpointError: The location cannot be read or is not a single checkpoint.
        """
        if self.format is None:
            raise FormatError("this is not one checkpoint", location=self.location)
        if self.orbax is not None and self.format.name == "orbax":
            from ckpttools.formats.orbax.format import FORMAT

            return FORMAT.open_at(self.location, self.orbax, self.hosts, options)
        return self.format.open(self.location, options)


class _SearchLimit:
    """A counter of the directories that may still be searched."""

    def __init__(self, count: int = _MAX_SEARCHED) -> None:
        self.left = count


def detect(where: LocationLike, *, is_content: bool = False) -> Detected:
    """Identify a location; reads names and the start of some files, but no array data.

    Args:
        where: The location to identify.
        is_content: Whether to identify the content of a conversion in progress, rather than the conversion.

    Raises:
        StorageError: The location does not exist or cannot be accessed.
    """
    location = parse(where)
    status = location.status()
    if status is None:
        raise absent(location)
    is_directory = status.kind is FileKind.DIRECTORY
    if not is_content and (unfinished := read_unfinished(location)) is not None:
        return Detected(location, unfinished=unfinished, is_directory=is_directory)
    if not is_directory:
        return _detect_format(Detected(location, is_directory=False), formats_in_turn())
    return _detect_directory(location, formats_in_turn(_ORBAX))


def wrap_identified(part: OrbaxItem | Step) -> Detected:
    """Wrap an item or a step that Orbax's own search found."""
    location = part.directory if isinstance(part, OrbaxItem) else part.path
    return Detected(location, format_named(_ORBAX), part)


def is_checkpoint(location: Location) -> bool:
    """Return whether a built-in format opens a location; raises StorageError if it cannot be accessed."""
    status = location.status()
    if status is None:
        return False
    if status.kind is FileKind.DIRECTORY:
        return _detect_directory(location, built_in_formats(_ORBAX)).format is not None
    return _detect_format(Detected(location, is_directory=False), built_in_formats()).format is not None


def find_leftover(location: Location) -> LocationKind | None:
    """Return the kind of unfinished work (conversion, prune or save) that left a directory, or None.

    Raises:
        StorageError: The directory cannot be accessed.
    """
    named = _leftover_of(location, None)
    if named is not None and not location.name.endswith(SUFFIX):
        return named[0]
    result = _leftover_of(location, read_unfinished(location))
    return result and result[0]


def _leftover_of(location: Location, unfinished: Unfinished | None) -> tuple[LocationKind, str] | None:
    name = location.name
    if unfinished is not None:
        return LocationKind.INTERRUPTED, name
    if name == PRUNE_DIRECTORY:
        return LocationKind.PRUNE, name
    if IN_PROGRESS in name or name.endswith(SET_ASIDE_SUFFIX):
        return LocationKind.SAVE, name
    return None


def find_in_step(step: Location) -> Mapping[str, Detected]:
    """Return the checkpoints in a PyTorch trainer's step: paths below the step, "" for the step itself.

    Raises:
        StorageError: A directory cannot be listed.
    """
    itself = _detect_directory(step, built_in_formats(_ORBAX))
    if itself.format is not None:
        return {"": itself}
    return {item.name_below(step): item for item in _search(step, _MAX_LEVELS_IN_STEP, _SearchLimit())}


def find_trainer_steps(run: Location) -> Sequence[Location]:
    """Return the steps of a PyTorch trainer in order; empty if no step has a checkpoint.

    Args:
        run: A directory that contains the steps, or a subdirectory `checkpoints` with the steps.

    Raises:
        StorageError: A directory cannot be listed.
    """
    below = run / "checkpoints"
    inside = directories(run)
    locations = {run: inside} | ({below: directories(below)} if below in inside else {})
    for pattern in (TRAINER_STEP, PLAIN_STEP):
        for location, items in locations.items():
            names = sort_naturally(item.name for item in items if pattern.fullmatch(item.name))
            if names:
                steps = [location / name for name in names]
                return steps if any(map(find_in_step, steps[: -_MAX_STEPS_SEARCHED - 1 : -1])) else ()
    return ()


def _detect_directory(location: Location, formats: Iterator[Format]) -> Detected:
    """Identify a directory that is not the destination of a conversion in progress.

    Args:
        location: The directory to identify.
        formats: The formats except Orbax, which is recognized without importing its format.
    """
    if not location.entries():
        return Detected(location, is_empty=True)
    orbax: OrbaxItem | Step | OrbaxRun = OrbaxRun(location)
    hosts: Mapping[Location, Sequence[Location]] = {}
    reasons: dict[str, str] = {}
    try:
        orbax = orbax_at(location)
        is_orbax = not isinstance(orbax, OrbaxRun) or bool(orbax.steps)
        hosts = {} if is_orbax else hosts_at(location)
    except StorageError as error:
        orbax, is_orbax = OrbaxRun(location), False
        reasons["orbax"] = f"{error.raw.message}: {(error.raw.got or '').partition(' (errno')[0]}"
    if is_orbax and isinstance(orbax, Step) and _has_other_checkpoints(orbax):
        return Detected(location, orbax=OrbaxRun(location), reasons={"orbax": "several checkpoints below"})
    if is_orbax or hosts:
        return Detected(location, format_named(_ORBAX), orbax, hosts)
    return _detect_format(Detected(location, orbax=orbax, reasons=reasons), formats)


def _detect_format(detected: Detected, formats: Iterator[Format]) -> Detected:
    """Add the first format that recognizes a location, or each format's reason for not recognizing it."""
    reasons = dict(detected.reasons)
    for format in formats:
        reason = format.mismatch_reason(detected.location)
        if reason is None:
            return Detected(detected.location, format, detected.orbax, is_directory=detected.is_directory)
        reasons[format.name] = reason
    return Detected(
        detected.location, None, detected.orbax, is_directory=detected.is_directory, reasons=reasons
    )


def _has_other_checkpoints(step: Step) -> bool:
    """Return whether an unnumbered directory without step metadata has checkpoints that are not items."""
    if step.is_declared:
        return False
    items = {item.directory for item in step.items}
    others = [path for path in directories(step.path) if path not in items][:_MAX_STEPS_SEARCHED]
    limit = _SearchLimit()
    return any(_identify(path) or any(_search(path, _MAX_LEVELS - 1, limit)) for path in others)


def _is_recognized(location: Location) -> bool:
    try:
        return is_checkpoint(location)
    except CheckpointError:
        return False


def _search(top: Location, levels: int, budget: _SearchLimit) -> Iterator[Detected]:
    """Find checkpoints and runs below a directory, level by level, without searching inside them."""
    level, found = [top], False
    for depth in range(levels):
        below: list[Location] = []
        for item in (inner for above in level for inner in _list_directories(above)):
            if not budget.left:
                return
            budget.left -= 1
            result = _identify(item)
            if result is None:
                below.append(item)
            else:
                found = True
                yield result
        if depth == 0 and not found:
            yield from _list_files(top)
        level = below


def _list_directories(location: Location) -> list[Location]:
    try:
        return sorted(directories(location), key=str)
    except CheckpointError:
        return []  # Unreadable directories next to checkpoints are skipped.


def _list_files(folder: Location) -> Iterator[Detected]:
    """Yield the torch.save files in a directory, which are opened by their own paths."""
    for entry in folder.entries():
        location = folder / entry.name
        if entry.is_file and location.suffix in _SAVED_BY_TORCH and _is_recognized(location):
            yield _detect_format(Detected(location, is_directory=False), built_in_formats())


def _identify(location: Location) -> Detected | None:
    """Return the checkpoint or run at a directory; None if the directory should be searched."""
    try:
        if location.name.endswith(SUFFIX) and (left := read_unfinished(location)):
            return Detected(location, unfinished=left)
        if location.name == PRUNE_DIRECTORY:
            return None
        result = _detect_directory(location, built_in_formats(_ORBAX))
        is_one = result.format is not None or bool(result.trainer_steps)
    except CheckpointError:
        return None
    return result if is_one else None


def _with_leftovers(detected: Sequence[Detected]) -> Sequence[Detected]:
    """Return the members of a collection; empty if all of them are interrupted conversions."""
    return detected if any(item.unfinished is None for item in detected) else ()


def _is_plan(location: Location) -> bool:
    """Return whether a file starts like a plan; raises StorageError if it cannot be read."""
    start = f'["{PLAN_KINDS}'.encode()
    with location.open() as file:
        return file.size > len(start) and bytes(file.read(0, len(start))) == start


def _legacy_run(location: Location) -> Sequence[str]:
    """Return the sorted names of steps in the Orbax layout that predates `_METADATA`."""
    from ckpttools.formats.zarr.legacy_runs import legacy_run

    run = legacy_run(location)
    return () if run is None else [step.name for step in run.steps.values()]


def count_members(count: int, runs: int) -> str:
    """Format the number of members of a collection: `3 checkpoints`, `2 runs`, `3 checkpoints and runs`."""
    if runs == count:
        return plural(count, "run")
    return f"{count:,} checkpoints and runs" if runs else plural(count, "checkpoint")
