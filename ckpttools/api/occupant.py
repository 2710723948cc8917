"""What has the name of a destination already, and whether a new checkpoint may take its place.

Only a checkpoint of the kind that is being written may be replaced, and only if it accounts for every file
that is there: not a run of several steps, not other items, files or directories beside the weights, not the
state of an optimizer that the new one does not have.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    LaterStepWarning,
    StorageError,
    listing,
)
from ckpttools.formats import sidecar
from ckpttools.formats.base import COMPANIONS, RECORD
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.registry import open_tree
from ckpttools.formats.zarr.zarr2 import DOCUMENT as ZARR2_DOCUMENT
from ckpttools.formats.zarr.zarr3 import DOCUMENT as ZARR3_DOCUMENT
from ckpttools.maxtext.kinds import optimizer_of
from ckpttools.stores.local.files import names_in
from ckpttools.stores.publishing import PLAN_MARK

_SHARD = re.compile(r"(.*?)(-\d{5}-of-\d{5})?\.safetensors", re.DOTALL)
_INDEX = ".safetensors.index.json"
_OF_AN_ADAPTER = "adapter_config.json"
_SHOWN = 5
Strangers = Callable[[Path, Tree], Iterable[str]]


def check_replaceable(destination: Path, tree: Tree, format_name: str) -> None:
    """Refuses where a destination holds what would be lost.

    Args:
        destination: a directory with something in it.
        tree: what will be written.
        format_name: of the writer.

    Raises:
        DestinationExistsError: it may not be replaced; says what is there.
        StorageError: the system reports an error.
    """
    old = _opened(destination)
    if old.metadata.format != format_name:
        raise _refused(
            destination, f"holds a checkpoint of format {old.metadata.format}", f"one of {format_name}"
        )
    try:
        strangers = sorted({*_STRANGERS.get(format_name, _all)(destination, old)} - {PLAN_MARK})
    except OSError as error:
        raise StorageError(f"cannot list {error.filename}", got=error.strerror) from error
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise _refused(
            destination,
            f"holds what is no part of the checkpoint: {', '.join(strangers[:_SHOWN])}{more}",
            "one checkpoint, laid out as this command writes it, and nothing else",
        )
    optimizer = optimizer_of(old)
    if optimizer and not optimizer_of(tree):
        step = "" if old.metadata.step is None else f" of step {old.metadata.step}"
        raise _refused(
            destination,
            f"holds a training checkpoint{step}, with the state of its optimizer ({optimizer.name})",
            "no optimizer state where what replaces it has none",
        )


def _opened(destination: Path) -> Tree:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaterStepWarning)
            return open_tree(destination)
    except StorageError:
        raise
    except CheckpointError as error:
        names = names_in(destination)
        raise _refused(
            destination,
            "is no checkpoint that can be read" + listing(names, _SHOWN),
            "a whole checkpoint of the kind that is written",
        ) from error


def _refused(destination: Path, got: str, wanted: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{destination} is not replaced: it {got}",
        wanted=wanted,
        hint="choose another destination, or move away what is there",
    )


def _orbax_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    """All but one step with one item, as `OrbaxWriter` lays them out."""
    item = Path(tree.metadata.place)
    step = item.parent
    if item == destination or step.parent != destination:
        yield f"{os.path.relpath(item, destination)} is an item, which lies not in <step>/<item> here"
        return
    yield from (name for name in names_in(destination) if name != step.name)
    known = orbax_metadata.OWN_FILES
    yield from (f"{step.name}/{name}" for name in names_in(step) if name not in {item.name, *known})
    arrays = {dotted(path) for path in tree.arrays}
    for entry in os.scandir(item):
        if entry.name == COMPANIONS and entry.is_dir(follow_symlinks=False):
            inner = _strangers_beside(Path(entry.path), _is_carried)
        elif entry.is_dir(follow_symlinks=False) and entry.name in arrays:
            inner = _strangers_of_array(Path(entry.path))
        elif entry.name in known or fnmatchcase(entry.name, "ocdbt.process_*"):
            inner = _other_directories(entry)
        else:
            inner = iter([entry.name])
        yield from (f"{step.name}/{item.name}/{each}" for each in inner)


def _other_directories(entry: os.DirEntry[str]) -> Iterator[str]:
    """What no database has below a directory of its own: data files lie in `d`, one level down at most."""
    top = Path(entry.path)
    if not entry.is_dir(follow_symlinks=False):
        return
    for directory, inner, _ in os.walk(top):
        place = Path(directory).relative_to(top.parent)
        yield from (f"{place}/{name}" for name in inner if name != "d")


def _strangers_of_array(directory: Path) -> Iterator[str]:
    """What is neither the document nor a chunk of an array that is a directory."""
    for top, inner, files in os.walk(directory):
        place = Path(top).relative_to(directory.parent)
        yield from (f"{place}/{name}" for name in (*inner, *files) if not _is_of_array(name))


def _is_of_array(name: str) -> bool:
    parts = name.removeprefix("c.").split(".")
    return name in (ZARR2_DOCUMENT, ZARR3_DOCUMENT, ".zattrs", "c") or all(map(str.isdecimal, parts))


def _safetensors_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    """All but the weights, which have one stem, their index, and what goes along with a model."""
    names = names_in(destination)
    stems = {match[1] for name in names if (match := _SHARD.fullmatch(name))}
    own = "model" if "model" in stems else min(stems, default="")

    def is_weights(name: str) -> bool:
        match = _SHARD.fullmatch(name)
        return name == own + _INDEX or (match is not None and match[1] == own)

    yield from _strangers_beside(destination, is_weights)


def _strangers_beside(directory: Path, is_weights: Callable[[str], bool]) -> Iterator[str]:
    for entry in os.scandir(directory):
        if entry.name == COMPANIONS and entry.is_dir(follow_symlinks=False):
            yield from (f"{COMPANIONS}/{each}" for each in _strangers_beside(Path(entry.path), _is_carried))
        elif entry.is_dir(follow_symlinks=False) or not (is_weights(entry.name) or _goes_along(entry.name)):
            yield entry.name


def _is_carried(name: str) -> bool:
    return name == f"{sidecar.CARRIED}.safetensors"


def _goes_along(name: str) -> bool:
    """Whether a file is one that is written beside weights, or would be carried along."""
    known = any(fnmatchcase(name, pattern) for pattern in sidecar.PATTERNS)
    return name == RECORD or (known and name != _OF_AN_ADAPTER)


def _zarr_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    """What is neither a node nor a part of an array, at any depth."""
    arrays = {"/".join(map(str, path)) for path in tree.arrays}
    inner = {"/".join(map(str, path[:depth])) for path in tree.arrays for depth in range(len(path))}
    for top, directories, files in os.walk(destination):
        place = Path(top).relative_to(destination).as_posix().removeprefix(".")
        if place in arrays:
            below = Path(top)
            yield from (f"{place}/{each.partition('/')[2]}" for each in _strangers_of_array(below))
            directories.clear()
            continue
        yield from (str(Path(place, name)) for name in files if name != ZARR3_DOCUMENT)
        known = {name for name in directories if str(Path(place, name)) in arrays | inner}
        yield from (str(Path(place, name)) for name in directories if name not in known)


def _all(destination: Path, tree: Tree) -> Iterable[str]:
    return names_in(destination)


_STRANGERS: dict[str, Strangers] = {
    "orbax": _orbax_strangers,
    "safetensors": _safetensors_strangers,
    "zarr3": _zarr_strangers,
}
