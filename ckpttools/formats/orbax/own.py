"""Which files are those of an Orbax checkpoint, as it is written here: one step with one item."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.text import matches_any
from ckpttools.formats.base import COMPANIONS
from ckpttools.formats.orbax.entries import Entries, entries_of
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.metadata import (
    ARRAYS_DIRECTORY,
    CHECKPOINT_FILE,
    COMMIT_FILE,
    OWN_FILES,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
)
from ckpttools.formats.orbax.ocdbt import MANIFEST, Extent
from ckpttools.formats.orbax.write import DATA_DIRECTORY
from ckpttools.formats.safetensors.own import files_of_others
from ckpttools.formats.zarr import own as zarr
from ckpttools.stores.base import DirEntry
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

_DIRECTORIES = (DATA_DIRECTORY, PROCESSES, ARRAYS_DIRECTORY)
_OF_A_STEP = {CHECKPOINT_FILE, COMMIT_FILE}
_OF_AN_ITEM = {TREE_FILE, STRINGS_FILE, SHARDING_FILE, *_OF_A_STEP}
# Some of these no index names: data of the processes that was merged, nodes of older versions.
_FILE = re.compile(r"(ocdbt\.process_[^/]+/)?(manifest\.ocdbt|d/[0-9a-f]{32})|array_metadatas/process_\d+")
_DIRECTORY = re.compile(r"(ocdbt\.process_[^/]+/)?d|ocdbt\.process_[^/]+|array_metadatas")


def owns(name: str) -> bool:
    """Whether a path within a checkpoint is one that its files have."""
    is_inside = any(matches_any(part, _DIRECTORIES) for part in name.split("/"))
    return is_inside or name.rpartition("/")[2] in (MANIFEST, *OWN_FILES) or zarr.owns(name)


# What an item is called below what is written, by level: see `OrbaxWriter`.
_PLACES = {"run": "<step>/<item>", "step": "<item>", "item": "."}


def strangers(directory: Place, tree: Tree, level: str = "run") -> Iterator[str]:
    """All but one item, laid out as `OrbaxWriter` does at this level."""
    item = parse(tree.metadata.place)
    name = str(item.relative_to(directory) or ".") if item != directory else "."
    parts = [] if name == "." else name.split("/")
    if tree.metadata.items:
        yield f"{name} is a step with several items: {', '.join(tree.metadata.items)}"
        return
    if len(parts) != list(reversed(_PLACES)).index(level):
        yield f"{name} is an item, which lies not in {_PLACES[level]} here"
        return
    if level == "run":
        yield from (each.name for each in directory.entries() if each.name != item.parent.name)
    if level != "item":
        below = "".join(f"{part}/" for part in parts[:-1])
        for each in item.parent.entries():
            if each.name != item.name and (each.is_dir or each.name not in _OF_A_STEP):
                yield f"{below}{each.name}"
    prefix = "".join(f"{part}/" for part in parts)
    yield from (f"{prefix}{each}" for each in strangers_in_item(item, tree))


def strangers_in_item(item: Place, tree: Tree) -> Iterator[str]:
    """What lies in the directory of an item and is no part of it; errors as `strangers`."""
    entries = entries_of(item)
    own = _named(entries) if entries.manifests else zarr.own_files(entries, map(dotted, tree.arrays))
    for entry in item.entries():
        if entry.name == COMPANIONS and entry.is_own_dir:
            yield from (f"{COMPANIONS}/{each}" for each in files_of_others(item / COMPANIONS))
        elif entry.name in _OF_AN_ITEM and not entry.is_dir:
            continue
        else:
            inner = (item / entry.name).below() if entry.is_own_dir else ()
            found = [(entry.name, entry), *((f"{entry.name}/{name}", each) for name, each in inner)]
            yield from (
                name for name, each in found if not _is_written(name, each) and not own.has(name, each)
            )


def _is_written(name: str, entry: DirEntry) -> bool:
    """Whether Orbax gives names like this one."""
    return (_DIRECTORY if entry.is_dir else _FILE).fullmatch(name) is not None


def _named(entries: Entries) -> zarr.OwnFiles:
    """The files that an index starts from, consists of and leads to."""
    values = (each for each in entries.all.values() if isinstance(each, Extent))
    return zarr.OwnFiles({*entries.manifests, *(each.file for each in (*entries.nodes, *values))})
