"""Arrays of zarr below a directory, or in an OCDBT database, where no file says of what tree they are.

Levanter, T5X, Pax and whoever saves with tensorstore alone leave these. The tree is made from the keys: names
of directories, cut at dots. T5X and the first versions of Orbax keep small arrays, and which tree it is, in a
file `checkpoint` that Flax wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked
from ckpttools.array.storage import Storage
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.core.budget import require_room
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError, counted_listing
from ckpttools.core.notes import Notes
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.flax.format import begins_as_state, opened_state
from ckpttools.formats.flax.state import FlaxState
from ckpttools.formats.json_file import DEEPEST, json_object, read_json
from ckpttools.formats.left_out import left_out
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
from ckpttools.formats.orbax.steps import IN_PROGRESS
from ckpttools.formats.read_only import ReadOnlyFormat
from ckpttools.formats.sidecar_files import CONFIG, sidecar_config
from ckpttools.formats.zarr import zarr2, zarr3
from ckpttools.formats.zarr.chunks import DOCUMENTS
from ckpttools.formats.zarr.links import FollowedLinks, Way
from ckpttools.stores.at_once import at_once
from ckpttools.stores.place import Place

_STATE, _METADATA = "checkpoint", "metadata.json"
# What lies in an item of Orbax beside the metadata of its tree, which are then what is missing.
_OF_ORBAX = frozenset((CHECKPOINT_FILE, SHARDING_FILE, STRINGS_FILE, ARRAYS_DIRECTORY, "descriptor"))
_STEP = re.compile(r"(?:(?:step|checkpoint|ckpt)[-_])?\d{1,18}", re.DOTALL)
# Directories that chunks lie in, and chunks themselves; names of numbers with more digits are no places.
_OF_CHUNKS = re.compile(r"c|[0-9]{1,18}", re.DOTALL)
_CHUNK = re.compile(r"c|(?:c\.)?[0-9]{1,18}(?:\.[0-9]{1,18})*", re.DOTALL)
# What lies at the root of a checkpoint, of whichever format.
_OF_A_ROOT = frozenset((_STATE, _METADATA, TREE_FILE, CHECKPOINT_FILE, MANIFEST, ".metadata", CONFIG))
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".distcp")
# Directories whose files are looked at to tell whether each is a checkpoint of its own.
_MOST_COMPARED = 20
# Directories that are looked into to tell whether there is an array in any of them.
_MOST_TRIED = 100


@dataclass(frozen=True)
class BareFormat(ReadOnlyFormat):
    """The `zarr-tree` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "zarr-tree"
    looks_for: str = "arrays of zarr without the metadata of a tree, some of which are missing or damaged"

    def why_not(self, path: Place) -> str | None:
        if not path.is_dir():
            return "not a directory"
        entries = path.entries()
        names = {each.name for each in entries}
        if TREE_FILE in names or names & _OF_ORBAX or IN_PROGRESS in str(path):
            return "a save of Orbax"
        if MANIFEST in names:
            return None if _is_nested(path) else "a save of Orbax"
        below = [each.name for each in entries if each.is_dir]
        steps = [name for name in below if _STEP.fullmatch(name)]
        if len(steps) > 1 and not names & {*DOCUMENTS}:
            return "several steps of a run"
        if len(below) > 1 and not names & {*DOCUMENTS, _STATE, _METADATA} and _are_apart(path, below):
            return "several checkpoints below"
        return None if _has_array(path) else "no array of zarr in it"

    def open(self, path: Place, options: ReadOptions) -> Tree:
        return _opened(self.lies_at(path), options)

    def lies_at(self, path: Place) -> Place:
        """As `ckpttools.formats.base.TellsPlace.lies_at`: a step has small arrays and its number in files."""
        entries = path.entries()
        below = [each.name for each in entries if each.is_dir]
        names = {each.name for each in entries}
        if len(below) != 1 or names & {*DOCUMENTS, MANIFEST, _STATE, _METADATA}:
            return path
        step = path / below[0]
        # A number alone may be a key.
        is_step = _STEP.fullmatch(step.name) and not step.name.isdecimal()
        return step if is_step or _has_state(step) or _said(step) else path

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        """As `ckpttools.formats.base.TellsStorage.storage`."""
        from ckpttools.formats.survey import zarr_storage

        return zarr_storage(tree, options.max_index_bytes)


FORMAT = BareFormat()


def _is_nested(path: Place) -> bool:
    """Whether names in a database have slashes: those of Orbax have none, and lack the metadata of a tree."""
    try:
        return any("/" in name for name in _names(entries_of(path)))
    except StorageError:
        raise  # nobody has told what is there
    except CheckpointError:
        return False


def _are_apart(path: Place, below: Sequence[str]) -> bool:
    """Whether what lies in one of a directory's directories is a checkpoint, and no part of a larger one."""
    return any(_is_one(path / name) for name in below[:_MOST_COMPARED])


def _is_one(folder: Place) -> bool:
    """Whether a directory, or the only one in it, has a file that lies at the root of a checkpoint."""
    entries = folder.entries()
    while len(entries) == 1 and entries[0].is_dir:
        folder /= entries[0].name
        entries = folder.entries()
    names = {each.name for each in entries if not each.is_dir}
    return bool(names & _OF_A_ROOT) or any(name.endswith(_WEIGHTS) for name in names)


def _has_array(path: Place) -> bool:
    """Whether there is an array in one of the first directories, those in the first one first."""
    rest, tried = [path], 0
    while rest and tried < _MOST_TRIED:
        folder, tried = rest.pop(), tried + 1
        entries = folder.entries()
        if any(each.name in DOCUMENTS for each in entries):
            return True
        rest += [folder / each.name for each in reversed(entries) if each.is_dir]
    return False


def _opened(path: Place, options: ReadOptions) -> Tree:
    entries = entries_of(path, None, options.max_index_bytes)
    names = sorted(_names(entries))
    require_room(len(names), 0, path)
    arrays = _BareArrays(path, entries)
    found = dict(zip(names, at_once(path.store, arrays.array, names), strict=True))
    state = opened_state(path / _STATE) if _has_state(path) else None
    leaves = _put_in(state, found, path) if state else _by_key(found)
    others = left_out(state.others) if state else Notes()
    said = _said(path)
    step = said.get("step")
    return Tree(
        leaves,
        Metadata(
            FORMAT.name,
            step=step if type(step) is int and step >= 0 else None,
            config=sidecar_config(path),
            scalars=frozenset(state.scalars) if state else frozenset(),
            place=str(path),
            notes=others + Notes(remarks=tuple(arrays.remarks())),
        ),
    )


def _said(path: Place) -> Mapping[str, Any]:
    """What Levanter notes beside the arrays, such as the step."""
    place = path / _METADATA
    if not place.is_file():
        return {}
    try:
        return read_json(place)
    except StorageError:
        raise
    except CheckpointError:
        return {}  # somebody else's file


def _has_state(path: Place) -> bool:
    place = path / _STATE
    return place.is_file() and begins_as_state(place)


def _names(entries: Entries) -> Iterator[str]:
    """Names of all arrays, their keys joined by "/"; "" for one that is the directory itself."""
    if isinstance(entries, Files):
        yield from _names_below(entries.directory, "", FollowedLinks())
        return
    for key in entries.all:
        name, _, document = key.rpartition("/")
        if document == zarr2.DOCUMENT or (document == zarr3.DOCUMENT and _is_array(entries, key)):
            yield name


def _names_below(
    folder: Place, name: str, links: FollowedLinks, depth: int = 0, way: Way = ()
) -> Iterator[str]:
    """Names of the arrays in a directory, to which links on the way may have led."""
    if depth > DEEPEST:
        raise FormatError("directories are nested too deep", place=folder, wanted=f"at most {DEEPEST} levels")
    entries = folder.entries()
    documents = {each.name for each in entries} & {*DOCUMENTS}
    is_array = zarr2.DOCUMENT in documents or (
        zarr3.DOCUMENT in documents
        and _tells_array(read_json(folder / zarr3.DOCUMENT), folder / zarr3.DOCUMENT)
    )
    if is_array:
        yield name
    else:
        _refuse_chunks(folder, [each.name for each in entries if not each.is_dir])
    for each in entries:
        if each.is_dir and not (is_array and _OF_CHUNKS.fullmatch(each.name)):
            further = links.into(folder, each, way)
            inner = f"{name}/{each.name}" if name else each.name
            yield from _names_below(folder / each.name, inner, links, depth + 1, further)


def _refuse_chunks(folder: Place, files: Sequence[str]) -> None:
    """Raises FormatError if chunks are among the files of a directory that has no metadata of an array."""
    chunk = next(filter(_CHUNK.fullmatch, files), None)
    if chunk is not None:
        raise FormatError(
            "chunks of an array are here without its metadata",
            place=folder,
            got=f"a file {chunk}",
            wanted=f"{zarr2.DOCUMENT} or {zarr3.DOCUMENT} beside them or above",
            hint="copy it again, with the files whose names start with a dot",
        )


def _tells_array(document: Mapping[str, Any], place: object) -> bool:
    """Whether a `zarr.json` is of an array; raises FormatError if it is of no group either."""
    node = document.get("node_type")
    if node in ("array", "group"):
        return bool(node == "array")
    raise FormatError(
        "not the metadata of a zarr v3 node", place=place, got=f"node_type {node!r}", wanted="array or group"
    )


def _is_array(entries: Entries, key: str) -> bool:
    return _tells_array(_document(entries, key), f"{entries.directory}: {key}")


def _document(entries: Entries, key: str) -> Mapping[str, Any]:
    """The object under a key, empty if nothing is.

    Raises:
        FormatError: it is no JSON object.
    """
    entry = entries.get(key)
    if entry is None:
        return {}
    place = f"{entries.directory}: {key}"
    return json_object(entries.read(entry), place, FormatError, "copy the checkpoint again", None)


class _BareArrays:
    """The arrays of a directory; of those whose metadata give a fill value, chunks may be left out."""

    def __init__(self, path: Place, entries: Entries) -> None:
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
        """Whether tensorstore leaves chunks of the fill value out: it does where there is one."""
        below = f"{name}/" if name else ""
        documents = (_document(self._entries, below + each) for each in DOCUMENTS)
        return next((each for each in documents if each), {}).get("fill_value") is not None

    def remarks(self) -> Iterator[str]:
        if self._sparse:
            count = len(self._sparse)
            yield (
                f"chunks of {count:,} array{'s' if count > 1 else ''} are not there, such as of "
                f"{min(self._sparse)}: they are read as the fill value, which is not stored"
            )


def _has_shards(array: Chunked) -> bool:
    """Whether chunks are shards: their own indexes say which pieces were left out."""
    return isinstance(array.part, Grid) and array.part.document.shard is not None


def _by_key(found: Mapping[str, LazyArray]) -> dict[Path, Leaf]:
    """The tree that the keys make; names with dots that would be two things are left as they are."""
    cut = {name: tuple(name.replace("/", ".").split(".")) if name else () for name in found}
    inner = {keys[:depth] for keys in cut.values() for depth in range(len(keys))}
    is_tree = len({*cut.values()}) == len(cut) and inner.isdisjoint(cut.values())
    paths: Mapping[str, Path] = cut if is_tree else {name: tuple(name.split("/")) for name in found}
    return {paths[name]: array for name, array in found.items()}


def _put_in(state: FlaxState, found: Mapping[str, LazyArray], path: Place) -> dict[Path, Leaf]:
    """The tree of a file `checkpoint` with the arrays that it names."""
    missing = sorted({*state.elsewhere.values()} - {*found})
    unnamed = sorted({*found} - {*state.elsewhere.values()})
    if missing or unnamed:
        raise FormatError(
            f"arrays and the file {_STATE} are not of one checkpoint:"
            + counted_listing("named there, and not here", missing)
            + counted_listing("here, and not named there", unnamed),
            place=path,
            wanted=f"the arrays that {_STATE} names",
            hint="copy the checkpoint again",
        )
    return {**state.leaves, **{at: found[name] for at, name in state.elsewhere.items()}}
