"""Which files are those of an Orbax checkpoint, as it is written here: one step with one item."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from ckpttools.array.tree import Tree, dotted
from ckpttools.formats.base import COMPANIONS
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.metadata import ARRAYS_DIRECTORY, OWN_FILES
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.write import DATA_DIRECTORY
from ckpttools.formats.safetensors.own import strangers_beside
from ckpttools.formats.zarr import own as zarr
from ckpttools.stores.local.files import names_in

_DIRECTORIES = (DATA_DIRECTORY, PROCESSES, ARRAYS_DIRECTORY)


def owns(path: PurePath) -> bool:
    """Whether a path within a checkpoint is one that its files have."""
    is_inside = any(fnmatchcase(part, pattern) for part in path.parts for pattern in _DIRECTORIES)
    return is_inside or path.name in (MANIFEST, *OWN_FILES) or zarr.owns(path)


def strangers(directory: Path, tree: Tree) -> Iterator[str]:
    """All but one step with one item, as `OrbaxWriter` lays them out."""
    item = Path(tree.metadata.place)
    step = item.parent
    if item == directory or step.parent != directory:
        yield f"{os.path.relpath(item, directory)} is an item, which lies not in <step>/<item> here"
        return
    yield from (name for name in names_in(directory) if name != step.name)
    yield from (f"{step.name}/{name}" for name in names_in(step) if name not in {item.name, *OWN_FILES})
    arrays = {dotted(path) for path in tree.arrays}
    inner: Iterator[str]
    for entry in os.scandir(item):
        if entry.name == COMPANIONS and entry.is_dir(follow_symlinks=False):
            inner = (f"{COMPANIONS}/{each}" for each in strangers_beside(Path(entry.path)))
        elif entry.is_dir(follow_symlinks=False) and entry.name in arrays:
            inner = zarr.strangers_of_array(Path(entry.path))
        elif entry.name in OWN_FILES or fnmatchcase(entry.name, PROCESSES):
            inner = _other_directories(entry)
        else:
            inner = iter([entry.name])
        yield from (f"{step.name}/{item.name}/{each}" for each in inner)


def _other_directories(entry: os.DirEntry[str]) -> Iterator[str]:
    """What no database has below a directory of its own: data files lie in `d`, one level down at most."""
    if not entry.is_dir(follow_symlinks=False):
        return
    top = Path(entry.path)
    for directory, inner, _ in os.walk(top):
        place = Path(directory).relative_to(top.parent)
        yield from (f"{place}/{name}" for name in inner if name != DATA_DIRECTORY)
