"""Write safetensors: one file, or shards with the index that Hugging Face libraries read.

Every tensor's location is known before the first byte is read, so tasks can run in any order. The index is
written last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import action, option
from ckpttools.formats import flat
from ckpttools.formats.base import SIDECARS, Extents, Layout
from ckpttools.formats.checks import check_dtypes, check_paths
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.formats.safetensors.header import MAX_HEADER_BYTES, METADATA
from ckpttools.stores.location import Location

STEM = "model"
DEFAULT_SHARD_BYTES = 5_000_000_000
# transformers rejects files that do not name a framework it knows.
_FRAMEWORK = {"format": "pt"}
_LENGTH_BYTES = 8
_PAGE, _WORD = 4096, 8


@dataclass(frozen=True)
class SafetensorsWriter:
    """Writes `model.safetensors`, or shards like `model-00001-of-00003.safetensors` with an index.

    Attributes:
        max_shard_bytes: Maximum size of the tensors in a file, except for a single larger tensor; None writes
            one file.
        separator: Separator that joins the keys of a path.
        stem: Start of the file names.
    """

    max_shard_bytes: int | None = DEFAULT_SHARD_BYTES
    separator: str = "."
    name: str = "safetensors"
    stem: str = STEM

    def layout(self, tree: Tree, limit: int) -> Layout:
        """See `Writer.layout`. Every array is contiguous."""
        shards = self._shards(tree)
        placements: dict[Path, Placement] = {}
        for shard in shards:
            for path, start in shard.starts.items():
                array = tree.arrays[path]
                # A grid cell has at least one element even if the array is empty.
                chunk = tuple(max(1, length) for length in array.shape)
                destination = DataFile(shard.file, len(shard.header) + start)
                placements[path] = Placement(array.shape, array.dtype.itemsize, chunk, destination)
        files = {shard.file: shard.nbytes for shard in shards}
        return Layout(placements, files, heads={shard.file: shard.header for shard in shards})

    def sidecars_at(self, tree: Tree, is_model: bool) -> str:
        """See `SupportsSidecars.sidecars_at`: for models, where transformers looks for sidecars."""
        return "" if is_model else SIDECARS

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """See `Writer.finish`. Writes the index if there is more than one file."""
        shards = self._shards(tree)
        if len(shards) > 1:
            document = _index(shards, flat.names(tree, self.separator), tree)
            text = json.dumps(document, indent=2, sort_keys=True) + "\n"
            (directory / f"{self.stem}.safetensors.index.json").write_bytes(text.encode())

    def _shards(self, tree: Tree) -> list[_PlannedFile]:
        """Return the planned files with their headers; deterministic for a tree."""
        names = flat.names(tree, self.separator)
        check_paths(tree, lambda path: names.get(path) or keystr(path), self.name)
        _check_names(names, tree)
        # The format packs elements smaller than a byte, but arrays here hold one per byte, and packing is not
        # implemented.
        check_dtypes(
            tree,
            lambda dtype: None if dtype.packed else dtype.safetensors,
            "the safetensors writer",
        )
        paths = list(names)
        groups = split([tree.arrays[path].nbytes for path in paths], self.max_shard_bytes)
        files = _file_names(self.stem, len(groups))
        extra = _extra(tree, self.separator)
        shards = []
        for number, (file, group) in enumerate(zip(files, groups, strict=True)):
            arrays = {paths[i]: tree.arrays[paths[i]] for i in group}
            metadata = {**extra, **_FRAMEWORK} if number == 0 else _FRAMEWORK
            shards.append(_plan_file(file, arrays, names, metadata))
        return shards


@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """A data file to write.

    Attributes:
        file: Name of the file.
        header: The bytes before the data.
        starts: Offset of each array in the data, in file order.
        nbytes: Size of the file in bytes.
    """

    file: str
    header: bytes
    starts: Mapping[Path, int]
    nbytes: int


def split(sizes: Sequence[int], limit: int | None) -> list[list[int]]:
    """Group the indices of `sizes` so that the sizes of each group add up to at most `limit` bytes.

    Follows `split_torch_state_dict_into_shards` of huggingface_hub: groups are filled in order, and an item
    larger than the limit gets its own group.
    """
    if limit is None:
        return [list(range(len(sizes)))]
    groups: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for position, size in enumerate(sizes):
        if size > limit:
            groups.append([position])
            continue
        if filled + size > limit:
            groups.append(current)
            current, filled = [], 0
        current.append(position)
        filled += size
    return [*groups, current] if current or not groups else groups


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _plan_file(
    file: str, arrays: Mapping[Path, LazyArray], names: Mapping[Path, str], metadata: Mapping[str, str]
) -> _PlannedFile:
    fields: dict[str, object] = {METADATA: dict(sorted(metadata.items()))}
    starts: dict[Path, int] = {}
    end = 0
    for path in _byte_order(arrays):
        array = arrays[path]
        starts[path], end = end, end + array.nbytes
        fields[names[path]] = {
            "dtype": array.dtype.safetensors,
            "shape": array.shape,
            "data_offsets": (starts[path], end),
        }
    header = _header(fields, _PAGE if any(map(_is_pages, arrays.values())) else _WORD)
    if len(header) - _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise FormatError(
            "the header of a file would be longer than readers accept",
            location=file,
            got=f"{len(header) - _LENGTH_BYTES} bytes for {len(arrays)} arrays",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            hint=f"spread the arrays over more files with a smaller {option('max_shard_size')}",
        )
    return _PlannedFile(file, header, starts, len(header) + end)


def _byte_order(arrays: Mapping[Path, LazyArray]) -> list[Path]:
    """Return the order of the data: arrays of full pages first, then the rest by decreasing element size.

    The format has no gaps. In this order, every array starts at a multiple of its element size. The reference
    implementation sorts only by element size. Arrays of full pages come first because they are then
    page-aligned and can be written without the page cache. Measured for 2.47 GB with two threads: a steady
    1.2 to 1.5 s, compared to 1.1 to 6.1 s for unaligned data.
    """
    return sorted(arrays, key=lambda path: (not _is_pages(arrays[path]), -arrays[path].dtype.itemsize))


def _is_pages(array: LazyArray) -> bool:
    return array.nbytes > 0 and array.nbytes % _PAGE == 0


def _header(fields: Mapping[str, object], alignment: int) -> bytes:
    """Encode length and JSON, padded with spaces, which the format allows, to align the data."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _extra(tree: Tree, separator: str) -> dict[str, str]:
    """Return the metadata from which the tree is restored when it is read."""
    custom = dict(tree.metadata.custom)
    if flat.is_flat(tree):
        if tree.metadata.format == "safetensors":
            # The format defines the names of frameworks.
            custom.pop("format", None)
        reserved = flat.ENTRY in custom or custom.get("format", "pt") != "pt"
        if not reserved and all(map(_is_text, (*custom, *custom.values()))):
            return custom
    return {flat.ENTRY: flat.describe(tree, separator)}


def _is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can encode, without unpaired surrogates."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_names(names: Mapping[Path, str], tree: Tree) -> None:
    reserved = next((path for path, name in names.items() if name == METADATA), None)
    if reserved is not None:
        remap = action("remap", "SRC", "DST", map="RULES")
        raise FormatError(
            f"safetensors cannot hold an array called {METADATA!r}",
            location=tree.metadata.location or None,
            hint=f"rename {keystr(reserved)} with {remap}",
        )


def _index(shards: Sequence[_PlannedFile], names: Mapping[Path, str], tree: Tree) -> dict[str, object]:
    return {
        "metadata": {"total_size": tree.nbytes},
        "weight_map": {names[path]: shard.file for shard in shards for path in shard.starts},
    }
