"""Which files are those of zarr arrays, and of plain hierarchies of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from ckpttools.array.tree import Tree
from ckpttools.formats.zarr.zarr2 import DOCUMENT as ZARR2_DOCUMENT
from ckpttools.formats.zarr.zarr3 import DOCUMENT as ZARR3_DOCUMENT

_DOCUMENTS = (ZARR2_DOCUMENT, ".zattrs", ZARR3_DOCUMENT)
_CHUNK = re.compile(r"(c\.)?\d+(\.\d+)*")


def owns(path: PurePath) -> bool:
    """Whether a file has the name of a document or a chunk."""
    return path.name in _DOCUMENTS or _CHUNK.fullmatch(path.name) is not None


def strangers(directory: Path, tree: Tree) -> Iterator[str]:
    """What is neither a node nor a part of an array, at any depth."""
    arrays = {"/".join(map(str, path)) for path in tree.arrays}
    inner = {"/".join(map(str, path[:depth])) for path in tree.arrays for depth in range(len(path))}
    for top, directories, files in os.walk(directory):
        place = Path(top).relative_to(directory).as_posix().removeprefix(".")
        if place in arrays:
            yield from (f"{place}/{each.partition('/')[2]}" for each in strangers_of_array(Path(top)))
            directories.clear()
            continue
        yield from (str(Path(place, name)) for name in files if name != ZARR3_DOCUMENT)
        known = {name for name in directories if str(Path(place, name)) in arrays | inner}
        yield from (str(Path(place, name)) for name in directories if name not in known)


def strangers_of_array(directory: Path) -> Iterator[str]:
    """What is neither the document nor a chunk of an array that is a directory."""
    for top, inner, files in os.walk(directory):
        place = Path(top).relative_to(directory.parent)
        found = (name for name in (*inner, *files) if name != "c" and not owns(PurePath(name)))
        yield from (f"{place}/{name}" for name in found)
