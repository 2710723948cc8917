"""Write Orbax checkpoints: zarr chunks in data files with an OCDBT index, or each chunk in its own file.

Chunks are written in any order; index and metadata come last, so an interrupted write leaves nothing that
looks like a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any

from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.codecs.base import WritableCodec
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import call, option
from ckpttools.core.region import Shape, ceil_div, grid_indices
from ckpttools.formats.base import SIDECARS, Extents, Layout
from ckpttools.formats.checks import LONGEST_NAME, check_dtypes, check_paths, is_file_name
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.ocdbt import MANIFEST, Entry, Extent
from ckpttools.formats.orbax.ocdbt_files import encode
from ckpttools.formats.placement import Appended, ChunkFiles, DataFile, Placement, Range, Referenced
from ckpttools.formats.references import NO_REFERENCES, ReferenceMode, References, find
from ckpttools.formats.zarr import zarr3
from ckpttools.formats.zarr.array import ChunkKeys
from ckpttools.formats.zarr.chunking import GivenChunks, chunk_shape
from ckpttools.formats.zarr.zarr3 import DOCUMENT, written_codecs
from ckpttools.stores.location import Location

# Maximum number of options in the command of a hint.
_MAX_DROPS = 8

DATA_DIRECTORY = "d"
DATA_FILE = f"{DATA_DIRECTORY}/data"
INDEX_FILE = f"{DATA_DIRECTORY}/index"
# Chunks start on pages, so that they can be read and written without copying at the edges. For arrays smaller
# than a page, the gap is not worth it.
_PAGE, _LINE = 4096, 64
_NO_TARGET = 1 << 62


@dataclass(frozen=True, slots=True)
class OtherItem:
    """An item of a step that is not a tree.

    Attributes:
        handler: Orbax's name for the class that reads the item; "" if it is not recorded.
        files: Contents of the files by name.
    """

    handler: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class OrbaxWriter:
    """Writes `<root>/<step>/<item>` as `CheckpointManager` and MaxText do, `<item>` only, or an item.

    Attributes:
        step: Number of the step directory; None for the tree's step, or 0 if it has none.
        item: Name of the item in the step directory.
        ocdbt: Whether to write a few data files with an index, instead of a directory per array and a file
            per chunk.
        zarr3: Whether to write zarr v3 instead of v2.
        compression: Compression of chunks; None stores them uncompressed, which loads fastest.
        target_data_file_bytes: Size at which a new data file is started; None for one file.
        references: Decides which chunks are referenced in existing files instead of written.
        chunks: Chunk shapes set by the user; None for the defaults.
        shardings: Default shardings for loaders; arrays with a sharding are restored as JAX arrays.
        level: The kind of root directory: a "run" with one step, a "step", or an "item".
        beside: Further small items of the step, by name. Must be empty if `level` is "item".
    """

    step: int | None = 0
    item: str = "items"
    ocdbt: bool = True
    zarr3: bool = True
    compression: WritableCodec | None = None
    target_data_file_bytes: int | None = None
    references: References = NO_REFERENCES
    chunks: GivenChunks | None = None
    shardings: Mapping[Path, Sharding] = field(default_factory=dict)
    level: str = "run"
    beside: Mapping[str, OtherItem] = field(default_factory=dict)
    name: str = "orbax"

    def __post_init__(self) -> None:
        # Buckets do not allow control characters in names, and terminals interpret them.
        is_name = is_file_name(self.item) and self.item.isprintable()
        if not is_name or self.item in orbax_metadata.OWN_FILES:
            raise UsageError(
                f"{self.item!r} cannot be the name of an item",
                expected="a directory name, such as items, default or state, without control characters",
            )
        if self.target_data_file_bytes is not None and not self.ocdbt:
            raise UsageError(
                "without OCDBT every chunk is a file, so a target size for data files does not apply",
                hint=f"leave out {option('ocdbt', False)} or {option('target_data_file_size')}",
            )
        if self.references.mode is not ReferenceMode.NONE and not (self.ocdbt and self.zarr3):
            raise UsageError(
                "only zarr v3 under OCDBT can reference existing bytes",
                hint=f"leave out {option('reference', True)}, or {option('ocdbt', False)} and "
                f"{option('zarr3', False)}",
            )

    def layout(self, tree: Tree, limit: int) -> Layout:
        """See `Writer.layout`. Raw chunks in OCDBT have fixed locations; others are located when encoded."""
        self._check(tree)
        if self.chunks:
            self.chunks.check(tree.arrays)
        base = self._base(tree)
        result = find(tree, self.references, f"{base}{DATA_DIRECTORY}")
        files = _FileAllocator(f"{base}{DATA_FILE}", self.target_data_file_bytes)
        largest = None
        if self.compression:
            from ckpttools.codecs.zstd import LARGEST_ENCODED

            largest = min(limit, LARGEST_ENCODED)
        placements = dict(result.placements)
        for path, array in tree.arrays.items():
            if path in placements:
                continue
            itemsize = array.dtype.itemsize
            given = self.chunks.shape(path, array.shape) if self.chunks else None
            chunk = given or chunk_shape(array.shape, itemsize, array.stacked_axes, largest)
            destination = self._chunk_destination(base, path) or files.home(array.shape, chunk, itemsize)
            placements[path] = Placement(array.shape, itemsize, chunk, destination, self.compression)
        sizes = {name: size for name, size in files.sizes.items() if size}
        return Layout(placements, sizes, result.links, result.remarks)

    def unowned_files(self, directory: Location, tree: Tree) -> Iterator[str]:
        """See `SupportsUnownedFiles.unowned_files`: an item does not replace a run, nor a run a step."""
        from ckpttools.formats.orbax.owned_files import unowned_files

        return unowned_files(directory, tree, self.level)

    def sidecars_at(self, tree: Tree, is_model: bool) -> str:
        """See `SupportsSidecars.sidecars_at`: inside the item, where loaders ignore them."""
        return f"{self._base(tree)}{SIDECARS}"

    def _base(self, tree: Tree) -> str:
        """Return the path prefix of the item's files, relative to the root."""
        if self.level == "item":
            return ""
        if self.level == "step":
            return f"{self.item}/"
        step = tree.metadata.step or 0 if self.step is None else self.step
        return f"{step}/{self.item}/"

    @property
    def requested_step(self) -> int | None:
        """See `WritesSteps.requested_step`. Conversions of models write step 0."""
        return self.step or None if self.level == "run" else None

    def _chunk_destination(self, base: str, path: Path) -> ChunkFiles | Appended | None:
        """Return where chunks go if they have no fixed location in a data file, else None."""
        if not self.ocdbt:
            keys = self._chunk_keys
            return ChunkFiles(f"{base}{_key(path, '')}", keys.prefix, keys.separator)
        if self.compression:
            return Appended(f"{base}{DATA_FILE}", self.target_data_file_bytes or _NO_TARGET)
        return None

    @property
    def _chunk_keys(self) -> ChunkKeys:
        if self.zarr3:
            return zarr3.KEYS
        from ckpttools.formats.zarr import zarr2

        return zarr2.KEYS

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """See `Writer.finish`: writes index or documents, metadata at both levels, then the commit marks."""
        base = self._base(tree)
        item = directory / base.removesuffix("/") if base else directory
        if self.ocdbt:
            index = encode(self._entries(tree, layout, extents), INDEX_FILE)
            (item / INDEX_FILE).write_bytes(index.nodes)
            (item / MANIFEST).write_bytes(index.manifest)
        else:
            for key, document in self._documents(tree, layout):
                (item / key).write_bytes(document)
        for name, content in self._metadata(tree, layout).items():
            (item / name).write_bytes(json.dumps(content).encode())
        step = None if self.level == "item" else item.parent
        if step:
            handlers = {name: other.handler for name, other in self.beside.items() if other.handler}
            self._write_sidecars(step)
            outer = orbax_metadata.checkpoint_document(self.item, tree.metadata.custom, handlers)
            (step / orbax_metadata.CHECKPOINT_FILE).write_bytes(json.dumps(outer).encode())
        for location in (item, step) if step else (item,):
            (location / orbax_metadata.COMMIT_FILE).write_bytes(orbax_metadata.COMMIT_TEXT)

    def _write_sidecars(self, step: Location) -> None:
        for name, other in self.beside.items():
            for file, content in other.files.items():
                (step / name / file).write_bytes(content)
            (step / name / orbax_metadata.COMMIT_FILE).write_bytes(orbax_metadata.COMMIT_TEXT)

    def _documents(self, tree: Tree, layout: Layout) -> Iterator[tuple[str, bytes]]:
        """Yield the key and content of each array's own metadata."""
        codec = self.compression
        for path, array in tree.arrays.items():
            placement = layout.placements[path]
            if self.zarr3:
                destination = placement.home
                codecs = destination.codecs if isinstance(destination, Referenced) else written_codecs(codec)
                text = zarr3.encode(array.shape, array.dtype, placement.chunk, codecs)
                yield _key(path, DOCUMENT), text
            else:
                from ckpttools.formats.zarr import zarr2

                compressor = codec.zarr2_spec if codec else None
                text = zarr2.encode(array.shape, array.dtype, placement.chunk, compressor)
                yield _key(path, zarr2.DOCUMENT), text

    def _entries(self, tree: Tree, layout: Layout, extents: Extents) -> Iterator[tuple[bytes, Entry]]:
        """Yield index entries: each array's metadata inline, and each chunk as a range of a data file."""
        for key, document in self._documents(tree, layout):
            yield key.encode(), document
        below = len(self._base(tree))
        for path in tree.arrays:
            for index, location in _locations(path, layout.placements[path], extents):
                key = _key(path, self._chunk_keys.key(index))
                if isinstance(location, bytes):
                    yield key.encode(), location
                else:
                    yield key.encode(), Extent(location.file[below:], location.offset, location.nbytes)

    def _metadata(self, tree: Tree, layout: Layout) -> Mapping[str, Mapping[str, Any]]:
        """Return the contents of the item's JSON files by name."""
        keys = tree.metadata.key_impls.keys() & layout.placements.keys()
        chunks = {path: layout.placements[path].chunk for path in keys}
        result = {
            orbax_metadata.TREE_FILE: orbax_metadata.tree_document(
                tree, self.ocdbt, self.zarr3, self.shardings
            ),
            orbax_metadata.CHECKPOINT_FILE: orbax_metadata.checkpoint_document(None, tree.metadata.custom),
            orbax_metadata.STRINGS_FILE: orbax_metadata.strings_document(tree),
            **orbax_metadata.random_key_documents(tree, chunks),
            orbax_metadata.SHARDING_FILE: orbax_metadata.sharding_document(tree, self.shardings, keys),
        }
        return {name: content for name, content in result.items() if content}

    def _check(self, tree: Tree) -> None:
        check_paths(tree, dotted, "Orbax")
        _check_names(tree)
        _check_sizes(tree)
        if self.zarr3:
            check_dtypes(tree, lambda dtype: dtype.zarr3, "zarr v3")
        else:
            check_dtypes(tree, lambda dtype: dtype.zarr2, "zarr v2")
        if not self.ocdbt:
            _check_directories(tree)


def _locations(path: Path, placement: Placement, extents: Extents) -> Iterator[tuple[Shape, Range | bytes]]:
    """Yield the grid index of every chunk of an array with its location, or with the chunk itself."""
    destination = placement.home
    for position, index in enumerate(grid_indices(placement.shape, placement.chunk)):
        if isinstance(destination, Referenced):
            yield index, destination.location(position)
        else:
            yield index, extents[path, index] if placement.codec else placement.chunk_range(index)


@dataclass
class _FileAllocator:
    """Assigns consecutive locations in data files to arrays.

    Attributes:
        name: Name of the only file; with a target, numbers are appended for each file.
        target: Size at which a new file is started.
        sizes: Final size of each file, in bytes.
    """

    name: str
    target: int | None
    sizes: dict[str, int] = field(default_factory=dict)
    _files: int = 0

    def __post_init__(self) -> None:
        if self.target is None:
            self.sizes[self.name] = 0

    def home(self, shape: Shape, chunk: Shape, itemsize: int) -> DataFile:
        """Allocate the location of the next array."""
        array = Placement(shape, itemsize, chunk, DataFile(""))
        if self.target is not None and array.nbytes > self.target:
            return self._allocate_striped(array, self.target)
        file, start = self._next(array.nbytes)
        self.sizes[file] = start + array.nbytes
        return DataFile(file, start)

    def _next(self, nbytes: int) -> tuple[str, int]:
        """Allocate the file and offset for an array that fits in one file."""
        file = next(reversed(self.sizes), None)
        if file is not None:
            alignment = _PAGE if nbytes >= _PAGE else _LINE
            start = ceil_div(self.sizes[file], alignment) * alignment
            if self.target is None or start + nbytes <= self.target:
                return file, start
        return self._new_name(), 0

    def _allocate_striped(self, array: Placement, target: int) -> DataFile:
        """Place an array in files of its own, each with as many chunks as the target allows."""
        per_file = max(1, target // array.chunk_nbytes)
        destination = DataFile(self._new_name(), 0, per_file)
        chunks = array.nbytes // array.chunk_nbytes
        for first in range(0, chunks, per_file):
            file, _ = destination.location(first, array.chunk_nbytes)
            self.sizes[file] = min(per_file, chunks - first) * array.chunk_nbytes
        return destination

    def _new_name(self) -> str:
        self._files += 1
        return f"{self.name}-{self._files - 1:05d}"


def _key(path: Path, below: str) -> str:
    """Return the key of an array. Orbax uses an empty name for an array that is the full tree."""
    name = dotted(path)
    return f"{name}/{below}" if name else below


def _check_sizes(tree: Tree) -> None:
    """Reject arrays without elements, which Orbax cannot store."""
    paths = [path for path, array in tree.arrays.items() if not array.size]
    if paths:
        empty = [f"{keystr(path)}: {list(tree.arrays[path].shape)}" for path in paths]
        source, drops = tree.metadata.location or "SRC", [*map(keystr, paths[:_MAX_DROPS])]
        more = " and so on" if len(paths) > _MAX_DROPS else ""
        raise FormatError(
            "Orbax cannot store arrays without elements:" + listing(empty),
            location=tree.metadata.location or None,
            hint=f"leave them out: {call('select', source, 'DST', format='orbax', drop=drops)}{more}; or "
            "keep "
            f"them in plain zarr v3: {call('convert', source, 'DST', format='zarr3')}",
        )


def _check_names(tree: Tree) -> None:
    """Reject names that collide or are ambiguous in Orbax, which joins keys with dots.

    tensorstore drops a trailing slash (`a/` becomes `a`), and the root of all arrays cannot have a name.
    """
    unclear = [json.dumps(path) for path in tree.arrays if path and "" in keystr(path).split("/")]
    if unclear:
        source = tree.metadata.location or "SRC"
        raise FormatError(
            "these names have empty parts and collide with others in Orbax:" + listing(unclear),
            location=tree.metadata.location or None,
            expected="non-empty keys without '//' that neither start nor end with '/'",
            hint=f"rename them: {call('remap', source, 'DST', format='orbax', map='RULES.toml')}; "
            'the file has [[rules]] with from = "" and to = "unnamed", and so on',
        )
    names: dict[str, Path] = {}
    for path in tree:
        other = names.setdefault(dotted(path), path)
        if other != path:
            raise FormatError(
                "two paths have the same name in Orbax, which joins keys with dots",
                location=keystr(path),
                got=f"{keystr(other)} is also {dotted(path)!r}",
                hint="rename one of them",
            )


def _check_directories(tree: Tree) -> None:
    """Reject names that cannot be directories: without OCDBT, arrays are next to Orbax's own files."""
    names = [dotted(path) for path in tree.arrays if path]
    invalid = [name for name in names if not is_file_name(name) or _is_reserved(name)]
    if invalid:
        raise FormatError(
            "without OCDBT these arrays would need invalid directory names:" + listing(invalid),
            location=tree.metadata.location or None,
            expected=f"names without '/' and '\\', of at most {LONGEST_NAME} bytes, that are not in use",
            hint=f"write with {option('ocdbt', True)}, or rename them",
        )


def _is_reserved(name: str) -> bool:
    """Return whether Orbax or ckpttools uses this name for a file or directory in an item."""
    return name in orbax_metadata.OWN_FILES or name == SIDECARS or fnmatchcase(name, PROCESSES)
