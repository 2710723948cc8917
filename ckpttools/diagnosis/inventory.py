"""Inventory of a path: steps, items, weights and leftovers, recognized by content instead of name.

Everything below the path is listed once, except directories of arrays, which the checks of chunks list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.checks.base import ModelDirectory
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.diagnosis.safe_files import is_directory
from ckpttools.formats.base import SIDECARS, ReadOptions, SupportsLocation, SupportsStepFiles
from ckpttools.formats.detect import LocationKind, find_leftover
from ckpttools.formats.interrupted import absent
from ckpttools.formats.json_file import json_object
from ckpttools.formats.known_formats import formats
from ckpttools.formats.orbax.entries import Entries, entries_of
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, TREE_FILE, needs_index
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    Step,
    StepMetadata,
    has_metadata,
    is_left_of_item,
    step_of,
)
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.formats.zarr.chunks import DOCUMENTS, ChunkTables, chunk_tables
from ckpttools.formats.zarr.legacy_runs import STATE, LegacyRun, legacy_run_in
from ckpttools.formats.zarr.zarr3 import DOCUMENT as ZARR3
from ckpttools.stores.fetching import Observe, observe_bytes
from ckpttools.stores.location import Location, require_file_error, suppress_file_errors

# Formats whose files this module classifies. Other formats do so themselves.
_KNOWN_FORMATS = ("orbax", "safetensors", "zarr3")
SAFETENSORS, INDEX = ".safetensors", ".safetensors.index.json"
# Deeper directories are not checkpoints, and links may form cycles.
_MAX_DEPTH = 12


@dataclass(frozen=True)
class Directory:
    """A listed directory.

    Attributes:
        path: Path of the directory.
        files, directories: Sorted names of its entries.
    """

    path: Location
    files: tuple[str, ...]
    directories: tuple[str, ...]


@dataclass(frozen=True)
class ListedItem:
    """A directory with the arrays of one pytree.

    Attributes:
        directory: The listed directory.
        step: Directory of the step, which is the item's own directory or the one above.
        may_leave_out: Whether chunks with only the fill value may be missing, regardless of the metadata.
        read: Limits for opening the index.
    """

    directory: Directory
    step: Location
    may_omit_chunks: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)

    @property
    def path(self) -> Location:
        return self.directory.path

    @property
    def processes(self) -> list[str]:
        """Directories that single processes of a save wrote."""
        return [location.name for location in processes_of(self.path)]

    @property
    def is_merged(self) -> bool:
        return MANIFEST in self.directory.files

    @property
    def is_part_of_a_host(self) -> bool:
        """Whether the item is one host's part of a checkpoint, so that some chunks are elsewhere."""
        return is_part_of_a_host(self.path)

    @cached_property
    def is_unfinished(self) -> bool:
        """Whether the metadata of the step shows that it was never committed."""
        return StepMetadata.at(self.step).is_uncommitted

    @cached_property
    def metadata(self) -> Mapping[str, Any] | CheckpointError:
        """Content of `_METADATA`, or the error of reading it."""
        return json_or_error(self.path / TREE_FILE)

    def says(self, field: str) -> object:
        """Return a field of `_METADATA`, or None."""
        return None if isinstance(self.metadata, CheckpointError) else self.metadata.get(field)

    @property
    def needs_index(self) -> bool:
        """Whether `_METADATA` lists arrays that are stored in OCDBT."""
        return not isinstance(self.metadata, CheckpointError) and needs_index(self.metadata)

    @property
    def leaves_out(self) -> bool:
        """Whether missing chunks contain only the fill value."""
        return self.may_omit_chunks or self.says("store_array_data_equal_to_fill_value") is False

    @cached_property
    def database(self) -> Entries | CheckpointError:
        """All keys, or the error of reading the index."""
        try:
            return entries_of(self.path, max_index_bytes=self.read.max_index_bytes)
        except CheckpointError as error:
            return require_file_error(error, self.path)

    @cached_property
    def tables(self) -> ChunkTables | None:
        """The arrays; None without an index."""
        return None if isinstance(self.database, CheckpointError) else chunk_tables(self.database)


@dataclass(frozen=True)
class SafetensorsFiles:
    """Safetensors in one directory.

    Attributes:
        folder: The directory.
        files: Names of the files to examine.
        indexes: Names of the indexes to examine.
        is_whole: Whether these are all files of the directory, and not a single file that the user named.
    """

    folder: Location
    files: tuple[str, ...]
    indexes: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ValueReading:
    """Settings for reading the values of all arrays.

    Attributes:
        memory: Maximum resident bytes.
        jobs: Number of workers; None to choose a suitable number.
        observe: Called with the bytes of a checkpoint read so far and the total.
    """

    memory: int
    jobs: int | None
    observe: Observe

    def observer(self, tree: Tree) -> Callable[[int], None]:
        """Return the function to call with the bytes of each piece of a tree."""
        return observe_bytes(self.observe, sum(array.nbytes for array in tree.arrays.values()))


@dataclass(frozen=True)
class Inventory:
    """The checkpoint files at and below a path.

    Attributes:
        path: The examined path.
        directories: All listed directories, starting with the path itself.
        denied: Locations that could not be listed, with the reason.
        items: Items of Orbax: directories with `_METADATA` or another file that only items have.
        steps: Directories with items, or with `_CHECKPOINT_METADATA`.
        weights: Directories with safetensors.
        hierarchies: Plain zarr v3 roots.
        leftovers: Directories of unfinished or replaced work.
        read: How to open the checkpoints.
        others: Locations of other formats, by format name.
        reading: Called with the bytes of data read so far and the total; None to read no data.
        values: How to read values; None to read no values.
    """

    path: Location
    directories: tuple[Directory, ...] = ()
    denied: Mapping[Location, CheckpointError] = field(default_factory=dict)
    items: tuple[ListedItem, ...] = ()
    steps: tuple[Directory, ...] = ()
    weights: tuple[SafetensorsFiles, ...] = ()
    hierarchies: tuple[Location, ...] = ()
    leftovers: tuple[Location, ...] = ()
    read: ReadOptions = field(default_factory=ReadOptions)
    others: Mapping[str, Sequence[Location]] = field(default_factory=dict)
    reading: Observe | None = None
    values: ValueReading | None = None

    @property
    def checkpoints(self) -> Iterator[Location]:
        """The checkpoints that can be opened: finished items, weights, and other formats."""
        # The check of unfinished steps reports uncommitted saves, which are not errors in some stores.
        yield from (item.path for item in self.items if not item.is_unfinished)
        yield from (item.folder if item.is_whole else item.folder / item.files[0] for item in self.weights)
        yield from self.locations("zarr3")
        for locations in self.others.values():
            yield from locations

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a checkpoint nor an unfinished one."""
        result = (self.items, self.steps, self.weights, self.hierarchies, self.leftovers, self.denied)
        return not any((*result, *self.others.values()))

    @cached_property
    def models(self) -> tuple[ModelDirectory, ...]:
        """The model directories: those with a `config.json` or with safetensors, and those in checkpoints."""
        folders = {weights.folder for weights in self.weights if weights.is_whole}
        result = (
            directory
            for directory in self.directories
            if directory.path in folders or CONFIG in directory.files
        )
        return (*(_model(item, self.read) for item in result), *self._carried_models())

    def _carried_models(self) -> Iterator[ModelDirectory]:
        """Yield models whose configuration and tokenizer a MaxText checkpoint or a zarr hierarchy carries."""
        paths = {item.path for item in self.directories}
        holders = [item for item in self.directories if SIDECARS in item.directories]
        # Over a network, each file takes a request, and all steps of a run have the same files.
        is_local = self.path.store.scheme == "file"
        for directory in holders if is_local else holders[-1:]:
            path = directory.path / SIDECARS
            with suppress(CheckpointError):
                files = {entry.name: path / entry.name for entry in path.entries() if entry.is_file}
                if path not in paths and CONFIG in files:
                    yield ModelDirectory(str(path), files, is_examined=True)

    @cached_property
    def legacy_runs(self) -> tuple[LegacyRun, ...]:
        """The runs with legacy steps (without `_METADATA`), including the run of a step or an item."""
        known = {step.path for step in self.steps} | {item.step for item in self.items}
        below = [entry for entry in self.directories if not {*DOCUMENTS, STATE}.intersection(entry.files)]
        candidates = [entry.path / name for entry in below for name in entry.directories]
        candidates += [self.path, self.path.parent]
        above = dict.fromkeys(step.parent for step in candidates if Step(step).number is not None)
        result = []
        for directory in above:
            with suppress_file_errors(directory):
                result.append(legacy_run_in(directory, [step for step in known if step.parent == directory]))
        return tuple(run for run in result if run is not None)

    def locations(self, format: str) -> Sequence[Location]:
        """Return the files or directories in a format."""
        own = {
            "orbax": [item.path for item in self.items],
            "safetensors": [weights.folder / name for weights in self.weights for name in weights.files],
            "zarr3": self.hierarchies,
        }
        return own[format] if format in own else self.others.get(format, ())


def _model(directory: Directory, read: ReadOptions) -> ModelDirectory:
    """Return the model directory for the checks, without arrays if they cannot be opened."""
    tree = None
    with suppress(CheckpointError):
        tree = open_tree(directory.path, read)
    files = {name: directory.path / name for name in directory.files}
    return ModelDirectory(str(directory.path), files, tree, is_examined=True)


def json_or_error(path: Location) -> Mapping[str, Any] | CheckpointError:
    """Return the JSON object in a file, or the error of reading it."""
    hint = "fetch the file again, or restore it from another copy"
    try:
        return json_object(path.read_bytes(), str(path), FormatError, hint, make=None)
    except CheckpointError as error:
        return require_file_error(error, path)


def inventory_of(path: Location, read: ReadOptions | None = None) -> Inventory:
    """Return the inventory of a path, which may be a file, or a directory at any level.

    Args:
        path: The path to examine.
        read: How to open the checkpoints.

    Raises:
        StorageError: The path does not exist.
    """
    # Parent directories matter, and "." has none.
    path = path.resolve() if path.name in ("", "..") else path
    if not path.lexists():
        raise absent(path)
    if not is_directory(path):
        return Inventory(
            path,
            weights=tuple(_one_file(path)),
            read=read or ReadOptions(),
            others=_unlisted_checkpoints([path]),
        )
    if find_leftover(path) is LocationKind.INTERRUPTED:
        return Inventory(path, leftovers=(path,))
    walk = _Walk(read or ReadOptions())
    walk.visit(path, 0)
    return walk.inventory(path)


def _one_file(path: Location) -> Iterator[SafetensorsFiles]:
    if path.name.endswith(INDEX):
        names = tuple(sorted(item.name for item in path.parent.glob(f"*{SAFETENSORS}")))
        yield SafetensorsFiles(path.parent, names, (path.name,), is_whole=True)
    elif path.name.endswith(SAFETENSORS):
        yield SafetensorsFiles(path.parent, (path.name,), (), is_whole=False)


class _Walk:
    """A walk down the directories that classifies them."""

    def __init__(self, read: ReadOptions) -> None:
        self._read = read
        self._seen: set[object] = set()
        self._directories: dict[Location, Directory] = {}
        self._denied: dict[Location, CheckpointError] = {}
        self._items: list[Location] = []
        self._hierarchies: list[Location] = []
        self._leftovers: list[Location] = []

    def visit(self, path: Location, depth: int) -> None:
        directory = self._list_directory(path)
        if directory is None:
            return
        self._directories[path] = directory
        # The groups of a zarr hierarchy may have any name, even those of Orbax's files.
        is_hierarchy = ZARR3 in directory.files and TREE_FILE not in directory.files
        if not is_hierarchy and is_left_of_item((*directory.files, *directory.directories)):
            self._items.append(path)
            # Another save may have been started next to the arrays.
            unfinished = [name for name in directory.directories if IN_PROGRESS in name]
            self._leftovers += [path / name for name in unfinished]
        elif is_hierarchy:
            self._hierarchies.append(path)
        else:
            for name in directory.directories:
                self._step_into(path / name, depth)

    def _step_into(self, path: Location, depth: int) -> None:
        if find_leftover(path) is not None:
            self._leftovers.append(path)
        # The directory of an interrupted prune is a leftover, and its finding already names this step.
        elif depth < _MAX_DEPTH and not Step(path).is_being_deleted:
            self.visit(path, depth + 1)

    def _list_directory(self, path: Location) -> Directory | None:
        """Return a directory's content; None if it was already visited or cannot be listed."""
        try:
            identity = path.stat().identity or path
            if identity in self._seen:
                return None
            self._seen.add(identity)
            entries = path.entries()
        except StorageError as error:
            self._denied[path] = error
            return None
        files = tuple(entry.name for entry in entries if not entry.is_dir)
        return Directory(path, files, tuple(entry.name for entry in entries if entry.is_dir))

    def inventory(self, path: Location) -> Inventory:
        steps = {
            location: entry for location, entry in self._directories.items() if CHECKPOINT_FILE in entry.files
        }
        items = []
        for location in self._items:
            step = step_of(location).path
            items.append(ListedItem(self._directories[location], step, read=self._read))
            if step not in self._directories and has_metadata(step):
                listed_step = self._list_directory(step)
                steps |= {step: listed_step} if listed_step else {}
        # An item's own copy of the metadata does not make the item a step.
        inner = {item.path for item in items if item.step != item.path}
        return Inventory(
            path,
            tuple(self._directories.values()),
            self._denied,
            tuple(items),
            tuple(entry for location, entry in sorted(steps.items()) if location not in inner),
            tuple(_weights(directory) for directory in self._directories.values() if _has_weights(directory)),
            tuple(self._hierarchies),
            tuple(self._leftovers),
            self._read,
            _unlisted_checkpoints(
                location for location in self._directories if location not in {*inner, *self._hierarchies}
            ),
        )


def _unlisted_checkpoints(locations: Iterable[Location]) -> dict[str, list[Location]]:
    """Return the locations, without duplicates, that formats recognize and the inventory does not contain."""
    result: dict[str, dict[Location, None]] = defaultdict(dict)
    others = [(name, format) for name, format in formats().items() if name not in _KNOWN_FORMATS]
    for location in locations:
        for name, format in others:
            with suppress(CheckpointError):
                if format.mismatch_reason(location) is not None:
                    continue
                located = [location]
                if isinstance(format, SupportsStepFiles):
                    located = [*format.checkpoints_in(location)]
                elif isinstance(format, SupportsLocation):
                    located = [format.checkpoint_location(location)]
                if isinstance(format, SupportsLocation):
                    # Directories below a recognized checkpoint belong to it.
                    located = [at for at in located if result[name].keys().isdisjoint(at.parents)]
                result[name] |= dict.fromkeys(located)
    return {name: [*item] for name, item in result.items()}


def _has_weights(directory: Directory) -> bool:
    return any(_is_ours(name) for name in directory.files)


def _is_ours(name: str) -> bool:
    # Hidden files belong to other programs, such as `._model.safetensors` to macOS.
    return name.endswith((SAFETENSORS, INDEX)) and not name.startswith(".")


def _weights(directory: Directory) -> SafetensorsFiles:
    weight_files = [name for name in directory.files if _is_ours(name)]
    files = tuple(name for name in weight_files if name.endswith(SAFETENSORS))
    return SafetensorsFiles(
        directory.path, files, tuple(name for name in weight_files if name.endswith(INDEX)), is_whole=True
    )
