"""Write plain zarr v3 hierarchies: groups for inner nodes, and a file for each chunk.

Information that zarr cannot express (which keys are integers, their order, empty leaves, strings, the step)
is stored in the attributes of the root, under `ckpttools.tree`, and restored when reading.
"""

from __future__ import annotations

import json
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.codecs.base import WritableCodec
from ckpttools.codecs.zstd import LARGEST_ENCODED
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.formats import flat
from ckpttools.formats.base import Extents, Layout
from ckpttools.formats.checks import LONGEST_NAME, check_dtypes, check_paths, is_file_name
from ckpttools.formats.placement import ChunkFiles, Placement
from ckpttools.formats.zarr.chunking import GivenChunks, chunk_shape
from ckpttools.formats.zarr.zarr3 import (
    DOCUMENT,
    KEYS,
    encode,
    written_codecs,
)
from ckpttools.stores.location import Location

SEPARATOR = "/"


@dataclass(frozen=True)
class ZarrWriter:
    """Writes a zarr v3 hierarchy whose node names are the tree's keys.

    Attributes:
        compression: Compression of chunks; None stores them uncompressed, which loads fastest.
        chunks: Chunk shapes set by the user; None for the defaults.
    """

    compression: WritableCodec | None = None
    chunks: GivenChunks | None = None
    name: str = "zarr3"

    def layout(self, tree: Tree, limit: int) -> Layout:
        """See `Writer.layout`. Every chunk is in its own file."""
        check_paths(tree, keystr, self.name)
        _check_names(tree)
        _check_nesting(tree)
        check_dtypes(tree, lambda dtype: dtype.zarr3, "zarr v3")
        _attributes(tree)
        if self.chunks:
            self.chunks.check(tree.arrays)
        return Layout({path: self._placement(path, array, limit) for path, array in tree.arrays.items()}, {})

    def _placement(self, path: Path, array: LazyArray, limit: int) -> Placement:
        itemsize = array.dtype.itemsize
        largest = min(limit, LARGEST_ENCODED) if self.compression else None
        given = self.chunks.shape(path, array.shape) if self.chunks and array.size else None
        if given is not None:
            chunk = given
        elif array.size:
            chunk = chunk_shape(array.shape, itemsize, array.stacked_axes, largest)
        else:
            # zarr grid cells have at least one element even if the array is empty.
            chunk = tuple(max(1, length) for length in array.shape)
        destination = ChunkFiles(
            "".join(f"{name}{SEPARATOR}" for name in _names(path)), KEYS.prefix, KEYS.separator
        )
        return Placement(array.shape, itemsize, chunk, destination, self.compression)

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """See `Writer.finish`. Writes documents of arrays, then of groups, and of the root last."""
        attributes = _attributes(tree)
        for path, array in tree.arrays.items():
            if path:
                _write(directory, path, self._document(array, layout.placements[path].chunk))
        inner = {_names(path[:depth]) for path in tree.arrays for depth in range(1, len(path))}
        for names in sorted(inner):
            _write(directory, names, _group({}))
        if () in tree.arrays:
            document = self._document(tree.arrays[()], layout.placements[()].chunk)
            _write(directory, (), {**document, "attributes": attributes})
        else:
            _write(directory, (), _group(attributes))

    def _document(self, array: LazyArray, chunk: Shape) -> dict[str, Any]:
        document = encode(array.shape, array.dtype, chunk, written_codecs(self.compression))
        return {**json.loads(document), "attributes": {}}


def _group(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"attributes": attributes, "node_type": "group", "zarr_format": 3}


def _attributes(tree: Tree) -> dict[str, Any]:
    """Return the attributes of the root: everything about the tree except its arrays."""
    return {flat.ENTRY: json.loads(flat.describe(tree, SEPARATOR))}


def _names(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _write(directory: Location, path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, separators=(",", ":"))
    (directory / SEPARATOR.join((*_names(path), DOCUMENT))).write_bytes(text.encode())


def _check_names(tree: Tree) -> None:
    invalid = {str(key): path for path in tree.arrays for key in path if not _is_node_name(str(key))}
    if invalid:
        raise FormatError(
            "these keys cannot be names of zarr nodes:"
            + listing([f"{name!r} in {keystr(path)}" for name, path in invalid.items()]),
            location=tree.metadata.location or None,
            expected=f"1 to {LONGEST_NAME} bytes without '/' and '\\', not only periods, not beginning with "
            f"'__', not {DOCUMENT}",
            hint=f"rename them, or write Orbax with {option('ocdbt', True)}, which takes any key",
        )


def _is_node_name(name: str) -> bool:
    """Return whether the zarr v3 specification and file systems allow a name."""
    return is_file_name(name) and bool(name.strip(".")) and not name.startswith("__") and name != DOCUMENT


def _check_nesting(tree: Tree) -> None:
    """Reject names that collide: an array cannot be a group, and index 0 equals the key "0"."""
    names: dict[tuple[str, ...], Path] = {}
    for path in tree.arrays:
        other = names.setdefault(_names(path), path)
        if other != path:
            got = " and ".join(json.dumps(item) for item in (other, path))
            raise FormatError(
                f"two arrays would have the same name {keystr(path)}", got=got, hint="rename one of them"
            )
    for name, path in names.items():
        above = next((name[:depth] for depth in range(len(name)) if name[:depth] in names), None)
        if above is not None:
            raise FormatError(
                "a zarr array cannot contain other arrays",
                location=keystr(path),
                got=f"{SEPARATOR.join(above) or 'the root'} is an array",
                hint="rename one of them",
            )
