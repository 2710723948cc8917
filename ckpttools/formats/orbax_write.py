"""Writing Orbax checkpoints: raw zarr v3 chunks in one data file under an OCDBT index of our own.

Chunks go to their places in any order; the index comes last, so an interrupted write leaves nothing that
could be taken for a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ckpttools.errors import FormatError
from ckpttools.formats import ocdbt, orbax_metadata
from ckpttools.formats.base import Extents, Layout
from ckpttools.formats.chunking import chunk_shape
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.formats.zarr3 import RAW_CODECS, ArrayDocument, chunk_key
from ckpttools.ir.array import LazyArray
from ckpttools.ir.nodes import stacked_axes
from ckpttools.ir.tree import Path, Tree, dotted, spelled
from ckpttools.region import grid_indices

DATA_FILE = "d/data"
INDEX_FILE = "d/index"
# Chunks start on pages, so that they can be read and written without copying at the edges; arrays of
# less than a page are not worth the gap.
_PAGE, _LINE = 4096, 64


@dataclass(frozen=True)
class OrbaxWriter:
    """Writes `<root>/<step>/<item>`, as `CheckpointManager` and MaxText lay it out.

    Attributes:
        step: number of the step directory.
        item: name of the item in it.
    """

    step: int = 0
    item: str = "items"
    name: str = "orbax"

    @property
    def base(self) -> str:
        """The item's directory, relative to the root."""
        return f"{self.step}/{self.item}"

    def layout(self, tree: Tree, most: int) -> Layout:
        """As `Writer.layout`; every array in one data file, one after the other."""
        _check_names(tree)
        file = f"{self.base}/{DATA_FILE}"
        placements: dict[Path, Placement] = {}
        end = 0
        for path, array in tree.arrays.items():
            _check_array(path, array)
            alignment = _PAGE if array.nbytes >= _PAGE else _LINE
            start = -(-end // alignment) * alignment
            chunk = chunk_shape(array.shape, array.dtype.itemsize, stacked_axes(array))
            home = DataFile(file, start)
            placements[path] = Placement(array.shape, array.dtype.itemsize, chunk, home)
            end = start + placements[path].nbytes
        return Layout(placements, {file: end})

    def finish(self, directory: FilePath, tree: Tree, layout: Layout, extents: Extents) -> None:
        """As `Writer.finish`: the index, then Orbax's metadata at both levels, then the commit marks."""
        step, item = directory / str(self.step), directory / self.base
        index = ocdbt.encode(_entries(tree, layout), INDEX_FILE)
        (item / INDEX_FILE).write_bytes(index.nodes)
        (item / "manifest.ocdbt").write_bytes(index.manifest)
        _write_json(item / orbax_metadata.TREE_FILE, orbax_metadata.tree_document(tree))
        strings = orbax_metadata.strings_document(tree)
        if strings:
            _write_json(item / orbax_metadata.STRINGS_FILE, strings)
        custom = tree.metadata.custom
        inner, outer = (orbax_metadata.checkpoint_document(name, custom) for name in (None, self.item))
        _write_json(item / orbax_metadata.CHECKPOINT_FILE, inner)
        _write_json(step / orbax_metadata.CHECKPOINT_FILE, outer)
        for place in (item, step):
            (place / orbax_metadata.COMMIT_FILE).write_text("Checkpoint commit was successful")


def _entries(tree: Tree, layout: Layout) -> Iterator[tuple[bytes, ocdbt.Entry]]:
    """Index entries: each array's document inline, each chunk as a range of the data file."""
    for path, array in tree.arrays.items():
        placement = layout.placements[path]
        name = dotted(path)
        document = ArrayDocument(array.shape, array.dtype, placement.chunk, RAW_CODECS)
        yield f"{name}/zarr.json".encode(), document.to_json()
        for index in grid_indices(placement.shape, placement.chunk):
            place = placement.chunk_range(index)
            extent = ocdbt.Extent(DATA_FILE, place.offset, place.nbytes)
            yield f"{name}/{chunk_key(index)}".encode(), extent


def _check_array(path: Path, array: LazyArray) -> None:
    if array.size == 0:
        raise FormatError(
            "Orbax cannot hold an array without elements",
            place=spelled(path),
            got=list(array.shape),
            hint="leave it out",
        )
    if array.dtype.zarr3 is None:
        raise FormatError(
            f"zarr has no {array.dtype}",
            place=spelled(path),
            hint="cast it, for instance with --dtype bfloat16",
        )


def _check_names(tree: Tree) -> None:
    """Orbax joins keys with dots: two paths must not become one name."""
    names: dict[str, Path] = {}
    for path in tree:
        other = names.setdefault(dotted(path), path)
        if other != path:
            raise FormatError(
                "two paths have the same name in Orbax, which joins keys with dots",
                place=spelled(path),
                got=f"{spelled(other)} is also {dotted(path)!r}",
                hint="rename one of them",
            )


def _write_json(path: FilePath, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))
