"""What a format is: a way to recognise and open a checkpoint, and a way to lay one out in files.

Adding a format is one module with a `FORMAT` object and one line: see docs/add-a-format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ckpttools.array.lazy import ByteSource
from ckpttools.array.shardings import Sharding
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree
from ckpttools.core.region import Shape
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES
from ckpttools.formats.placement import ChunkFiles, Placement, Range, Referenced

COMPANIONS = "hf"
"""Directory inside an Orbax item for what belongs to the model besides its arrays: see `formats.sidecar`."""

RECORD = "ckpttools.json"
"""File beside them that says how the model spelled its names."""


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about reading.

    Attributes:
        step: the training step to open; None takes the latest finished one.
        max_header_bytes: longest safetensors header accepted; the reference implementation stops at 100 MB.
        max_index_bytes: memory that an OCDBT index may take, where its size on disk does not account for it.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000
    max_index_bytes: int = MAX_INDEX_BYTES


class OtherSteps(NamedTuple):
    """Other steps of a run that cannot be read: name of the directory -> what is missing.

    Attributes:
        unfinished: those whose save has not ended.
        damaged: those whose save has.
    """

    unfinished: Mapping[str, str]
    damaged: Mapping[str, str]


class Format(Protocol):
    """A format that can be read. The object named by the entry point has this shape.

    What is beside the arrays a format may tell by more methods: see `TellsShardings` and `TellsSteps`.
    """

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


@runtime_checkable
class TellsShardings(Protocol):
    """A format that keeps how arrays lay on devices when they were saved."""

    def shardings(self, tree: Tree) -> Mapping[TreePath, Sharding]:
        """Path of an array -> its sharding, of a tree that this format opened; empty where none was stored.

        Raises:
            FormatError, StorageError: a file that should say it is damaged or cannot be read.
        """


@runtime_checkable
class TellsSteps(Protocol):
    """A format that keeps several steps of a run beside each other."""

    def other_steps(self, tree: Tree) -> OtherSteps:
        """Later or half-written steps of the run that a tree is of, which this format opened.

        Raises:
            StorageError: the run may not be looked into.
        """


@dataclass(frozen=True)
class Layout:
    """All arrays of a checkpoint in their places, known before the first byte is read.

    Attributes:
        placements: for each array its place.
        files: final size in bytes of each data file whose content is known in size; those that grow, and
            those of single chunks, are not in here.
        links: files that are there already and get another name below the checkpoint's root, by that name.
        remarks: what the user should know of this layout.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]
    links: Mapping[str, ByteSource] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are certainly written to disk.

        What encoded chunks take is not known before they are encoded, and what is linked or referenced takes
        none; a disk that fills up while they are written can be cleared, and the run goes on.
        """
        files = sum(
            p.nbytes for p in self.placements.values() if isinstance(p.home, ChunkFiles) and not p.codec
        )
        return sum(self.files.values()) + files

    @property
    def referenced(self) -> Iterator[Referenced]:
        """The chunks of each array of which nothing is written."""
        for placement in self.placements.values():
            if isinstance(placement.home, Referenced):
                yield placement.home

    @cached_property
    def used(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """For each of `links` the parts (start, stop) that chunks refer to, in order; none overlap."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.links}
        for home in self.referenced:
            for each in home.ranges:
                spans[each.file].append((each.offset, each.offset + each.nbytes))
        return {name: tuple(_joined(sorted(each))) for name, each in spans.items()}


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans with those that overlap or touch made one."""
    start, stop = 0, 0
    for a, b in spans:
        if a > stop:
            if stop > start:
                yield start, stop
            start, stop = a, b
        stop = max(stop, b)
    if stop > start:
        yield start, stop


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
