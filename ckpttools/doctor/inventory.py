"""What lies at a path: steps, items, weights and leftovers, recognised by content and not by name.

Everything below the path is listed once; arrays' own directories are left to the checks that count chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from typing import Any

from ckpttools.checks.base import ModelDirectory
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.doctor.probing import is_directory
from ckpttools.formats.base import COMPANIONS, ReadOptions, SupportsStepFiles, TellsPlace
from ckpttools.formats.interrupted import absent
from ckpttools.formats.json_file import json_object
from ckpttools.formats.orbax.entries import Entries, entries_of
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, TREE_FILE, needs_index
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    PRUNE_DIRECTORY,
    Step,
    StepMetadata,
    has_metadata,
    is_left_of_item,
    step_of,
)
from ckpttools.formats.registry import formats, open_tree
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.formats.zarr.chunks import ChunkTables, chunk_tables
from ckpttools.formats.zarr.zarr3 import DOCUMENT as ZARR3
from ckpttools.stores.fetching import Observe
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import unfinished_at
from ckpttools.stores.unanswered import kept_unless_unanswered

# What the fix set-aside appends.
SET_ASIDE = ".unfinished"
# Formats whose files are told apart here; others are asked themselves.
_OWN = ("orbax", "safetensors", "zarr3")
SAFETENSORS, INDEX = ".safetensors", ".safetensors.index.json"
# Deeper directories are not checkpoints; links may form cycles.
_DEEPEST = 12


@dataclass(frozen=True)
class Directory:
    """One directory that was listed.

    Attributes:
        path: of it.
        files, directories: names in it, sorted.
    """

    path: Place
    files: tuple[str, ...]
    directories: tuple[str, ...]


@dataclass(frozen=True)
class ListedItem:
    """A directory with the arrays of one pytree.

    Attributes:
        directory: the listed directory.
        step: the directory above that is its step, or its own.
        may_leave_out: whether chunks of only the fill value may be missing, whatever the metadata says.
        read: how large its index may be.
    """

    directory: Directory
    step: Place
    may_leave_out: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)

    @property
    def path(self) -> Place:
        return self.directory.path

    @property
    def processes(self) -> list[str]:
        """Directories written by single processes of a save."""
        return [place.name for place in processes_of(self.path)]

    @property
    def is_merged(self) -> bool:
        return MANIFEST in self.directory.files

    @property
    def is_part_of_a_host(self) -> bool:
        """Whether it is the part of one host, so that some chunks are elsewhere."""
        return is_part_of_a_host(self.path)

    @cached_property
    def is_unfinished(self) -> bool:
        """Whether its step says that it was never committed."""
        return StepMetadata.at(self.step).is_uncommitted

    @cached_property
    def metadata(self) -> Mapping[str, Any] | CheckpointError:
        """`_METADATA`, or what is wrong with it."""
        return json_or_error(self.path / TREE_FILE)

    def says(self, field: str) -> object:
        """A field of `_METADATA`, or None."""
        return None if isinstance(self.metadata, CheckpointError) else self.metadata.get(field)

    @property
    def needs_index(self) -> bool:
        """Whether `_METADATA` lists arrays that are in OCDBT."""
        return not isinstance(self.metadata, CheckpointError) and needs_index(self.metadata)

    @property
    def leaves_out(self) -> bool:
        """Whether missing chunks hold only the fill value."""
        return self.may_leave_out or self.says("store_array_data_equal_to_fill_value") is False

    @cached_property
    def database(self) -> Entries | CheckpointError:
        """All keys, or what is wrong with the index."""
        try:
            return entries_of(self.path, max_index_bytes=self.read.max_index_bytes)
        except CheckpointError as error:
            return kept_unless_unanswered(error, self.path)

    @cached_property
    def tables(self) -> ChunkTables | None:
        """The arrays; None without an index."""
        return None if isinstance(self.database, CheckpointError) else chunk_tables(self.database)


@dataclass(frozen=True)
class SafetensorsFiles:
    """Safetensors in one directory.

    Attributes:
        folder: where they are.
        files: names of the files to look at.
        indexes: names of the indexes to look at.
        is_whole: whether these are all files of the directory, rather than a single one that was named.
    """

    folder: Place
    files: tuple[str, ...]
    indexes: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True)
class Inventory:
    """What there is to look at.

    Attributes:
        path: what was asked about.
        directories: all that were listed, the path's own first.
        denied: places that could not be listed, with the reason.
        items: of Orbax; directories with a `_METADATA` or another file that only items have.
        steps: directories that hold items, or a `_CHECKPOINT_METADATA`.
        weights: directories with safetensors.
        hierarchies: plain zarr v3 roots.
        leftovers: directories of unfinished or replaced work.
        read: how to open what is there.
        others: name of another format -> places of that format.
        reading: what is told the bytes of data that are read, and that will be in all; None where none is.
    """

    path: Place
    directories: tuple[Directory, ...] = ()
    denied: Mapping[Place, CheckpointError] = field(default_factory=dict)
    items: tuple[ListedItem, ...] = ()
    steps: tuple[Directory, ...] = ()
    weights: tuple[SafetensorsFiles, ...] = ()
    hierarchies: tuple[Place, ...] = ()
    leftovers: tuple[Place, ...] = ()
    read: ReadOptions = field(default_factory=ReadOptions)
    others: Mapping[str, Sequence[Place]] = field(default_factory=dict)
    reading: Observe | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing here is a checkpoint, or the beginning of one."""
        found = (self.items, self.steps, self.weights, self.hierarchies, self.leftovers, self.denied)
        return not any((*found, *self.others.values()))

    @cached_property
    def models(self) -> tuple[ModelDirectory, ...]:
        """The model directories: those with a `config.json` or with safetensors, and those in checkpoints."""
        folders = {weights.folder for weights in self.weights if weights.is_whole}
        found = (each for each in self.directories if each.path in folders or CONFIG in each.files)
        return (*(_model(each, self.read) for each in found), *self._carried())

    def _carried(self) -> Iterator[ModelDirectory]:
        """The configuration and tokenizer that MaxText checkpoints and zarr hierarchies carry along."""
        listed = {each.path for each in self.directories}
        holders = [each for each in self.directories if COMPANIONS in each.directories]
        # Over a network each file is a request, and all steps of a run carry the same files.
        is_local = self.path.store.scheme == "file"
        for directory in holders if is_local else holders[-1:]:
            path = directory.path / COMPANIONS
            with suppress(CheckpointError):
                files = {each.name: path / each.name for each in path.entries() if each.is_file}
                if path not in listed and CONFIG in files:
                    yield ModelDirectory(str(path), files)

    def places(self, format: str) -> Sequence[Place]:
        """The files or directories that are of a format."""
        own = {
            "orbax": [item.path for item in self.items],
            "safetensors": [weights.folder / name for weights in self.weights for name in weights.files],
            "zarr3": self.hierarchies,
        }
        return own[format] if format in own else self.others.get(format, ())


def _model(directory: Directory, read: ReadOptions) -> ModelDirectory:
    """Return the model directory for the checks, without arrays if it cannot be opened."""
    tree = None
    with suppress(CheckpointError):
        tree = open_tree(directory.path, read)
    files = {name: directory.path / name for name in directory.files}
    return ModelDirectory(str(directory.path), files, tree)


def json_or_error(path: Place) -> Mapping[str, Any] | CheckpointError:
    """The JSON object in a file, or what is wrong with it."""
    hint = "fetch the file again, or restore it from another copy"
    try:
        return json_object(path.read_bytes(), str(path), FormatError, hint, make=None)
    except CheckpointError as error:
        return kept_unless_unanswered(error, path)


def inventory_of(path: Place, read: ReadOptions | None = None) -> Inventory:
    """The inventory of a path, which may be a file, or a directory at any level.

    Args:
        path: where.
        read: how to open what is there.

    Raises:
        StorageError: there is nothing at all.
    """
    # Parents matter, and "." has none.
    path = path.resolve() if path.name in ("", "..") else path
    if not path.lexists():
        raise absent(path)
    if not is_directory(path):
        return Inventory(
            path, weights=tuple(_one_file(path)), read=read or ReadOptions(), others=_others([path])
        )
    if unfinished_at(path):
        return Inventory(path, leftovers=(path,))
    walk = _Walk(read or ReadOptions())
    walk.visit(path, 0)
    return walk.inventory(path)


def _one_file(path: Place) -> Iterator[SafetensorsFiles]:
    if path.name.endswith(INDEX):
        names = tuple(sorted(each.name for each in path.parent.glob(f"*{SAFETENSORS}")))
        yield SafetensorsFiles(path.parent, names, (path.name,), is_whole=True)
    elif path.name.endswith(SAFETENSORS):
        yield SafetensorsFiles(path.parent, (path.name,), (), is_whole=False)


class _Walk:
    """A walk down that classifies directories."""

    def __init__(self, read: ReadOptions) -> None:
        self._read = read
        self._seen: set[object] = set()
        self._directories: dict[Place, Directory] = {}
        self._denied: dict[Place, CheckpointError] = {}
        self._items: list[Place] = []
        self._hierarchies: list[Place] = []
        self._leftovers: list[Place] = []

    def visit(self, path: Place, depth: int) -> None:
        directory = self._listed(path)
        if directory is None:
            return
        self._directories[path] = directory
        # The groups of a zarr hierarchy may have any name, also those of Orbax's files.
        is_hierarchy = ZARR3 in directory.files and TREE_FILE not in directory.files
        if not is_hierarchy and is_left_of_item((*directory.files, *directory.directories)):
            self._items.append(path)
            # Another save may have begun beside the arrays.
            unfinished = [name for name in directory.directories if IN_PROGRESS in name]
            self._leftovers += [path / name for name in unfinished]
        elif is_hierarchy:
            self._hierarchies.append(path)
        else:
            for name in directory.directories:
                self._step_into(path / name, depth)

    def _step_into(self, path: Place, depth: int) -> None:
        if (
            IN_PROGRESS in path.name
            or path.name == PRUNE_DIRECTORY
            or path.name.endswith(SET_ASIDE)
            or unfinished_at(path)
        ):
            self._leftovers.append(path)
        # The directory of the prune, which is a leftover, names it.
        elif depth < _DEEPEST and not Step(path).is_being_deleted:
            self.visit(path, depth + 1)

    def _listed(self, path: Place) -> Directory | None:
        """A directory's content; None if it was seen before or may not be listed."""
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

    def inventory(self, path: Place) -> Inventory:
        steps = {place: each for place, each in self._directories.items() if CHECKPOINT_FILE in each.files}
        items = []
        for place in self._items:
            step = step_of(place).path
            items.append(ListedItem(self._directories[place], step, read=self._read))
            if step not in self._directories and has_metadata(step):
                listed = self._listed(step)
                steps |= {step: listed} if listed else {}
        # An item's own copy of the metadata does not make it a step.
        inner = {item.path for item in items if item.step != item.path}
        return Inventory(
            path,
            tuple(self._directories.values()),
            self._denied,
            tuple(items),
            tuple(each for place, each in sorted(steps.items()) if place not in inner),
            tuple(_weights(each) for each in self._directories.values() if _has_weights(each)),
            tuple(self._hierarchies),
            tuple(self._leftovers),
            self._read,
            _others(place for place in self._directories if place not in {*inner, *self._hierarchies}),
        )


def _others(places: Iterable[Place]) -> dict[str, list[Place]]:
    """Places that formats recognise of which nothing is known here, each once."""
    found: dict[str, dict[Place, None]] = defaultdict(dict)
    others = [(name, format) for name, format in formats().items() if name not in _OWN]
    for place in places:
        for name, format in others:
            with suppress(CheckpointError):
                if format.why_not(place) is not None:
                    continue
                located = [place]
                if isinstance(format, SupportsStepFiles):
                    located = [*format.checkpoints_in(place)]
                elif isinstance(format, TellsPlace):
                    located = [format.lies_at(place)]
                if isinstance(format, TellsPlace):
                    # Below a checkpoint that was found, directories are its own.
                    located = [at for at in located if found[name].keys().isdisjoint(at.parents)]
                found[name] |= dict.fromkeys(located)
    return {name: [*each] for name, each in found.items()}


def _has_weights(directory: Directory) -> bool:
    return any(_is_ours(name) for name in directory.files)


def _is_ours(name: str) -> bool:
    # Hidden files belong to other programs: `._model.safetensors` to macOS.
    return name.endswith((SAFETENSORS, INDEX)) and not name.startswith(".")


def _weights(directory: Directory) -> SafetensorsFiles:
    ours = [name for name in directory.files if _is_ours(name)]
    files = tuple(name for name in ours if name.endswith(SAFETENSORS))
    return SafetensorsFiles(
        directory.path, files, tuple(name for name in ours if name.endswith(INDEX)), is_whole=True
    )
