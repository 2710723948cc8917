"""What travels with a model besides its arrays: configuration, tokenizer, and arrays nobody maps.

Inside an Orbax item a directory of ours disturbs no loader (CheckpointManager, both checkpointers and v1
were tried); beside the items it would be taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath

from ckpttools.formats.base import COMPANIONS, Extents, Layout, Writer
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.formats.safetensors_write import SafetensorsWriter
from ckpttools.ir.array import LazyArray
from ckpttools.ir.tree import Metadata, Path, Tree
from ckpttools.stores.files import write_file
from ckpttools.stores.local import read_whole

CARRIED = "carried"
# What transformers and tokenizers read beside the weights; not the weights, their index, or pictures.
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


@dataclass(frozen=True)
class Companions:
    """What goes along.

    Attributes:
        files: name -> the file that is copied, byte for byte.
        arrays: name -> array that is kept as it is.
    """

    files: Mapping[str, FilePath] = field(default_factory=dict)
    arrays: Mapping[str, LazyArray] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.files or self.arrays)


def files_of_model(directory: FilePath) -> dict[str, FilePath]:
    """Name -> file of the configuration and tokenizer in a directory."""
    found = {path.name: path for pattern in PATTERNS for path in directory.glob(pattern)}
    return {
        name: path
        for name, path in sorted(found.items())
        if path.is_file() and not name.startswith(".") and path.stat().st_size <= _LARGEST
    }


@dataclass(frozen=True)
class Beside:
    """A writer, and companions in a directory of what it writes.

    Attributes:
        writer: writes the checkpoint.
        companions: what goes along.
        directory: where they go, relative to the root; empty for the root itself.
        made: name -> content of further files.
    """

    writer: Writer
    companions: Companions
    directory: str = ""
    made: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.writer.name

    def with_companions(self, tree: Tree) -> Tree:
        """The tree to plan: what the writer writes, and the arrays that go along."""
        carried = {(*_PREFIX, name): array for name, array in self.companions.arrays.items()}
        return Tree({**tree.leaves, **carried}, tree.metadata)

    def layout(self, tree: Tree, most: int) -> Layout:
        """As `Writer.layout`, for a tree of `with_companions`."""
        own, carried = _apart(tree)
        layout = self.writer.layout(own, most)
        if not carried:
            return layout
        extra = _WRITER.layout(carried, most)
        files = {self._place(name): size for name, size in extra.files.items()}
        placements = {(*_PREFIX, *path): self._placed(place) for path, place in extra.placements.items()}
        return replace(
            layout,
            placements={**layout.placements, **placements},
            files={**layout.files, **files},
        )

    def _place(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name

    def _placed(self, placement: Placement) -> Placement:
        """A place in the carried file, seen from the root."""
        home = placement.home
        if not isinstance(home, DataFile):
            raise TypeError(f"{home} is no part of a data file")
        return replace(placement, home=replace(home, file=self._place(home.file)))

    def finish(self, directory: FilePath, tree: Tree, layout: Layout, extents: Extents) -> None:
        """As `Writer.finish`; files are copied before the writer says that all is there."""
        own, carried = _apart(tree)
        place = directory / self.directory
        for name, path in self.companions.files.items():
            write_file(place / name, read_file(path))
        for name, content in self.made.items():
            write_file(place / name, content)
        if carried:
            _WRITER.finish(place, carried, _WRITER.layout(carried, 1), {})
        self.writer.finish(directory, own, _without_companions(layout), extents)


_PREFIX: Path = (COMPANIONS, CARRIED)
_WRITER = SafetensorsWriter(max_shard_bytes=None, stem=CARRIED)


def _apart(tree: Tree) -> tuple[Tree, Tree]:
    """The tree itself, and the companions' arrays by their names."""
    carried = {path[len(_PREFIX) :]: leaf for path, leaf in tree.items() if path[: len(_PREFIX)] == _PREFIX}
    own = {path: leaf for path, leaf in tree.items() if path[: len(_PREFIX)] != _PREFIX}
    return Tree(own, tree.metadata), Tree(carried, Metadata(place=tree.metadata.place))


def _without_companions(layout: Layout) -> Layout:
    kept = {path: place for path, place in layout.placements.items() if path[: len(_PREFIX)] != _PREFIX}
    return replace(layout, placements=kept)


def read_file(path: FilePath) -> bytes:
    """A companion's content.

    Raises:
        StorageError: it cannot be read.
    """
    return read_whole(path)
