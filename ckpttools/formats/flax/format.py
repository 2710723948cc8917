"""Read Flax msgpack files: models, their shards, trainer states, and EasyLM streams.

Neither Flax nor msgpack is needed; arrays are read by byte range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote

from ckpttools.array.tree import Leaf, Metadata, Tree, keystr
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.core.memory_limit import check_memory
from ckpttools.core.text import first_and_last
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.flax.msgpack import DamagedError, Reader
from ckpttools.formats.flax.state import FlaxState, flax_state
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.read_only import ReadOnlyFormat, left_out
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.weight_files import WeightNames, reason
from ckpttools.formats.weight_index import WeightsLocation
from ckpttools.formats.zarr.chunks import has_array
from ckpttools.stores.location import Location

_NAMES = WeightNames(".msgpack", "flax_model.msgpack", "*model*.msgpack")
# `flax.training.checkpoints` appends the step to file names. Files without steps have no number, nor have
# those in Orbax checkpoints that predate `_METADATA`.
_NUMBERED, _STATE = re.compile(r"checkpoint_(\d{1,18}(?:\.\d{1,18})?)", re.ASCII), "checkpoint"
# Maximum number of numbered files to probe, because other programs use such names, too.
_MAX_PROBED = 20


@dataclass(frozen=True)
class FlaxFormat(ReadOnlyFormat):
    """The `flax-msgpack` format; implements `ckpttools.formats.base.Format`."""

    name: str = "flax-msgpack"
    fault_summary: str = "states that Flax wrote with msgpack and that are cut or damaged"

    def mismatch_reason(self, path: Location) -> str | None:
        try:
            if _is_named(path):
                mismatch = _NAMES.mismatch_reason(path)
                return None if mismatch and path.is_dir() and _has_states(path) else mismatch
            return None if has_state_header(path) else "it does not start like a Flax state"
        except CheckpointError as error:
            return reason(error, path)

    def open(self, path: Location, options: ReadOptions) -> Tree:
        if path.is_dir() and _NAMES.mismatch_reason(path) is not None:
            path = _find_state(path, options.step)
        # Files of trainer states have no suffix.
        is_named = _is_named(path)
        result = _NAMES.find(path) if is_named else WeightsLocation(path.parent, (path.name,))
        try:
            states = {name: open_state(result.folder / name) for name in result.names}
        except FormatError as error:
            raise error if is_named else _suggest_other_state(error, path) from error
        # Keys that contain slashes can give two values the same path.
        pairs = {(keystr(at), name): None for name, state in states.items() for at in state.leaves}
        result.check([*pairs])
        return _build_tree(path, result.folder, list(states.values()))

    def checkpoints_in(self, path: Location) -> Sequence[Location]:
        """See `ckpttools.formats.base.SupportsStepFiles.checkpoints_in`."""
        if not path.is_dir() or _NAMES.mismatch_reason(path) is None:
            return [path]
        return [state for state in _list_states(path) if _may_be_state(state)][::-1] or [path]


FORMAT = FlaxFormat()


def has_state_header(path: Location) -> bool:
    """Return whether a file starts with a dictionary of named values or the first pair of a stream."""
    with path.open() as file:
        head = file.read(0, min(2, file.size))
    if len(head) < 2 or not (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF, 0x92)):
        return False
    with path.open() as file:
        try:
            return _starts_with_key(Reader(file), head[0])
        except DamagedError:
            return False


def _starts_with_key(reader: Reader, code: int) -> bool:
    """Return whether the first value is a text: a dictionary key, or part of the path of a pair."""
    reader.at += {0xDE: 3, 0xDF: 5}.get(code, 1)
    first = reader.value()
    if code == 0x92:
        return isinstance(first, list) and bool(first) and all(type(key) is str for key in first)
    return isinstance(first, str) and first.isprintable()


def open_state(location: Location) -> FlaxState:
    """Parse a state file; reads no array data.

    Raises:
        FormatError: The file is damaged.
        StorageError: The file cannot be read.
    """
    with location.open() as file:
        state = flax_state(file)
    check_memory(len(state.leaves), 0, location)
    return state


def _list_states(folder: Location) -> list[Location]:
    """Return the files in a directory that have names of states, latest step first."""
    files = [entry.name for entry in folder.entries() if not entry.is_dir]
    numbered = [name for name in files if _NUMBERED.fullmatch(name)]
    if numbered:
        return [folder / name for name in sorted(numbered, key=_number, reverse=True)]
    return [folder / _STATE] if _STATE in files else []


def numbered_states(folder: Location) -> dict[int, Location]:
    """Return the states that `flax.training.checkpoints` wrote in a directory, by step.

    Raises:
        StorageError: The directory or a file cannot be read.
    """
    states = {_step_of(state): state for state in _list_states(folder)}
    if not any(map(has_state_header, [*states.values()][:_MAX_PROBED])):
        return {}
    return {step: state for step, state in states.items() if step is not None and _may_be_state(state)}


def _may_be_state(location: Location) -> bool:
    """Return whether a file that has the name of a state also starts like one, even if truncated."""
    with location.open() as file:
        head = bytes(file.read(0, min(64, file.size)))
    # Pickles start with 0x80, too.
    return not head.strip(b"\0") or 0x81 <= head[0] <= 0x8F or has_state_header(location)


def _suggest_other_state(error: FormatError, path: Location) -> FormatError:
    """Add to the error for a damaged state which other state can be opened."""
    others = [
        location
        for location in _list_states(path.parent)
        if location != path and _is_complete_state(location)
    ]
    if not others:
        return error
    return error.at(hint=f"{error.raw.hint}; the latest other state is {quote(str(others[0]))}")


def _is_complete_state(location: Location) -> bool:
    try:
        return has_state_header(location) and bool(open_state(location).leaves)
    except CheckpointError:
        return False


def state_fault(location: Location) -> str | None:
    """Return why a numbered file is not a readable state; None for complete states and unrelated files."""
    if not _NUMBERED.fullmatch(location.name) or not _may_be_state(location):
        return None
    try:
        open_state(location)
    except FormatError as error:
        return error.raw.line
    return None


def _number(name: str) -> tuple[float, str]:
    """Return a sort key as in Flax: the number in the name, then the name."""
    match = _NUMBERED.fullmatch(name)
    return (float(match[1]) if match else -1.0, name)


def _has_states(folder: Location) -> bool:
    """Return whether a directory has states that store their arrays in the state files."""
    states = _list_states(folder)
    if not any(map(has_state_header, states[:_MAX_PROBED])):
        return False
    # If the arrays are next to a file `checkpoint`, the `zarr-tree` format opens both together.
    names = {entry.name for entry in folder.entries()}
    return states[0].name != _STATE or not (MANIFEST in names or has_array(folder))


def _find_state(folder: Location, step: int | None) -> Location:
    """Return the state of a step in a directory; without a step, the latest one, even if it is damaged.

    Raises:
        FormatError: The directory has no states.
        UsageError: The step does not exist.
    """
    states = _list_states(folder)
    if not states:
        raise FormatError("the directory has no Flax state", location=folder)
    if step is None or states[0].name == _STATE:
        return states[0]
    by_step = {_step_of(state): state for state in states}
    if step not in by_step:
        steps = sorted(number for number in by_step if number is not None)
        raise UsageError(
            f"step {step} does not exist", location=folder, expected=f"one of {first_and_last(steps)}"
        )
    return by_step[step]


def _step_of(path: Location) -> int | None:
    """Return the training step in a state's name; None if there is none or it is a fraction."""
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match and "." not in match[1] else None


def _is_named(path: Location) -> bool:
    """Return whether a path has the name of a weights file or an index, or is a directory with such files."""
    return path.is_dir() or path.name.endswith((".msgpack", ".json"))


def _build_tree(path: Location, folder: Location, states: Sequence[FlaxState]) -> Tree:
    leaves: dict[TreePath, Leaf] = {at: leaf for state in states for at, leaf in state.leaves.items()}
    scalars = frozenset(at for state in states for at in state.scalars)
    external = [keystr(at) for state in states for at in state.elsewhere]
    if external:
        raise FormatError(
            f"some arrays are in separate directories:{listing(external)}",
            location=path,
            hint=_external_arrays_hint(path, folder),
        )
    others = {at: kind for state in states for at, kind in state.others.items()}
    metadata = Metadata(
        FORMAT.name,
        step=_step_of(path),
        config=sidecar_config(folder),
        scalars=scalars,
        location=str(path),
        notes=left_out(others),
    )
    return Tree(leaves, metadata)


def _external_arrays_hint(path: Location, folder: Location) -> str:
    """Return a hint for a state whose arrays are stored in other files."""
    arrays = folder / f"{path.name}_gda"
    if arrays.is_dir():
        return f"restore it with flax.training.checkpoints; only the arrays are in {quote(str(arrays))}"
    if path.name == _STATE and (has_array(folder) or (folder / MANIFEST).is_file()):
        return f"pass the directory: {quote(str(folder))}"
    return "copy the directories of the arrays, too"
