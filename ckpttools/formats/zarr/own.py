"""Which files are those of zarr arrays, and of plain hierarchies of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttools.array.tree import Tree
from ckpttools.formats.zarr.zarr2 import DOCUMENT as ZARR2_DOCUMENT
from ckpttools.formats.zarr.zarr3 import DOCUMENT as ZARR3_DOCUMENT
from ckpttools.stores.place import Place

_DOCUMENTS = (ZARR2_DOCUMENT, ".zattrs", ZARR3_DOCUMENT)
_CHUNK = re.compile(r"(c\.)?\d+(\.\d+)*")


def owns(name: str) -> bool:
    """Whether a file has the name of a document or a chunk."""
    last = name.rpartition("/")[2]
    return last in _DOCUMENTS or _CHUNK.fullmatch(last) is not None


def strangers(directory: Place, tree: Tree) -> Iterator[str]:
    """What is neither a node nor a part of an array, at any depth."""
    arrays = {"/".join(map(str, path)) for path in tree.arrays}
    inner = {"/".join(map(str, path[:depth])) for path in tree.arrays for depth in range(len(path))}
    for name, entry in directory.below():
        array = next((above for above in _upwards(name) if above in arrays), None)
        if array is None:
            is_node = name in inner if entry.is_dir else entry.name == ZARR3_DOCUMENT
            if not is_node:
                yield name
        elif name != array and not _is_of_array(entry.name):
            yield name


def _upwards(name: str) -> Iterator[str]:
    """A name and those of the directories that it lies in, the last one ""."""
    yield name
    while name:
        name = name.rpartition("/")[0]
        yield name


def strangers_of_array(directory: Place) -> Iterator[str]:
    """What is neither the document nor a chunk of an array that is a directory."""
    found = (name for name, entry in directory.below() if not _is_of_array(entry.name))
    yield from (f"{directory.name}/{name}" for name in found)


def _is_of_array(name: str) -> bool:
    return name == "c" or owns(name)
