"""Classify an Orbax directory as item, step or run, and whether Orbax considers a step finished.

A step is judged by its contents. Orbax judges by name or, on gs://, by a commit file, so copying a step
between kinds of stores misleads Orbax.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.message_terms import call
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.index import PROCESSES, processes_of
from ckpttools.formats.orbax.metadata import (
    CHECKPOINT_FILE,
    COMMIT_FILE,
    SHARDING_FILE,
    TREE_FILE,
    needs_index,
)
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import find_unfinished, read_unfinished

IN_PROGRESS = ".orbax-checkpoint-tmp"
"""Suffix of directories that Orbax is writing; old versions also append a time."""
FLAX_PREFIX = "checkpoint_"
"""Prefix of step numbers in the file names of `flax.training.checkpoints`."""
PRUNE_DIRECTORY = ".ckpttools-prune"
"""Directory in a run where `ckpttools.runs.journal` records what a prune is about to do."""
DELETING = "deleting"
"""Directory below `PRUNE_DIRECTORY` for incomplete steps; in a bucket, for files that name such steps."""
_TREE_HANDLERS = ("PyTree", "Standard")
# Common item names, from trainers and examples.
_COMMON_ITEMS = frozenset(
    (
        *("items", "default", "state", "train_state", "params", "model", "model_params", "weights", "pytree"),
        *("optimizer", "optimizer_state", "opt_state", "opt", "optim", "ema", "ema_params", "batch_stats"),
        *("metrics", "rng", "rngs", "rng_key", "data_iter", "iter", "step"),
    )
)
# Prefixes of step numbers, preferred when a directory has several prefixes.
_STEP_PREFIX = re.compile(r"(?:.*[-_.])?(?:steps?|checkpoints?|ckpt|iter|epoch|save)_", re.IGNORECASE)


def commits_by_file(location: Location) -> bool:
    """Return whether Orbax requires a commit file in directories here, which depends on the scheme."""
    return location.store.scheme == "gs"


def is_committed(directory: Location) -> bool:
    """Return whether Orbax considers a directory finished by its name or a file, ignoring its metadata."""
    if commits_by_file(directory):
        return (directory / COMMIT_FILE).is_file()
    return IN_PROGRESS not in directory.name


@dataclass(frozen=True)
class StepMetadata:
    """The `_CHECKPOINT_METADATA` of a step; empty if there is none, as in old versions.

    Attributes:
        fields: The fields of the document.
        fault: Why the document is invalid; None if it is valid.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    fault: CheckpointError | None = None

    @classmethod
    def at(cls, directory: Location) -> StepMetadata:
        """Read the metadata of a directory that has the file."""
        try:
            return cls(read_json(directory / CHECKPOINT_FILE))
        except CheckpointError as error:
            return cls(fault=error)

    @property
    def is_uncommitted(self) -> bool:
        """Whether the save of this metadata was never committed."""
        return self.fields.get("commit_timestamp_nsecs", 0) is None

    @property
    def handlers(self) -> object:
        """The handlers that saved the items: a mapping by name, or one for all."""
        return self.fields.get("item_handlers")

    @property
    def is_tree(self) -> bool:
        """Whether the step itself is declared as a pytree item."""
        return _is_of_trees(self.handlers)

    @property
    def trees(self) -> tuple[str, ...]:
        """Names of the pytree items."""
        named = self.handlers if isinstance(self.handlers, dict) else {}
        return tuple(name for name, handler in named.items() if _is_of_trees(handler))

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the items if none of them is a tree (such as metrics)."""
        named = self.handlers if isinstance(self.handlers, dict) and not self.trees else {}
        return tuple(sorted(named))


def _is_of_trees(handler: object) -> bool:
    return isinstance(handler, str) and any(kind in handler for kind in _TREE_HANDLERS)


@dataclass(frozen=True)
class OrbaxItem:
    """A pytree item on disk.

    Attributes:
        directory: The directory that contains `_METADATA`.
        step: The parent directory that is a step, or the item's own directory.
    """

    directory: Location
    step: Step

    @property
    def name(self) -> str | None:
        """Name of the item in its step; None if it is the step itself or not in a step."""
        if self.directory == self.step.path:
            return None
        is_listed = self.step.number is not None or self.directory.name in self.step.declared.trees
        return self.directory.name if is_listed else None


@dataclass(frozen=True)
class Step:
    """A directory viewed as a step. Properties are cached and raise errors of accessing the directory.

    Attributes:
        path: The path of the directory.
    """

    path: Location

    @cached_property
    def number(self) -> int | None:
        """The number in the name: `100`, `00100`, `step_100`, `100.orbax-checkpoint-tmp`."""
        digits = self._name.rpartition("_")[2]
        return int(digits) if digits.isascii() and digits.isdigit() else None

    @property
    def prefix(self) -> str:
        """The prefix of the number in the name."""
        return "".join(self._name.rpartition("_")[:2])

    @property
    def _name(self) -> str:
        return self.path.name.partition(IN_PROGRESS)[0]

    @property
    def is_in_progress(self) -> bool:
        return IN_PROGRESS in self.path.name

    @cached_property
    def is_one(self) -> bool:
        """Whether the directory is a step, finished or not."""
        return has_metadata(self.path) or bool(self.items) or self.is_being_deleted

    @cached_property
    def is_being_deleted(self) -> bool:
        """Whether a prune has started to delete the step from a bucket; on a disk, it is renamed first.

        A step that was saved again has its commit file, which a prune deletes first, or files that the marker
        does not list.
        """
        if self.path.store.streams is None or self.number is None:
            return False
        if (self.path / COMMIT_FILE).is_file():
            return False
        marker = self.path.parent / PRUNE_DIRECTORY / DELETING / self.path.name
        return marker.is_file() and not has_new_files(self.path, marker)

    @cached_property
    def items(self) -> tuple[OrbaxItem, ...]:
        """The items of the step; empty for a run, even if its steps are bare items."""
        if is_bare(self.path):
            return (OrbaxItem(self.path, self),)
        below = directories(self.path)
        # The children of a run are not opened, which may be 200 steps: a step that is a tree itself would
        # look like an item.
        if any(location.name.isdecimal() for location in below) and not has_metadata(self.path):
            below = [location for location in below if not location.name.isdecimal()]
        result = [location for location in below if is_item(location) and IN_PROGRESS not in location.name]
        result = [location for location in result if Step(location).number is None or not is_bare(location)]
        if len(result) > 1 and not self.is_declared and _are_independent(result):
            return ()
        return tuple(OrbaxItem(location, self) for location in result)

    @cached_property
    def is_declared(self) -> bool:
        """Whether its metadata, or a plain number as its name, marks a directory with items as a step."""
        is_number = self.number is not None and not self.prefix
        return is_number or self.is_in_progress or has_metadata(self.path)

    @cached_property
    def declared(self) -> StepMetadata:
        """The metadata of the step."""
        result = StepMetadata.at(self.path) if has_metadata(self.path) else StepMetadata()
        if isinstance(result.fault, StorageError):
            raise result.fault
        return result

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the items if none of them is a tree (such as metrics)."""
        return () if self.items else self.declared.others

    @cached_property
    def unfinished_reason(self) -> str | None:
        """Why the step is not a finished save; None if it is.

        Raises:
            StorageError: The step cannot be accessed, so its state is unknown.
        """
        item_names = {item.directory.name for item in self.items}
        if self.is_being_deleted:
            return ", ".join(self.faults(self.items))
        lost = [name for name in self.declared.trees if self.items and name not in item_names]
        reasons = [*self.faults(self.items), *(f"no {TREE_FILE} in {name}" for name in lost)]
        return ", ".join(reasons) or None

    def faults(self, items: Collection[OrbaxItem]) -> Iterator[str]:
        """Yield what a finished save has but this step lacks, as far as it concerns the given items."""
        if self.is_being_deleted:
            yield "a prune was interrupted while it deleted this step"
            return
        if self.is_in_progress:
            yield f"temporary name {self.path.name}"
        if not items:
            yield f"no tree, but {', '.join(self.others)}" if self.others else f"no {TREE_FILE}"
        for item in items:
            if _lacks_index(item.directory):
                yield f"no {MANIFEST} in {item.directory.name}"
        if self.declared.is_uncommitted:
            yield "commit timestamp null"
        if self.declared.fault:
            yield f"{CHECKPOINT_FILE}: {self.declared.fault.raw.message}"

    @cached_property
    def is_damaged(self) -> bool:
        """Whether a tree was saved completely, so that missing parts were lost later or not copied."""
        if self.is_being_deleted:
            return False
        locations = [self.path, *directories(self.path)]
        if any(IN_PROGRESS in location.name for location in locations):
            return False
        if self.declared.fault:
            # Orbax rewrites the file when the save ends, and for a moment it is empty.
            return (self.path / CHECKPOINT_FILE).stat().size > 0
        marked = (self.path / COMMIT_FILE).is_file()
        if self.declared.fields.get("commit_timestamp_nsecs", marked or None) is None:
            return False
        if self.declared.handlers:
            return self.declared.is_tree or bool(self.declared.trees)
        return any(is_left_of_item([entry.name for entry in location.entries()]) for location in locations)


def deletion_marker(step: Location) -> bytes:
    """Return the content of the marker for a step that is about to be deleted: a digest of each file.

    Raises:
        StorageError: The step cannot be listed.
    """
    return json.dumps(sorted(_file_digests(step))).encode()


def has_new_files(step: Location, marker: Location) -> bool:
    """Return whether a step has files written after its deletion began, because it was saved again.

    Args:
        step: The step that was marked for deletion.
        marker: The file with the content from `deletion_marker`, or an empty file from an earlier version.

    Raises:
        StorageError: The step or the marker cannot be read.
    """
    content = marker.read_bytes()
    if content:
        return not _file_digests(step) <= {*json.loads(content)}
    start_time = marker.stat().modified
    times = [result.modified for _, result in step.walk()] if step.is_dir() else []
    return start_time is not None and any(time is not None and time > start_time for time in times)


def _file_digests(step: Location) -> set[str]:
    """Return a digest of the name, size, version and time of each file of a step."""
    files = step.walk() if step.is_dir() else ()
    facts = ([name, result.size, result.version, result.modified] for name, result in files)
    return {
        hashlib.sha256(json.dumps(fact).encode(errors="surrogatepass")).hexdigest()[:32] for fact in facts
    }


@dataclass(frozen=True)
class OrbaxRun:
    """A directory that contains steps.

    Attributes:
        path: The parent directory of the steps.
    """

    path: Location

    @cached_property
    def steps(self) -> Mapping[int, Step]:
        """Directories that look like steps, finished or not, and have consistent names.

        Names that are plain numbers take precedence, because Orbax looks for a single prefix, by default
        none. Otherwise the most frequent prefix is used. Several unusual prefixes are taken for names of
        models.
        """
        named: dict[str, dict[int, Step]] = {}
        for step in sorted(map(Step, directories(self.path)), key=lambda step: not step.is_in_progress):
            if step.number is not None and step.is_one:
                named.setdefault(step.prefix, {})[step.number] = step
        if "" in named or len(named) == 1:
            numbered = named.get("") or next(iter(named.values()))
        else:
            usual = [steps for prefix, steps in named.items() if _STEP_PREFIX.fullmatch(prefix)]
            numbered = max(usual, key=len, default={})
        return dict(sorted(numbered.items()))


def orbax_at(path: Location) -> OrbaxItem | Step | OrbaxRun:
    """Classify a directory; one that Orbax did not write is returned as a run without steps.

    Raises:
        StorageError: The directory cannot be accessed.
    """
    if is_item(path):
        return OrbaxItem(path, step_of(path))
    step = Step(path)
    return step if step.is_one else _run(path)


def _run(path: Location) -> OrbaxRun:
    """Return the run at a path; MaxText stores its steps one level below."""
    run, below = OrbaxRun(path), OrbaxRun(path / "checkpoints")
    if not below.path.is_dir() or any(not step.prefix for step in run.steps.values()):
        return run
    # A backup next to `checkpoints` does not belong to the run.
    return below if below.steps or not run.steps else run


def step_of(item: Location) -> Step:
    """Return the step that contains an item or its remains; an unnamed item is its own step."""
    return Step(item if _is_own_step(item) else item.parent)


def is_item(path: Location) -> bool:
    return (path / TREE_FILE).is_file()


def is_left_of_item(names: Collection[str]) -> bool:
    """Return whether a directory with these entries is an item or the remains of one."""
    item_files = {TREE_FILE, SHARDING_FILE, MANIFEST}
    return not item_files.isdisjoint(names) or any(fnmatchcase(name, PROCESSES) for name in names)


def is_bare(path: Location) -> bool:
    """Return whether an item is its own step: `Checkpointer.save` puts both levels in one directory."""
    return is_item(path) and _is_own_step(path)


def _is_own_step(path: Location) -> bool:
    # Old versions wrote no metadata in the step, so only its name identifies it.
    return (has_metadata(path) or path.name.isdecimal()) and not has_metadata(path.parent)


def has_metadata(step: Location) -> bool:
    """Return whether a directory has step metadata."""
    return (step / CHECKPOINT_FILE).is_file()


def directories(path: Location) -> list[Location]:
    """Return the subdirectories by listing only, without accessing thousands of files next to them."""
    return path.directories() if path.is_dir() else []


def _are_independent(items: Collection[Location]) -> bool:
    """Return whether items in a directory without step metadata are separate checkpoints.

    Each item has its own metadata if `Checkpointer.save` wrote it. Old versions of Orbax wrote no metadata,
    not even in steps; names decide then.
    """
    usual = [item for item in items if item.name in _COMMON_ITEMS]
    return len(usual) < len(items) if all(map(has_metadata, items)) else not usual


def _lacks_index(item: Location) -> bool:
    """Return whether an item's metadata lists arrays in OCDBT although it has no index, merged or not."""
    if (item / MANIFEST).is_file() or processes_of(item):
        return False
    try:
        return needs_index(read_json(item / TREE_FILE))
    except CheckpointError:
        return False  # Opening the item reports more detail.


def unfinished_reason(step: Step, *, is_asked: bool = True) -> str | None:
    """Return why a step is not a finished save; None if it is, even without a tree (such as only metrics).

    Args:
        step: The step to check.
        is_asked: Whether to check for a conversion in progress in the step.

    Raises:
        StorageError: The step cannot be accessed.
    """
    if is_asked and (find_unfinished(step.path) or read_unfinished(step.path)):
        return "a conversion is being written to it"
    if step.is_being_deleted:
        return step.unfinished_reason
    # Orbax versions that do not record a commit time wrote this file last.
    declared = step.declared.fields.get("commit_timestamp_nsecs")
    if step.path.store.streams and declared is None and not (step.path / COMMIT_FILE).is_file():
        return f"no {COMMIT_FILE} and no commit time: it is unknown whether the save was completed"
    if step.others:
        faults = [fault for fault in step.faults(()) if not fault.startswith("no tree")]
        return ", ".join(faults) or None
    return step.unfinished_reason


@dataclass(frozen=True, slots=True)
class Remedy:
    """An action that makes Orbax skip a step.

    Attributes:
        words: Description of the action, in the imperative.
        command: The command for the action; None if the user must move the step away.
        fix: Name of the `ckpt doctor` fix for the action, or None.
    """

    words: str
    command: str | None = None
    fix: str | None = None


def remedy(step: Location, asked: Location, *, is_uncommitted: bool) -> Remedy:
    """Return an action that makes Orbax skip a step.

    Args:
        step: The step to skip.
        asked: Path to pass to `ckpt doctor`: the step, or a parent directory.
        is_uncommitted: Whether the save was never committed; `ckpt doctor` renames only uncommitted steps.
    """
    if commits_by_file(step):
        words = f"delete its {COMMIT_FILE}, so that Orbax skips it"
        return Remedy(words, step.store.removal((step / COMMIT_FILE).key))
    if is_uncommitted and isinstance(step.store, SupportsRename):
        command = call("doctor", asked, fix="set-aside")
        return Remedy("rename it, so that Orbax skips it", command, "set-aside")
    return Remedy(f"move {step} away, so that Orbax skips it")


def is_skipped(step: Location) -> bool:
    """Return whether loaders skip an uncommitted step, as Orbax does where it judges by names."""
    return not is_committed(step) or not (commits_by_file(step) or isinstance(step.store, SupportsRename))
