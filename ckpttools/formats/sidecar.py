"""A model's sidecars: configuration, tokenizer, and arrays that no mapping covers.

Loaders ignore an additional directory inside an Orbax item (tested with CheckpointManager, both checkpointers
and v1). Next to the items, it would be mistaken for an item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import cached_property

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Metadata, Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, SourceChangedError
from ckpttools.core.message_terms import call, retry_term
from ckpttools.formats.base import SIDECARS, Extents, Layout, Writer, WritesSteps
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.stores.base import File, check_unchanged
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

CARRIED = "carried"
# Files next to the weights that transformers and tokenizers read, except weights, their index and images.
PATTERNS = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template*",
    "*.jinja",
    "*.tiktoken",
)
_LARGEST = 256 << 20
_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Sidecars:
    """The files and arrays to copy with a model.

    Attributes:
        files: Name -> file to copy byte for byte, as it was when opened.
        arrays: Name -> array to keep unchanged.
    """

    files: Mapping[str, File] = field(default_factory=dict)
    arrays: Mapping[str, LazyArray] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Include the versions, because the fingerprint of a run contains its writer's representation.

        Raises:
            FormatError, StorageError: A file cannot be read.
        """
        return f"Companions({self.versions})"

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The digest of each local file, and the store's version of each other file, by name.

        Local files need a digest: different content can have the same size and modification time, and a copy
        of a file can have another modification time.
        """
        return {name: _version(file) for name, file in self.files.items()}

    def __bool__(self) -> bool:
        return bool(self.files or self.arrays)


def files_of_model(directory: Location) -> dict[str, File]:
    """Return the configuration and tokenizer files in a directory, by name.

    Raises:
        StorageError: A file cannot be accessed.
    """
    result = {path.name: path for pattern in PATTERNS for path in directory.glob(pattern)}
    files = {
        name: path.open()
        for name, path in sorted(result.items())
        if path.is_file() and not name.startswith(".")
    }
    return {name: file for name, file in files.items() if file.size <= _LARGEST}


@dataclass(frozen=True)
class WithSidecars:
    """A writer that also writes sidecars to a directory of its output.

    Attributes:
        writer: Writes the checkpoint.
        sidecars: The sidecars.
        directory: Directory of the sidecars, relative to the root; empty for the root itself.
        built: Name -> content of each further file.
    """

    writer: Writer
    sidecars: Sidecars
    directory: str = ""
    built: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.writer.name

    @property
    def requested_step(self) -> int | None:
        """See `WritesSteps.requested_step`."""
        return self.writer.requested_step if isinstance(self.writer, WritesSteps) else None

    def with_sidecars(self, tree: Tree) -> Tree:
        """Return the tree to plan, which includes the sidecar arrays.

        Raises:
            FormatError: An array of the tree has the path of a sidecar.
        """
        carried = {(*_PREFIX, name): array for name, array in self.sidecars.arrays.items()}
        for path in carried.keys() & tree.leaves.keys():
            raise FormatError(
                "an array has the name of an array that is copied with the model",
                location=keystr(path),
                expected=f"other names than those below {keystr(_PREFIX)}",
                hint=f"rename it: {call('remap', 'SRC', 'DST', map='RULES')}",
            )
        return Tree({**tree.leaves, **carried}, tree.metadata)

    def layout(self, tree: Tree, limit: int) -> Layout:
        """See `Writer.layout`. The tree must come from `with_sidecars`."""
        own, carried = self._split_sidecars(tree)
        layout = self.writer.layout(own, limit)
        if not carried:
            return layout
        extra = _unmapped_writer().layout(carried, limit)
        files = {self._location(name): size for name, size in extra.files.items()}
        heads = {self._location(name): head for name, head in extra.heads.items()}
        placements = {
            (*_PREFIX, *path): self._relocate_placement(location)
            for path, location in extra.placements.items()
        }
        return replace(
            layout,
            placements={**layout.placements, **placements},
            files={**layout.files, **files},
            heads={**layout.heads, **heads},
        )

    def _split_sidecars(self, tree: Tree) -> tuple[Tree, Tree]:
        """Split a tree into the writer's arrays and the sidecar arrays, which are identified by name."""
        carried: dict[Path, Leaf] = {(name,): tree[(*_PREFIX, name)] for name in self.sidecars.arrays}
        own = {path: leaf for path, leaf in tree.items() if not self._is_sidecar(path)}
        return Tree(own, tree.metadata), Tree(carried, Metadata(location=tree.metadata.location))

    def _is_sidecar(self, path: Path) -> bool:
        return len(path) == 3 and path[:2] == _PREFIX and path[2] in self.sidecars.arrays

    def _drop_sidecars(self, layout: Layout) -> Layout:
        placements = layout.placements.items()
        kept = {path: location for path, location in placements if not self._is_sidecar(path)}
        return replace(layout, placements=kept)

    def _location(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name

    def _relocate_placement(self, placement: Placement) -> Placement:
        """Return a placement in the sidecar file, with paths relative to the root."""
        destination = placement.home
        if not isinstance(destination, DataFile):
            raise TypeError(f"{destination} is not a part of a data file")
        return replace(placement, home=replace(destination, file=self._location(destination.file)))

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """See `Writer.finish`. Copies files before the writer commits the checkpoint.

        Raises:
            FormatError: A sidecar has changed since it was opened.
            StorageError: A sidecar cannot be read.
        """
        own, _ = self._split_sidecars(tree)
        location = directory / self.directory
        for name, file in self.sidecars.files.items():
            content = read_file(file)
            if _is_local(file) and _digest([content]) != self.sidecars.versions[name]:
                raise SourceChangedError(
                    f"{file.path} was changed after the conversion was planned", hint=retry_term()
                )
            (location / name).write_bytes(content)
        for name, content in self.built.items():
            (location / name).write_bytes(content)
        self.writer.finish(directory, own, self._drop_sidecars(layout), extents)


def sidecar_versions(writer: Writer, planned: Callable[[str], str] = str) -> dict[str, str]:
    """Return the version of each of a writer's sidecars, by name; see `Sidecars.versions`.

    Args:
        writer: The writer with the sidecars.
        planned: Replaces the paths in a text with those on the host that made the plan.

    Raises:
        FormatError, StorageError: A file cannot be read.
    """
    versions: dict[str, str] = {}
    while isinstance(writer, WithSidecars):
        result = writer.built.items()
        versions |= writer.sidecars.versions
        versions |= {name: _digest([planned(repr(content)).encode()]) for name, content in result}
        writer = writer.writer
    return versions


def sidecar_contents(writer: Writer) -> dict[str, bytes]:
    """Return the content of each file that a writer adds to the weights, by name.

    Raises:
        FormatError, StorageError: A file cannot be read.
    """
    contents: dict[str, bytes] = {}
    while isinstance(writer, WithSidecars):
        copied = writer.sidecars.files.items()
        contents |= {name: file.read(0, file.size) for name, file in copied}
        contents |= writer.built
        writer = writer.writer
    return contents


def _version(file: File) -> str:
    if not _is_local(file):
        return f"{file.size} bytes, version {file.version}"
    starts = range(0, file.size, _HASH_BLOCK_BYTES)
    return _digest(file.read(start, min(_HASH_BLOCK_BYTES, file.size - start)) for start in starts)


def _is_local(file: File) -> bool:
    return parse(file.path).store.scheme == "file"


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256 {digest.hexdigest()}"


_PREFIX: Path = (SIDECARS, CARRIED)


def _unmapped_writer() -> Writer:
    """Return the writer for unmapped arrays, which few models have."""
    from ckpttools.formats.safetensors.write import SafetensorsWriter

    return SafetensorsWriter(max_shard_bytes=None, stem=CARRIED)


def read_file(file: File) -> bytes:
    """Read a sidecar as it was when opened.

    Raises:
        SourceChangedError: The file has changed since it was opened.
        FormatError, StorageError: The file cannot be read.
    """
    try:
        content = file.read(0, file.size)
        file.close()
    except FormatError:
        check_unchanged([file])
        raise
    check_unchanged([file])
    return content
