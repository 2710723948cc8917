"""Zarr arrays below a directory or in an OCDBT database, without a file that describes their tree.

Levanter, T5X, Pax and plain tensorstore write such arrays. The tree is built from the keys, which are
directory names, split at dots. T5X and the first versions of Orbax store small arrays and the structure of
the tree in a file `checkpoint`, which Flax writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked
from ckpttools.array.storage import Storage
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError, list_with_count
from ckpttools.core.memory_limit import check_memory
from ckpttools.core.notes import Notes
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions
from ckpttools.formats.flax.format import has_state_header, open_state
from ckpttools.formats.flax.state import FlaxState
from ckpttools.formats.json_file import DEEPEST, json_object, read_json
from ckpttools.formats.orbax.arrays import Arrays, Grid
from ckpttools.formats.orbax.entries import Entries, Files, entries_of
from ckpttools.formats.orbax.metadata import (
    ARRAYS_DIRECTORY,
    CHECKPOINT_FILE,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
)
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.steps import IN_PROGRESS, Step
from ckpttools.formats.read_only import ReadOnlyFormat, left_out
from ckpttools.formats.sidecar_files import CONFIG, sidecar_config
from ckpttools.formats.zarr import zarr2, zarr3
from ckpttools.formats.zarr.chunks import DOCUMENTS, FollowedLinks, Way, has_array
from ckpttools.formats.zarr.legacy_runs import STATE, LegacyRun, has_state, legacy_items, legacy_run
from ckpttools.stores.base import DirEntry
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_METADATA = "metadata.json"
# Files in an Orbax item other than the tree's metadata, which must then be missing.
_ORBAX_FILES = frozenset((CHECKPOINT_FILE, SHARDING_FILE, STRINGS_FILE, ARRAYS_DIRECTORY, "descriptor"))
_STEP = re.compile(r"(?:(?:step|checkpoint|ckpt)[-_])?\d{1,18}", re.DOTALL)
# Chunks and directories of chunks; names with more digits are not chunk indices.
_CHUNK_KEY = re.compile(r"c|[0-9]{1,18}", re.DOTALL)
_CHUNK = re.compile(r"c|(?:c\.)?[0-9]{1,18}(?:\.[0-9]{1,18})*", re.DOTALL)
# Files in the root of a checkpoint, in any format.
_ROOT_FILES = frozenset((STATE, _METADATA, TREE_FILE, CHECKPOINT_FILE, MANIFEST, ".metadata", CONFIG))
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".distcp")
# Maximum number of directories that are checked for being separate checkpoints.
_MAX_COMPARED = 20
# Files that exist only in the root of a checkpoint.
_ROOT_ONLY_FILES = (TREE_FILE, CHECKPOINT_FILE, MANIFEST)


@dataclass(frozen=True)
class BareFormat(ReadOnlyFormat):
    """The `zarr-tree` format; implements `ckpttools.formats.base.Format`."""

    name: str = "zarr-tree"
    fault_summary: str = "zarr arrays without tree metadata that are missing or damaged"

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        chain = _single_child_chain(path)
        # The names of subdirectories may be array keys.
        names = chain[0].names.union(*(item.files for item in chain))
        if names & {TREE_FILE, *_ORBAX_FILES} or IN_PROGRESS in str(chain[-1].path):
            return "an Orbax checkpoint"
        if _find_legacy_run(chain[0]):
            return None
        if MANIFEST in chain[-1].names:
            root = chain[-1].path
            return None if has_state(root) or _is_nested(root) else "an Orbax checkpoint"
        if _only_item(chain[-1]):
            return None
        if any(_has_steps(item, may_be_keys=item.path != path) for item in chain):
            return f"several steps of a run in {chain[-1].path}"
        if (another := _find_other_checkpoint(chain[-1])) is not None:
            return f"several checkpoints below, such as {another}"
        return None if has_array(path) else "no zarr array in it"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        return _open_arrays(_locate_tree(path, options.step), options)

    def checkpoints_in(self, path: Location) -> Sequence[Location]:
        """See `ckpttools.formats.base.SupportsStepFiles.checkpoints_in`."""
        run = _find_legacy_run(_Folder.at(path))
        if run is None:
            return [_locate_tree(path)]
        return [item for step in run.finished for item in legacy_items(step)]

    def checkpoint_location(self, path: Location) -> Location:
        """See `SupportsLocation.checkpoint_location`. Steps store small arrays and their number in files."""
        return _locate_tree(path)

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        """See `ckpttools.formats.base.SupportsStorage.storage`."""
        from ckpttools.formats.survey import zarr_storage

        return zarr_storage(tree, options.max_index_bytes)


FORMAT = BareFormat()


@dataclass(frozen=True)
class _Folder:
    """A directory and its listing.

    Attributes:
        path: The directory.
        names: All names in it.
        below: Names of the subdirectories.
    """

    path: Location
    names: frozenset[str]
    below: tuple[str, ...]

    @classmethod
    def at(cls, path: Location) -> _Folder:
        entries = path.entries()
        names = frozenset(entry.name for entry in entries)
        return cls(path, names, tuple(entry.name for entry in entries if entry.is_dir))

    @property
    def files(self) -> frozenset[str]:
        """Names of the files in the directory."""
        return self.names.difference(self.below)


def _single_child_chain(path: Location) -> list[_Folder]:
    """Return a directory, its only subdirectory, and so on: a run, its only step, the step's only item."""
    chain = [_Folder.at(path)]
    ends = {*DOCUMENTS, MANIFEST, STATE, _METADATA}
    while len(chain[-1].below) == 1 and chain[-1].files.isdisjoint(ends) and len(chain) < DEEPEST:
        chain.append(_Folder.at(chain[-1].path / chain[-1].below[0]))
    return chain


def _find_legacy_run(folder: _Folder) -> LegacyRun | None:
    """Return the run of old Orbax steps in a directory; None for other directories.

    As in Orbax, other directories next to the steps are ignored.

    Raises:
        StorageError: A directory cannot be read.
    """
    if folder.files & {*DOCUMENTS, STATE, MANIFEST}:
        return None
    may_be_run = any(
        name == "checkpoints" or Step(folder.path / name).number is not None for name in folder.below
    )
    return legacy_run(folder.path) if may_be_run else None


def _has_arrays(folder: _Folder, own: Collection[Location]) -> bool:
    """Return whether directories other than `own` have arrays or the root of a checkpoint."""
    others = [location for name in folder.below if (location := folder.path / name) not in own]
    return any(has_array(location) or _find_root(location) for location in others[:_MAX_COMPARED])


def _only_item(step: _Folder) -> Location | None:
    """Return the item of an old Orbax step if no other directory in the step has arrays."""
    if step.files & {*DOCUMENTS, STATE, MANIFEST} or not 2 <= len(step.below) <= _MAX_COMPARED:
        return None
    below = [step.path / name for name in step.below]
    items = [location for location in below if has_state(location)]
    return items[0] if len(items) == 1 and not _has_arrays(step, items) else None


def _locate_tree(path: Location, step: int | None = None) -> Location:
    """Return the directory that has the arrays of a run, step or item, and the file that names them.

    Args:
        path: The run, step or item.
        step: The step of a run; by default, the latest finished step.
    """
    chain = _single_child_chain(path)
    last = chain[-1]
    if (run := _find_legacy_run(chain[0])) is not None:
        return _locate_tree(run.chosen(step))
    if (item := _only_item(last)) is not None:
        return item
    if MANIFEST in last.names or has_state(last.path) or _read_levanter_metadata(last.path):
        return last.path
    # A single number may be a key.
    steps = (entry.path for entry in chain[1:] if _STEP.fullmatch(entry.path.name))
    return next((step for step in steps if not step.name.isdecimal()), path)


def _has_steps(folder: _Folder, *, may_be_keys: bool) -> bool:
    """Return whether subdirectories are several steps; names that are just numbers may be keys of a tree."""
    steps = [name for name in folder.below if _STEP.fullmatch(name)]
    steps = [name for name in steps if not (may_be_keys and name.isdecimal())]
    return len(steps) > 1 and folder.names.isdisjoint(DOCUMENTS)


def _find_other_checkpoint(folder: _Folder) -> Location | None:
    """Return a checkpoint in a subdirectory, unless the subdirectories are parts of one checkpoint."""
    is_root = folder.names & {*DOCUMENTS, STATE, _METADATA}
    if len(folder.below) < 2 or is_root:
        return None
    result = (_find_root(folder.path / name) for name in folder.below[:_MAX_COMPARED])
    return next((root for root in result if root is not None), None)


def _find_root(path: Location) -> Location | None:
    """Return the directory with a file that only checkpoint roots have, following single children."""
    for item in _single_child_chain(path):
        if any(name in _ROOT_FILES or name.endswith(_WEIGHTS) for name in item.files):
            return item.path
    return None


def _is_nested(path: Location) -> bool:
    """Return whether names in a database contain slashes; in Orbax's, without tree metadata, they do not."""
    try:
        return any("/" in name for name in _array_names(entries_of(path)))
    except StorageError:
        raise  # The store did not respond.
    except CheckpointError:
        return False


def _open_arrays(path: Location, options: ReadOptions) -> Tree:
    entries = entries_of(path, max_index_bytes=options.max_index_bytes)
    names = sorted(_array_names(entries))
    check_memory(len(names), 0, path)
    arrays = _BareArrays(path, entries)
    result = dict(zip(names, map_concurrently(path.store, arrays.array, names), strict=True))
    state = open_state(path / STATE) if has_state(path) else None
    leaves = _insert_arrays(state, result, path) if state else _build_tree(result)
    others = left_out(state.others) if state else Notes()
    step = _read_levanter_metadata(path).get("step")
    if state and step is None:
        step = Step(path).number if Step(path).number is not None else Step(path.parent).number
    return Tree(
        leaves,
        Metadata(
            FORMAT.name,
            step=step if type(step) is int and step >= 0 else None,
            config=sidecar_config(path),
            scalars=frozenset(state.scalars) if state else frozenset(),
            location=str(path),
            notes=others + Notes(remarks=tuple(arrays.remarks())),
        ),
    )


def _read_levanter_metadata(path: Location) -> Mapping[str, Any]:
    """Read Levanter's metadata next to the arrays, such as the step."""
    location = path / _METADATA
    if not location.is_file():
        return {}
    try:
        return read_json(location)
    except StorageError:
        raise
    except CheckpointError:
        return {}  # A file of another program.


def _array_names(entries: Entries) -> Iterator[str]:
    """Yield the names of all arrays with keys joined by "/"; "" is an array in the directory itself."""
    if isinstance(entries, Files):
        yield from _names_below(entries.directory, "", FollowedLinks())
        return
    for key in entries.all:
        name, _, document = key.rpartition("/")
        if document == zarr2.DOCUMENT or (document == zarr3.DOCUMENT and _is_array(entries, key)):
            yield name


def _names_below(
    folder: Location, name: str, links: FollowedLinks, depth: int = 0, followed: Way = ()
) -> Iterator[str]:
    """Yield the names of the arrays in a directory, following links."""
    if depth > DEEPEST:
        raise FormatError(
            "directories are nested too deep", location=folder, expected=f"at most {DEEPEST} levels"
        )
    entries = folder.entries()
    _refuse_unfinished(folder, entries)
    if depth:
        _refuse_another(folder, entries)
    documents = {entry.name for entry in entries} & {*DOCUMENTS}
    is_array = zarr2.DOCUMENT in documents or (
        zarr3.DOCUMENT in documents
        and _describes_array(read_json(folder / zarr3.DOCUMENT), folder / zarr3.DOCUMENT)
    )
    if is_array:
        yield name
    else:
        _refuse_chunks(folder, [entry.name for entry in entries if not entry.is_dir])
    for entry in entries:
        if entry.is_dir and not (is_array and _CHUNK_KEY.fullmatch(entry.name)):
            further = links.into(folder, entry, followed)
            inner = f"{name}/{entry.name}" if name else entry.name
            yield from _names_below(folder / entry.name, inner, links, depth + 1, further)


def _refuse_another(folder: Location, entries: Sequence[DirEntry]) -> None:
    """Raise FormatError if a directory below the root is a separate checkpoint.

    Its arrays would look like a part of the outer tree, and its other files would be ignored.
    """
    files = {entry.name for entry in entries if not entry.is_dir}
    result = next((name for name in _ROOT_ONLY_FILES if name in files), None)
    if result is None and STATE in files and has_state_header(folder / STATE):
        result = STATE
    if result is not None:
        raise FormatError(
            "a directory below is a checkpoint of its own",
            location=folder,
            got=f"a file {result}",
            expected="only arrays below",
            hint=f"open it by its own path: {quote(str(folder))}",
        )


def _refuse_unfinished(folder: Location, entries: Sequence[DirEntry]) -> None:
    """Raise FormatError if a directory contains an unfinished Orbax save."""
    unfinished = next((entry.name for entry in entries if entry.is_dir and IN_PROGRESS in entry.name), None)
    if unfinished is not None:
        raise FormatError(
            "a directory below is an unfinished save",
            location=folder / unfinished,
            expected="only arrays below",
            hint="open a finished save by its own path",
        )


def _refuse_chunks(folder: Location, files: Sequence[str]) -> None:
    """Raise FormatError if a directory has chunks but no array metadata."""
    chunk = next(filter(_CHUNK.fullmatch, files), None)
    if chunk is not None:
        raise FormatError(
            "chunks of an array are here without its metadata",
            location=folder,
            got=f"a file {chunk}",
            expected=f"{zarr2.DOCUMENT} or {zarr3.DOCUMENT} next to them or in a parent directory",
            hint="copy it again, with the files whose names start with a dot",
        )


def _describes_array(document: Mapping[str, Any], location: object) -> bool:
    """Return whether a `zarr.json` is an array's; raise FormatError if it is not a group's either."""
    node = document.get("node_type")
    if node in ("array", "group"):
        return bool(node == "array")
    raise FormatError(
        "not the metadata of a zarr v3 node",
        location=location,
        got=f"node_type {node!r}",
        expected="array or group",
    )


def _is_array(entries: Entries, key: str) -> bool:
    return _describes_array(_document(entries, key), f"{entries.directory}: {key}")


def _document(entries: Entries, key: str) -> Mapping[str, Any]:
    """Return the object under a key, or an empty mapping.

    Raises:
        FormatError: The value is not a JSON object.
    """
    entry = entries.get(key)
    if entry is None:
        return {}
    location = f"{entries.directory}: {key}"
    return json_object(entries.read(entry), location, FormatError, "copy the checkpoint again", None)


class _BareArrays:
    """The arrays of a directory; an array may lack chunks if its metadata set a fill value."""

    def __init__(self, path: Location, entries: Entries) -> None:
        self._entries = entries
        self._all = Arrays(path, entries, None, may_be_left_out=False)
        self._some = replace(self._all, may_be_left_out=True)
        self._sparse: list[str] = []

    def array(self, name: str) -> LazyArray:
        at: Path = (name,) if name else ()
        array = self._all.array(at)
        if not isinstance(array, Chunked) or not (array.gaps or _has_shards(array)) or not self._fills(name):
            return array
        if array.gaps:
            self._sparse.append(name)
        return self._some.array(at)

    def _fills(self, name: str) -> bool:
        """Return whether tensorstore omits chunks of the fill value, as it does if one is set."""
        below = f"{name}/" if name else ""
        documents = (_document(self._entries, below + document) for document in DOCUMENTS)
        return next((document for document in documents if document), {}).get("fill_value") is not None

    def remarks(self) -> Iterator[str]:
        if self._sparse:
            count = len(self._sparse)
            yield (
                f"chunks of {count:,} array{'s' if count > 1 else ''} are missing, such as of "
                f"{min(self._sparse)}: they are read as the fill value, which is not stored"
            )


def _has_shards(array: Chunked) -> bool:
    """Return whether chunks are shards, whose own indexes show which pieces are omitted."""
    return isinstance(array.part, Grid) and array.part.document.shard is not None


def _build_tree(arrays: Mapping[str, LazyArray]) -> dict[Path, Leaf]:
    """Build the tree from keys; names whose dots are ambiguous are not split."""
    cut = {name: tuple(name.replace("/", ".").split(".")) if name else () for name in arrays}
    inner = {keys[:depth] for keys in cut.values() for depth in range(len(keys))}
    is_tree = len({*cut.values()}) == len(cut) and inner.isdisjoint(cut.values())
    paths: Mapping[str, Path] = cut if is_tree else {name: tuple(name.split("/")) for name in arrays}
    return {paths[name]: array for name, array in arrays.items()}


def _insert_arrays(state: FlaxState, arrays: Mapping[str, LazyArray], path: Location) -> dict[Path, Leaf]:
    """Insert arrays into the tree of a file `checkpoint`, which names them."""
    missing = sorted({*state.elsewhere.values()} - {*arrays})
    unnamed = sorted({*arrays} - {*state.elsewhere.values()})
    if missing or unnamed:
        raise FormatError(
            f"arrays and the file {STATE} are not of one checkpoint:"
            + list_with_count("named there, but missing here", missing)
            + list_with_count("here, but not named there", unnamed),
            location=path,
            expected=f"the arrays that {STATE} names",
            hint="copy the checkpoint again",
        )
    return {**state.leaves, **{at: arrays[name] for at, name in state.elsewhere.items()}}
