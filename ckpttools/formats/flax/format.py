"""Reading what Flax wrote with msgpack: a model, its shards, states of trainers, streams of EasyLM.

Neither Flax nor msgpack is needed; arrays are read by position.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.array.tree import Leaf, Metadata, Tree, keystr
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.budget import require_room
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, listing
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.flax.msgpack import DamagedError, Reader
from ckpttools.formats.flax.state import FlaxState, flax_state
from ckpttools.formats.left_out import left_out
from ckpttools.formats.read_only import ReadOnlyFormat
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.weight_files import WeightNames, reason
from ckpttools.formats.weight_index import WeightsLocation
from ckpttools.stores.place import Place

_NAMES = WeightNames(".msgpack", "flax_model.msgpack", "*model*.msgpack")


@dataclass(frozen=True)
class FlaxFormat(ReadOnlyFormat):
    """The `flax-msgpack` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "flax-msgpack"
    looks_for: str = "states that Flax wrote with msgpack and that are cut or damaged"

    def why_not(self, path: Place) -> str | None:
        try:
            if _is_named(path):
                return _NAMES.why_not(path)
            return None if begins_as_state(path) else "it does not begin as a state of Flax does"
        except CheckpointError as error:
            return reason(error, path)

    def open(self, path: Place, options: ReadOptions) -> Tree:
        # Trainers' states have names without an ending.
        found = _NAMES.find(path) if _is_named(path) else WeightsLocation(path.parent, (path.name,))
        states = {name: opened_state(found.folder / name) for name in found.names}
        # Keys with slashes may spell two paths of one file alike.
        pairs = {(keystr(at), name): None for name, state in states.items() for at in state.leaves}
        found.check([*pairs])
        return _tree(path, found.folder, list(states.values()))


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


def _is_named(path: Place) -> bool:
    """Whether the name tells that it is a file of weights, an index, or a directory of these."""
    return path.is_dir() or path.name.endswith((".msgpack", ".json"))


def _tree(path: Place, folder: Place, states: Sequence[FlaxState]) -> Tree:
    leaves: dict[TreePath, Leaf] = {at: leaf for state in states for at, leaf in state.leaves.items()}
    scalars = frozenset(at for state in states for at in state.scalars)
    elsewhere = [keystr(at) for state in states for at in state.elsewhere]
    if elsewhere:
        raise FormatError(
            f"some arrays lie in directories of their own:{listing(elsewhere)}",
            place=path,
            hint=f"name the directory: {folder}",
        )
    others = {at: kind for state in states for at, kind in state.others.items()}
    metadata = Metadata(
        FORMAT.name, config=sidecar_config(folder), scalars=scalars, place=str(path), notes=left_out(others)
    )
    return Tree(leaves, metadata)
