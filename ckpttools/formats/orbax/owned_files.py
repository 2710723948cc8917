"""The files that belong to an Orbax checkpoint written by ckpttools: one step with one item."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.text import matches_any
from ckpttools.formats.base import SIDECARS
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
from ckpttools.formats.safetensors.owned_files import foreign_files
from ckpttools.formats.zarr import owned_files as zarr
from ckpttools.stores.base import DirEntry
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

_DIRECTORIES = (DATA_DIRECTORY, PROCESSES, ARRAYS_DIRECTORY)
_STEP_FILES = {CHECKPOINT_FILE, COMMIT_FILE}
_ITEM_FILES = {TREE_FILE, STRINGS_FILE, SHARDING_FILE, *_STEP_FILES}
# Files that are in no index: per-process data that has been merged, and nodes of older versions.
_FILE = re.compile(r"(ocdbt\.process_[^/]+/)?(manifest\.ocdbt|d/[0-9a-f]{32})|array_metadatas/process_\d+")
_DIRECTORY = re.compile(r"(ocdbt\.process_[^/]+/)?d|ocdbt\.process_[^/]+|array_metadatas")


def owns(name: str) -> bool:
    """Return whether a path within a checkpoint belongs to Orbax."""
    is_inside = any(matches_any(part, _DIRECTORIES) for part in name.split("/"))
    return is_inside or name.rpartition("/")[2] in (MANIFEST, *OWN_FILES) or zarr.owns(name)


# Path of the item below the root, by `OrbaxWriter.level`.
_LOCATIONS = {"run": "<step>/<item>", "step": "<item>", "item": "."}


def unowned_files(directory: Location, tree: Tree, level: str = "run") -> Iterator[str]:
    """Yield all files that are not part of a single item, laid out as `OrbaxWriter` does at this level."""
    item = parse(tree.metadata.location)
    name = str(item.relative_to(directory) or ".") if item != directory else "."
    parts = [] if name == "." else name.split("/")
    if tree.metadata.items:
        yield f"{name} is a step with several items: {', '.join(tree.metadata.items)}"
        return
    if len(parts) != list(reversed(_LOCATIONS)).index(level):
        yield f"{name} is an item that is not in {_LOCATIONS[level]}"
        return
    if level == "run":
        yield from (entry.name for entry in directory.entries() if entry.name != item.parent.name)
    if level != "item":
        below = "".join(f"{part}/" for part in parts[:-1])
        for entry in item.parent.entries():
            if entry.name != item.name and (entry.is_dir or entry.name not in _STEP_FILES):
                yield f"{below}{entry.name}"
    prefix = "".join(f"{part}/" for part in parts)
    yield from (f"{prefix}{entry}" for entry in find_unowned_in_item(item, tree))


def find_unowned_in_item(item: Location, tree: Tree) -> Iterator[str]:
    """Yield files in an item's directory that do not belong to the item; errors as for `unowned_files`."""
    entries = entries_of(item)
    own = _index_files(entries) if entries.manifests else zarr.own_files(entries, map(dotted, tree.arrays))
    for entry in item.entries():
        if entry.name == SIDECARS and entry.is_own_dir:
            yield from (f"{SIDECARS}/{other}" for other in foreign_files(item / SIDECARS))
        elif entry.name in _ITEM_FILES and not entry.is_dir:
            continue
        else:
            inner = (item / entry.name).below() if entry.is_own_dir else ()
            result = [(entry.name, entry), *((f"{entry.name}/{name}", element) for name, element in inner)]
            yield from (
                name
                for name, element in result
                if not _is_written(name, element) and not own.has(name, element)
            )


def _is_written(name: str, entry: DirEntry) -> bool:
    """Return whether Orbax writes files with such names."""
    return (_DIRECTORY if entry.is_dir else _FILE).fullmatch(name) is not None


def _index_files(entries: Entries) -> zarr.OwnFiles:
    """Return the manifests, nodes and data files of an index."""
    values = (item for item in entries.all.values() if isinstance(item, Extent))
    return zarr.OwnFiles({*entries.manifests, *(node.file for node in (*entries.nodes, *values))})
