"""Identify what is at a location: a checkpoint, step, run, adapter, plan or leftover, or several of these.

`detect` is the only place that decides this. `open_tree` opens what it returns, and commands that list, copy,
prune, replace or describe a location use the same answer. A directory of several checkpoints is a list of
them (`LocationKind.COLLECTION`), and is never opened as one of them.

Detection reads names, and a few bytes of files without an ending. Each property is computed at first use.
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
from ckpttools.formats.orbax.finished import unfinished_reason
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
)
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.base import FileKind
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_KINDS, SUFFIX, Unfinished, read_unfinished
from ckpttools.stores.registry import LocationLike, parse

_ORBAX = "orbax"
SET_ASIDE = ".unfinished"
"""Suffix of a directory that the fix `set-aside` of `ckpt doctor` has renamed."""
# Files that torch.save wrote. A directory of such files may hold anything, so they are opened by their paths.
_SAVED_BY_TORCH = (".pth", ".pt", ".ckpt")
# Levels below a directory that are searched for checkpoints, and the number of directories in all. A local
# directory takes 0.5 ms, one in a bucket several requests.
_MAX_LEVELS, _MAX_SEARCHED, _MAX_SEARCHED_LOCALLY = 4, 200, 2000
# Levels below a step of a trainer, as in `global_step_10/actor/huggingface`.
_MAX_LEVELS_IN_STEP = 2
# Maximum number of steps of a trainer that are searched for a checkpoint.
_MAX_STEPS_SEARCHED = 20

TRAINER_STEP = re.compile(r"(?:global_step|step|checkpoint|iter)[-_]?(?P<number>\d{1,18})", re.DOTALL)
"""Names of step directories of PyTorch trainers."""
PLAIN_STEP = re.compile(r"(?P<number>\d{1,18})", re.ASCII)
"""Names of step directories without the files by which steps of Orbax are recognized."""


class LocationKind(StrEnum):
    """What is at a location."""

    ITEM = "item"
    """One tree in a step of Orbax."""
    STEP = "step"
    """A step of Orbax, with items."""
    RUN = "run"
    """A directory of steps: of Orbax in any layout, of Flax, or of a PyTorch trainer."""
    HOSTS = "hosts"
    """Directories of several hosts of a job, each with a part of every step."""
    MODEL = "model"
    """A model directory as on the Hugging Face Hub: weights and `config.json`."""
    ADAPTER = "adapter"
    """A directory with an adapter of PEFT, without its base model."""
    CHECKPOINT = "checkpoint"
    """A directory that is one checkpoint, in any format."""
    FILE = "file"
    """A single file that is a checkpoint, or a shard of one."""
    PLAN = "plan"
    """A plan of a conversion in a file."""
    COLLECTION = "collection"
    """A directory of checkpoints or runs that do not belong together."""
    INTERRUPTED = "interrupted conversion"
    """A directory in which a conversion grows, or was interrupted."""
    PRUNE = "interrupted prune"
    """The directory in which a prune records and removes steps."""
    SAVE = "unfinished save"
    """What an interrupted save of Orbax left."""
    EMPTY = "empty directory"
    OTHER = "other"
    """Anything else."""


class LocationState(StrEnum):
    """Whether what is at a location can be used."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """A save that has not ended."""
    DAMAGED = "damaged"
    """A save that ended, and has lost files since."""
    INTERRUPTED = "interrupted"
    """Work of ckpttools that the same command resumes."""


@dataclass(frozen=True)
class Detected:
    """What is at a location; use `detect` to make one.

    Attributes:
        location: the location.
        format: the format that opens it; None if no format does.
        orbax: the place of Orbax at a directory; a run without steps if it is not of Orbax.
        hosts: directories of hosts, with their items.
        unfinished: the conversion that grows there; None if there is none.
        is_directory: whether it is a directory.
        is_empty: whether it is an empty directory.
        reasons: why formats do not recognize it, by their names.
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
        """The kind.

        Raises:
            StorageError: a directory cannot be listed, or a file cannot be read.
        """
        return self._decision[0]

    @property
    def evidence(self) -> str:
        """The name of what decided the kind: a file, a directory or a format; raises as `kind`."""
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
            step = format.lies_at(self.location)
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
        """Whether it can be used; raises as `kind`."""
        if self.kind in (LocationKind.INTERRUPTED, LocationKind.PRUNE):
            return LocationState.INTERRUPTED
        if self.unfinished_reason is None:
            return LocationState.COMPLETE
        step = self._latest_step
        is_damaged = step is not None and step.is_damaged
        return LocationState.DAMAGED if is_damaged else LocationState.UNFINISHED

    @property
    def _latest_step(self) -> Step | None:
        """The step of Orbax here, or the latest one of a run."""
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
        """Why a save is not known to be finished; None if it is, or if only `state` tells. Raises as `kind`.

        The latest step decides for a run only if no step is finished.
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
            return f"its name is still {self.location.name}"
        # In a bucket, a conversion grows under its final name.
        grows = self.location.store.streams is not None and read_unfinished(self.location) is not None
        return "a conversion is being written to it" if grows else None

    @cached_property
    def flax_states(self) -> Mapping[int, Location]:
        """Files of `flax.training.checkpoints` in a directory, by step.

        Raises:
            StorageError: the directory or a file cannot be read.
        """
        from ckpttools.formats.flax.format import numbered_states

        return numbered_states(self.location) if self.is_directory else {}

    @cached_property
    def trainer_steps(self) -> Sequence[Location]:
        """Steps of a PyTorch trainer in a directory, if at least one has a checkpoint; raises as `kind`."""
        return find_trainer_steps(self.location) if self.is_directory else ()

    @cached_property
    def step_count(self) -> int | None:
        """The number of steps of a run; None for other kinds. Raises as `kind`."""
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
        """The name of the format, of the last step for a run that is opened by its steps."""
        if self.format is not None:
            return self.format.name
        steps = self.trainer_steps if self.kind is LocationKind.RUN else ()
        members = (item for step in reversed(steps) for item in find_in_step(step).values())
        return next((item.format.name for item in members if item.format is not None), None)

    @cached_property
    def members(self) -> Sequence[Detected]:
        """The checkpoints, runs and interrupted conversions below a collection, in order of their levels.

        At most 2,000 directories on four levels are searched, or 200 in a bucket; `is_truncated` tells
        whether there are more.

        Raises:
            StorageError: the directory cannot be listed.
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
        """Whether the search for `members` ended at the limit of directories."""
        return len(self.members) > 0 and self._budget.left == 0

    def name_below(self, above: Location) -> str:
        """Return the path of this location below another."""
        return self.location.relative_to(above)

    def open(self, options: ReadOptions) -> Tree:
        """Open the checkpoint with its format; reads headers and indexes, but no array.

        Raises:
            CheckpointError: it cannot be read, or is not one checkpoint.
        """
        if self.format is None:
            raise FormatError("this is not one checkpoint", location=self.location)
        if self.orbax is not None and self.format.name == "orbax":
            from ckpttools.formats.orbax.format import FORMAT

            return FORMAT.open_at(self.location, self.orbax, self.hosts, options)
        return self.format.open(self.location, options)


class _SearchLimit:
    """The number of directories that may still be searched."""

    def __init__(self, count: int = _MAX_SEARCHED) -> None:
        self.left = count


def detect(where: LocationLike, *, is_content: bool = False) -> Detected:
    """Identify what is at a location. Reads names, and the beginning of some files, but no array.

    Args:
        where: the location.
        is_content: whether to identify the content of a conversion that grows there.

    Raises:
        StorageError: nothing is there, or it cannot be accessed.
    """
    location = parse(where)
    status = location.status()
    if status is None:
        raise absent(location)
    is_directory = status.kind is FileKind.DIRECTORY
    if not is_content and (unfinished := read_unfinished(location)) is not None:
        return Detected(location, unfinished=unfinished, is_directory=is_directory)
    if not is_directory:
        return _by_format(Detected(location, is_directory=False), formats_in_turn())
    return _detect_directory(location, formats_in_turn(_ORBAX))


def identified(place: OrbaxItem | Step) -> Detected:
    """Wrap an item or a step that Orbax's own search has found."""
    location = place.directory if isinstance(place, OrbaxItem) else place.path
    return Detected(location, format_named(_ORBAX), place)


def is_checkpoint(location: Location) -> bool:
    """Whether a built-in format opens what is at a location; raises StorageError if it cannot be accessed."""
    status = location.status()
    if status is None:
        return False
    if status.kind is FileKind.DIRECTORY:
        return _detect_directory(location, built_in_formats(_ORBAX)).format is not None
    return _by_format(Detected(location, is_directory=False), built_in_formats()).format is not None


def find_leftover(location: Location) -> LocationKind | None:
    """Return the kind of a directory that unfinished work left: a conversion, a prune or a save; else None.

    Raises:
        StorageError: it cannot be accessed.
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
    if IN_PROGRESS in name or name.endswith(SET_ASIDE):
        return LocationKind.SAVE, name
    return None


def find_in_step(step: Location) -> Mapping[str, Detected]:
    """Return the checkpoints in a step of a PyTorch trainer: the step itself as "", or paths below it.

    Raises:
        StorageError: a directory cannot be listed.
    """
    itself = _detect_directory(step, built_in_formats(_ORBAX))
    if itself.format is not None:
        return {"": itself}
    return {item.name_below(step): item for item in _search(step, _MAX_LEVELS_IN_STEP, _SearchLimit())}


def find_trainer_steps(run: Location) -> Sequence[Location]:
    """Return the steps of a PyTorch trainer, in order; none if no step has a checkpoint.

    Args:
        run: a directory, which has the steps or a directory `checkpoints` with them.

    Raises:
        StorageError: a directory cannot be listed.
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
    """Identify a directory in which no conversion grows.

    Args:
        location: the directory.
        formats: the formats except Orbax, which is recognized without importing its format.
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
    return _by_format(Detected(location, orbax=orbax, reasons=reasons), formats)


def _by_format(detected: Detected, formats: Iterator[Format]) -> Detected:
    """Add the first format that recognizes a location, or why none does."""
    reasons = dict(detected.reasons)
    for format in formats:
        reason = format.why_not(detected.location)
        if reason is None:
            return Detected(detected.location, format, detected.orbax, is_directory=detected.is_directory)
        reasons[format.name] = reason
    return Detected(
        detected.location, None, detected.orbax, is_directory=detected.is_directory, reasons=reasons
    )


def _has_other_checkpoints(step: Step) -> bool:
    """Whether an unnumbered directory without step metadata has checkpoints that are not items."""
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
        return []  # an unreadable directory next to checkpoints


def _list_files(folder: Location) -> Iterator[Detected]:
    """Find files of torch.save in a directory, which are opened by their own paths."""
    for entry in folder.entries():
        location = folder / entry.name
        if entry.is_file and location.suffix in _SAVED_BY_TORCH and _is_recognized(location):
            yield _by_format(Detected(location, is_directory=False), built_in_formats())


def _identify(location: Location) -> Detected | None:
    """Return a checkpoint or run at a directory; None for another directory, which is searched."""
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


def _with_leftovers(result: Sequence[Detected]) -> Sequence[Detected]:
    """Return members of a collection; none if there are only interrupted conversions."""
    return result if any(item.unfinished is None for item in result) else ()


def _is_plan(location: Location) -> bool:
    """Whether a file begins like a plan; raises StorageError if it cannot be read."""
    start = f'["{PLAN_KINDS}'.encode()
    with location.open() as file:
        return file.size > len(start) and bytes(file.read(0, len(start))) == start


def _legacy_run(location: Location) -> Sequence[str]:
    """Return the names of steps in the layout of Orbax before `_METADATA`, in order."""
    from ckpttools.formats.zarr.legacy_runs import legacy_run

    run = legacy_run(location)
    return () if run is None else [step.name for step in run.steps.values()]


def count_members(count: int, runs: int) -> str:
    """Count the members of a collection: `3 checkpoints`, `2 runs`, `3 checkpoints and runs`."""
    if runs == count:
        return plural(count, "run")
    return f"{count:,} checkpoints and runs" if runs else plural(count, "checkpoint")
