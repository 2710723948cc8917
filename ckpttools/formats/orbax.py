"""Reading Orbax checkpoints (OCDBT with zarr v3) from their own index, without Orbax or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path as FilePath

from ckpttools.errors import FormatError
from ckpttools.formats import ocdbt, orbax_metadata, orbax_steps
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax_metadata import SavedLeaf, read_json
from ckpttools.formats.zarr3 import ArrayDocument, chunk_key, parse_document
from ckpttools.ir.nodes import Chunked, Stored
from ckpttools.ir.tree import Empty, Leaf, Metadata, Path, Text, Tree, dotted, spelled
from ckpttools.region import Shape
from ckpttools.stores.local import LocalFile
from ckpttools.stores.memory import Bytes

_MANIFEST = "manifest.ocdbt"


@dataclass(frozen=True)
class Orbax:
    """The format `orbax`."""

    name: str = "orbax"

    def why_not(self, path: FilePath) -> str | None:
        return orbax_steps.why_not(path)

    def open(self, path: FilePath, options: ReadOptions) -> Tree:
        item = orbax_steps.find_item(path, options.step)
        document = read_json(item.directory / orbax_metadata.TREE_FILE)
        saved = orbax_metadata.parse_tree(document, str(item.directory / orbax_metadata.TREE_FILE))
        if document.get("use_zarr3") is False:
            raise FormatError("arrays in zarr v2 are not read yet", place=item.directory, wanted="zarr v3")
        leaves = _Leaves(item.directory, _index(item.directory))
        metadata = Metadata(
            format=self.name,
            step=item.step,
            custom=_custom_metadata(item),
            scalars=frozenset(each.path for each in saved if each.value_type == "scalar"),
            place=str(item.directory),
        )
        return Tree({each.path: leaves.leaf(each) for each in saved}, metadata)


FORMAT = Orbax()


def _custom_metadata(item: orbax_steps.Item) -> Mapping[str, object]:
    """What the user said when saving; at the step, or in the item's own copy."""
    for directory in (item.step_directory, item.directory):
        path = directory / orbax_metadata.CHECKPOINT_FILE
        if path.is_file():
            custom = read_json(path).get("custom_metadata")
            if custom:
                return dict(custom)
    return {}


def _index(directory: FilePath) -> Mapping[bytes, ocdbt.Entry]:
    if not (directory / _MANIFEST).is_file():
        raise FormatError(
            f"there is no {_MANIFEST}",
            place=directory,
            wanted="a checkpoint with the OCDBT index, as Orbax and MaxText write by default",
            hint="unmerged or per-array directories are not read yet",
        )

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        source = LocalFile.at(directory / file)
        try:
            return source.read(offset, source.size - offset if length is None else length)
        finally:
            source.close()

    return ocdbt.read(fetch)


class _Leaves:
    """Makes lazy arrays from index entries; data files are opened once and shared."""

    def __init__(self, directory: FilePath, index: Mapping[bytes, ocdbt.Entry]) -> None:
        self._directory = directory
        self._index = index
        self._files: dict[str, LocalFile] = {}
        self._strings: Mapping[str, str] | None = None

    def leaf(self, saved: SavedLeaf) -> Leaf:
        if saved.is_empty:
            return Empty(saved.value_type)
        if saved.value_type == "string":
            return Text(self._string(saved.path))
        return self._array(saved.path)

    def _string(self, path: Path) -> str:
        if self._strings is None:
            self._strings = read_json(self._directory / orbax_metadata.STRINGS_FILE)
        return self._strings[dotted(path)]

    def _array(self, path: Path) -> Chunked:
        name = dotted(path)
        entry = self._index.get(f"{name}/zarr.json".encode())
        if entry is None:
            raise FormatError(
                f"the index has no {name}/zarr.json",
                place=self._directory,
                hint="the tree metadata names this array: the index is of another checkpoint, or of zarr v2",
            )
        data = entry if isinstance(entry, bytes) else self._bytes(entry)
        document = parse_document(data, f"{self._directory}: {name}/zarr.json")
        part = partial(self._chunk, path, document)
        return Chunked(document.shape, document.dtype, document.chunk, part)

    def _bytes(self, extent: ocdbt.Extent) -> bytes:
        return self._file(extent.file).read(extent.offset, extent.length)

    def _file(self, name: str) -> LocalFile:
        if name not in self._files:
            self._files[name] = LocalFile.at(self._directory / name)
        return self._files[name]

    def _chunk(self, path: Path, document: ArrayDocument, index: Shape) -> Stored:
        if not document.is_raw:
            codecs = ", ".join(str(codec.get("name")) for codec in document.codecs)
            raise FormatError("only raw chunks can be read", place=spelled(path), got=f"codecs {codecs}")
        entry = self._index.get(f"{dotted(path)}/{chunk_key(index)}".encode())
        wanted = prod(document.chunk) * document.dtype.itemsize
        length = len(entry) if isinstance(entry, bytes) else entry.length if entry else None
        if entry is None or length != wanted:
            raise FormatError(
                "a chunk is missing" if entry is None else "a chunk has the wrong length",
                place=f"{self._directory}: {spelled(path)}, chunk {chunk_key(index)}",
                got="no entry in the index" if entry is None else f"{length} bytes",
                wanted=f"{wanted} bytes",
            )
        if isinstance(entry, bytes):
            return Stored(document.chunk, document.dtype, Bytes(spelled(path), entry), 0, True)
        return Stored(document.chunk, document.dtype, self._file(entry.file), entry.offset, True)
