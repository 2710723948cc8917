"""What a format is: a way to recognise and open a checkpoint, and a way to lay one out in files.

Adding a format is one module with a `FORMAT` object and one entry-point line; see docs/add-a-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckpttools.formats.placement import Placement, Range
from ckpttools.ir.tree import Path as TreePath
from ckpttools.ir.tree import Tree
from ckpttools.region import Shape


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about reading.

    Attributes:
        step: the training step to open; None takes the latest finished one.
        max_header_bytes: longest safetensors header accepted; the reference implementation stops at 100 MB.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000


class Format(Protocol):
    """A format that can be read. The object named by the entry point has this shape."""

    @property
    def name(self) -> str:
        """The name users see."""

    def why_not(self, path: Path) -> str | None:
        """None if `path` is of this format, else the reason in a few words. Reads a few bytes at most."""

    def open(self, path: Path, options: ReadOptions) -> Tree:
        """The tree at `path`, without reading any array.

        Raises:
            FormatError, StorageError: what is there cannot be read as this format.
        """


@dataclass(frozen=True)
class Layout:
    """All arrays of a checkpoint in their places, known before the first byte is read.

    Attributes:
        placements: for each array its place.
        files: final size in bytes of each data file whose content is known in size; those that grow, and
            those of single chunks, are not in here.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes on disk at most, as far as they can be known before chunks are encoded."""
        others = (p for p in self.placements.values() if p.codec or not self.files)
        return sum(self.files.values()) + sum(placement.nbytes for placement in others)


Extents = Mapping[tuple[TreePath, Shape], Range]
"""Where encoded chunks went: (array, grid index) -> bytes of a file."""


class Writer(Protocol):
    """A format that can be written, with its options already chosen."""

    @property
    def name(self) -> str:
        """The format's name."""

    def layout(self, tree: Tree, most: int) -> Layout:
        """Places every array of the tree.

        Args:
            tree: what will be written.
            most: bytes that a chunk may have at most, where chunks must be made whole.

        Raises:
            FormatError: the format cannot hold an array or a leaf; names it and what would do.
        """

    def finish(self, directory: Path, tree: Tree, layout: Layout, extents: Extents) -> None:
        """Writes everything but the arrays' bytes, which are in their places: headers, index, metadata.

        Args:
            directory: the checkpoint's root.
            tree: what was written.
            layout: as `layout` gave it.
            extents: where encoded chunks went; empty where none are encoded.
        """
