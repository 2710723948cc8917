"""Checkpoint formats: how to recognize and open a checkpoint, and how to lay one out in files.

To add a format, write one module with a `FORMAT` object and one line: see docs/add-a-format.md.

Every format is a `Format`. It declares further abilities by having the methods of the other protocols here,
`Writable` and `Supports…`; use `formats.registry` to query them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ckpttools.array.lazy import ByteSource
from ckpttools.array.storage import Sharding, Storage
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.options import Option
from ckpttools.core.region import Shape
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES
from ckpttools.formats.placement import ChunkFiles, Placement, Range, Referenced
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.location import Location

SIDECARS = "hf"
"""Directory inside an Orbax item for a model's sidecars: see `formats.sidecar`."""

RECORD = "ckpttools.json"
"""File in it that records which names the model used."""


@validate_fields
@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a checkpoint.

    Attributes:
        step: the training step to open; None takes the latest finished one.
        max_header_bytes: limit on a safetensors header; the reference implementation stops at 100 MB.
        max_index_bytes: memory limit for an OCDBT index that needs more than its size on disk suggests.
        with_optimizer: whether to read an optimizer's moments in formats that otherwise leave them out.
        prefer_rank: processes in order of preference; their values win if processes disagree on a tensor.
        all_items: whether to open all items of a step as one tree, each below its name, in formats with
            several
            items; otherwise only the item with the model is opened.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000
    max_index_bytes: int = MAX_INDEX_BYTES
    with_optimizer: bool = False
    prefer_rank: tuple[int, ...] = ()
    all_items: bool = False


class OtherSteps(NamedTuple):
    """Unreadable other steps of a run: directory name -> what is missing.

    Attributes:
        unfinished: steps whose save has not ended.
        damaged: steps whose save has ended.
    """

    unfinished: Mapping[str, str]
    damaged: Mapping[str, str]


class Format(Protocol):
    """A format that can be read: the type of the entry point's object."""

    @property
    def name(self) -> str:
        """Name that users see."""

    def why_not(self, path: Location) -> str | None:
        """Return None if `path` has this format, else a short reason. Read at most a few bytes."""

    def open(self, path: Location, options: ReadOptions) -> Tree:
        """Open the tree at `path` without reading any array.

        Raises:
            FormatError, StorageError: the files cannot be read in this format.
        """


@runtime_checkable
class SupportsShardings(Protocol):
    """A format that stores how arrays were sharded when they were saved."""

    def shardings(self, tree: Tree) -> Mapping[TreePath, Sharding]:
        """Return the stored sharding of each array, by path; empty if none is stored.

        Args:
            tree: a tree that this format opened.

        Raises:
            FormatError, StorageError: the file with the shardings is damaged or cannot be read.
        """


@runtime_checkable
class SupportsSteps(Protocol):
    """A format that keeps several steps of a run in one directory."""

    def other_steps(self, tree: Tree) -> OtherSteps:
        """Return later or half-written steps of the run from which this format opened a tree.

        Raises:
            StorageError: the run cannot be listed.
        """


@runtime_checkable
class SupportsLocation(Protocol):
    """A format whose checkpoints are directories that can also be opened by a parent directory."""

    def lies_at(self, path: Location) -> Location:
        """Return the directory of the checkpoint that a path opens: for a run, that of a step."""


@runtime_checkable
class SupportsStepFiles(Protocol):
    """A format whose directories can hold several checkpoints; opening the directory reads one of them."""

    def checkpoints_in(self, path: Location) -> Sequence[Location]:
        """Return all checkpoints at a path, including damaged ones; only the path if it is one checkpoint.

        Raises:
            StorageError: the path cannot be read.
        """


@runtime_checkable
class SupportsStorage(Protocol):
    """A format that knows more about how its arrays are stored than the arrays themselves tell."""

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        """Return the files of a tree that this format opened, and their content; reads no array.

        Raises:
            FormatError, StorageError: an index or the metadata of an array is damaged or cannot be read.
        """


@runtime_checkable
class SupportsFaults(Protocol):
    """A format that can find faults in a checkpoint, for `ckpt doctor`."""

    @property
    def looks_for(self) -> str:
        """Summary of the faults, in one line."""

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        """Yield the faults of a file or directory of this format, complete or damaged; reads no array.

        Raises:
            CheckpointError: the last fault; it prevents examining the rest.
        """


@runtime_checkable
class SupportsChecksums(Protocol):
    """A format with checksums that reading arrays does not verify."""

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """Yield the ranges with checksums in a file or directory, complete or damaged; reads no array.

        Raises:
            CheckpointError: the rest cannot be examined; `SupportsFaults.faults` reports why, unless a
                network
                store does not respond.
        """


@runtime_checkable
class SupportsRankPreference(Protocol):
    """A format with one file per process: `ReadOptions.prefer_rank` selects whose values are read."""

    @property
    def rank_files(self) -> str:
        """Names of these files and the program that writes them."""


@runtime_checkable
class SupportsFiles(Protocol):
    """A format that knows its own files; checkpoints of other formats are never replaced."""

    def owns(self, name: str) -> bool:
        """Return whether a path relative to a checkpoint is, or could be mistaken for, this format's."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """Yield files in a directory that are not part of the one checkpoint that the writer puts there.

        Args:
            directory: the directory.
            tree: the tree that this format opened there.

        Raises:
            StorageError: the directory cannot be listed.
        """


@runtime_checkable
class SupportsSidecarLookup(Protocol):
    """A format with a directory for configuration, tokenizer and so on: see `formats.sidecar`."""

    def sidecars(self, tree: Tree) -> Location:
        """Return the directory that has, or would have, the sidecars of a tree that this format opened."""


@dataclass(frozen=True)
class Layout:
    """The placement of all arrays of a checkpoint, known before the first byte is read.

    Attributes:
        placements: the placement of each array.
        files: final size in bytes of each data file whose size is known; growing files and those of single
            chunks are not included.
        links: existing files by the name of the link to them, relative to the checkpoint's root.
        remarks: remarks about this layout for the user.
        heads: the first bytes of data files that do not belong to an array.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]
    links: Mapping[str, ByteSource] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    heads: Mapping[str, bytes] = field(default_factory=dict)

    message_fields = ("remarks",)

    @property
    def nbytes(self) -> int:
        """Bytes that are certainly written to disk.

        The size of encoded chunks is unknown before they are encoded, and links and references take no
        space. If
        the disk fills up, the user can free space and resume the run.
        """
        files = sum(
            p.nbytes for p in self.placements.values() if isinstance(p.home, ChunkFiles) and not p.codec
        )
        return sum(self.files.values()) + files

    @property
    def referenced(self) -> Iterator[Referenced]:
        """The chunks of each array that are referenced instead of written."""
        for placement in self.placements.values():
            if isinstance(placement.home, Referenced):
                yield placement.home

    @cached_property
    def used(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """The (start, stop) ranges of each of `links` that chunks refer to, in order, without overlap."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.links}
        for home in self.referenced:
            for span in home.ranges:
                spans[span.file].append((span.offset, span.offset + span.nbytes))
        return {name: tuple(_joined(sorted(item))) for name, item in spans.items()}


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge sorted spans that overlap or touch."""
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
"""Location of each encoded chunk: (array, grid index) -> byte range of a file."""


class Writer(Protocol):
    """A format that can be written, with its options already set."""

    @property
    def name(self) -> str:
        """Name of the format."""

    def layout(self, tree: Tree, limit: int) -> Layout:
        """Place every array of the tree.

        Args:
            tree: the tree to write.
            limit: maximum bytes of a chunk that must be created in one piece.

        Raises:
            FormatError: the format cannot hold an array or a leaf; the message names it and a remedy.
        """

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """Write everything but the data files: index and metadata.

        The one or two files by which readers recognize a checkpoint are written last.

        Args:
            directory: the checkpoint's root.
            tree: the tree that was written.
            layout: the result of `layout`.
            extents: locations of encoded chunks; empty if no chunks are encoded.
        """


@runtime_checkable
class SupportsSidecars(Protocol):
    """A writer with a directory for sidecars; other writers leave them out and say so."""

    def sidecars_at(self, tree: Tree, is_model: bool) -> str:
        """Return the directory for sidecars, relative to the root; empty for the root itself.

        Args:
            tree: the tree to write.
            is_model: whether the arrays have the model's own names, so that its files can be next to them.
        """


@runtime_checkable
class SupportsUnownedFiles(Protocol):
    """A writer that knows better than its format which files at a destination are not its own."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """See `SupportsFiles.unowned_files`."""


@runtime_checkable
class WritesSteps(Protocol):
    """A writer of runs that may know which step of a run it writes."""

    @property
    def step_said(self) -> int | None:
        """Step number that the user passed, possibly to add a step; None without one."""


@dataclass(frozen=True, slots=True)
class Target:
    """The source and destination that a writer is created for.

    Attributes:
        tree: the source as opened; it provides step and names if the user passed none.
        destination: directory to write; None if it is not known yet.
        keeps_names: whether step and item keep the source's names if the user passed none.
        shares: whether unchanged data may be shared with the source by default: the command changes the tree
            rather than how it is stored.
        least_share: fraction of a file that must be used to share it by default; 0 for
            `ckpttools.formats.references.LEAST_SHARE`.
        declared: names of the options that the user set.
    """

    tree: Tree
    destination: Location | None = None
    keeps_names: bool = True
    shares: bool = False
    least_share: float = 0.0
    declared: frozenset[str] = frozenset()


@runtime_checkable
class Writable(Protocol):
    """A format that can be written."""

    @property
    def name(self) -> str:
        """Name that users see: the command is `ckpt convert to-NAME`."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Options for writing."""

    @property
    def help(self) -> str:
        """Description of the output for the command's help; may end with "Examples:" and lines."""

    def writer(self, target: Target, /, **options: Any) -> Writer:
        """Create the writer for a target.

        Args:
            target: what to write.
            options: values of all of `options`, with defaults for those that were not set.

        Raises:
            UsageError: options contradict each other.
        """
