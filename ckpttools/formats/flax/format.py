"""Reading what Flax wrote with msgpack: a model, its shards, states of trainers, streams of EasyLM.

Neither Flax nor msgpack is needed; arrays are read by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttools.array.tree import Leaf, Metadata, Tree, spelled
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.budget import require_room
from ckpttools.core.errors import CheckpointError, FormatError, StorageError, listing
from ckpttools.formats.base import COMPANIONS, ReadOptions
from ckpttools.formats.flax.msgpack import DamagedError, Reader
from ckpttools.formats.flax.state import FlaxState, flax_state
from ckpttools.formats.left_out import left_out
from ckpttools.formats.weight_files import (
    WeightNames,
    check_index,
    check_once,
    config_beside,
    files_of_index,
    weight_map,
)
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

_NAMES = WeightNames(".msgpack", "flax_model.msgpack", "*model*.msgpack")


@dataclass(frozen=True)
class FlaxFormat:
    """The `flax-msgpack` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "flax-msgpack"
    looks_for: str = "states that Flax wrote with msgpack and that are cut or damaged"

    def why_not(self, path: Place) -> str | None:
        try:
            if path.is_dir() or path.name.endswith((".msgpack", ".json")):
                _NAMES.find(path)
                return None
            return None if begins_as_state(path) else "it does not begin as a state of Flax does"
        except CheckpointError as error:
            if isinstance(error, StorageError) and path.exists():
                raise  # nobody has told what is there
            return error.message

    def open(self, path: Place, options: ReadOptions) -> Tree:
        files, folder, index = _found(path)
        named = weight_map(index) if index is not None else None
        names = files_of_index(folder, index, named) if index is not None and named else files
        states = {folder / name: opened_state(folder / name) for name in names}
        check_once([(spelled(at), str(file)) for file, state in states.items() for at in state.leaves])
        if index is not None and named is not None:
            there = {spelled(at): file.name for file, state in states.items() for at in state.leaves}
            check_index(named, there, index)
        return _tree(path, folder, list(states.values()))

    def companions(self, tree: Tree) -> Place:
        """Beside the weights of a model; of other trees in a directory of their own."""
        place = parse(tree.metadata.place)
        folder = place if place.is_dir() else place.parent
        return folder / COMPANIONS if tree.metadata.config is None else folder

    def faults(self, path: Place, options: ReadOptions) -> Iterable[CheckpointError]:
        try:
            self.open(path, options)
        except CheckpointError as error:
            yield error


FORMAT = FlaxFormat()


def begins_as_state(path: Place) -> bool:
    """Whether a file begins with a dictionary of named values, or with the first pair of a stream."""
    with path.open() as file:
        head = file.read(0, min(2, file.size))
    if len(head) < 2 or not (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF, 0x92)):
        return False
    with path.open() as file:
        try:
            return _begins(Reader(file), head[0])
        except DamagedError:
            return False


def _begins(reader: Reader, code: int) -> bool:
    """Whether a text comes first, as the key of a dictionary or within the path of a pair."""
    reader.at += {0xDE: 3, 0xDF: 5}.get(code, 1)
    first = reader.value()
    if code == 0x92:
        return isinstance(first, list) and bool(first) and all(type(key) is str for key in first)
    return isinstance(first, str) and first.isprintable()


def opened_state(place: Place) -> FlaxState:
    """What a file holds; reads no array.

    Raises:
        FormatError: it is damaged.
        StorageError: it cannot be read.
    """
    with place.open() as file:
        state = flax_state(file)
    require_room(len(state.leaves), 0, place)
    return state


def _found(path: Place) -> tuple[Sequence[str], Place, Place | None]:
    """Names of files, the directory they lie in, and their index."""
    if not path.is_dir() and not path.name.endswith((".msgpack", ".json")):
        return (path.name,), path.parent, None
    found = _NAMES.find(path)
    return found.files, found.folder, found.folder / found.index if found.index is not None else None


def _tree(path: Place, folder: Place, states: Sequence[FlaxState]) -> Tree:
    leaves: dict[TreePath, Leaf] = {at: leaf for state in states for at, leaf in state.leaves.items()}
    scalars = frozenset(at for state in states for at in state.scalars)
    elsewhere = [spelled(at) for state in states for at in state.elsewhere]
    if elsewhere:
        raise FormatError(
            f"some arrays lie in directories of their own:{listing(elsewhere)}",
            place=path,
            hint=f"name the directory: {folder}",
        )
    others = {at: kind for state in states for at, kind in state.others.items()}
    metadata = Metadata(
        FORMAT.name, config=config_beside(folder), scalars=scalars, place=str(path), notes=left_out(others)
    )
    return Tree(leaves, metadata)
