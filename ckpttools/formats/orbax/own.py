"""Which files are those of an Orbax checkpoint, as it is written here: one step with one item."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from ckpttools.array.tree import Tree, dotted
from ckpttools.formats.base import COMPANIONS
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.metadata import ARRAYS_DIRECTORY, OWN_FILES
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.write import DATA_DIRECTORY
from ckpttools.formats.safetensors.own import strangers_beside
from ckpttools.formats.zarr import own as zarr
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

_DIRECTORIES = (DATA_DIRECTORY, PROCESSES, ARRAYS_DIRECTORY)


def owns(name: str) -> bool:
    """Whether a path within a checkpoint is one that its files have."""
    is_inside = any(fnmatchcase(part, pattern) for part in name.split("/") for pattern in _DIRECTORIES)
    return is_inside or name.rpartition("/")[2] in (MANIFEST, *OWN_FILES) or zarr.owns(name)


def strangers(directory: Place, tree: Tree) -> Iterator[str]:
    """All but one step with one item, as `OrbaxWriter` lays them out."""
    item = parse(tree.metadata.place)
    step = item.parent
    if item == directory or step.parent != directory:
        yield f"{item.relative_to(directory) or '.'} is an item, which lies not in <step>/<item> here"
        return
    yield from (each.name for each in directory.entries() if each.name != step.name)
    own = {item.name, *OWN_FILES}
    yield from (f"{step.name}/{each.name}" for each in step.entries() if each.name not in own)
    arrays = {dotted(path) for path in tree.arrays}
    inner: Iterator[str]
    for entry in item.entries():
        below = item / entry.name
        if entry.name == COMPANIONS and entry.is_own_dir:
            inner = (f"{COMPANIONS}/{each}" for each in strangers_beside(below))
        elif entry.name in arrays and entry.is_own_dir:
            inner = zarr.strangers_of_array(below)
        elif entry.name in OWN_FILES or fnmatchcase(entry.name, PROCESSES):
            inner = _other_directories(below) if entry.is_own_dir else iter(())
        else:
            inner = iter([entry.name])
        yield from (f"{step.name}/{item.name}/{each}" for each in inner)


def _other_directories(top: Place) -> Iterator[str]:
    """What no database has below a directory of its own: data files lie in `d`, one level down at most."""
    found = (name for name, entry in top.below() if entry.is_dir and entry.name != DATA_DIRECTORY)
    yield from (f"{top.name}/{name}" for name in found)
