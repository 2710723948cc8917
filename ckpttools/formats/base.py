"""Checkpoint formats: how to recognize and open a checkpoint, and how to lay one out in files.

To add a format, write one module with a `FORMAT` object and one line: see docs/add-a-format.md.

Every format is a `Format`. It has further abilities if it implements the other protocols of this module,
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
"""Directory inside an Orbax item for a model's sidecars; see `formats.sidecar`."""

RECORD = "ckpttools.json"
"""File in `SIDECARS` that records the names that the model used."""


NOT_A_DIRECTORY = "not a directory"
"""The reason of formats that are directories for a file, which says nothing about the file."""


@validate_fields
@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a checkpoint.

    Attributes:
        step: The training step to open; None takes the latest finished one.
        max_header_bytes: Limit on a safetensors header; the reference implementation stops at 100 MB.
        max_index_bytes: Memory limit for OCDBT indexes that expand to more than their size on disk suggests.
        with_optimizer: Whether to read the optimizer's moments in formats that leave them out by default.
        prefer_rank: Ranks in order of preference, for tensors whose values differ between processes.
        all_items: Whether to open all items of a step as one tree, each below its name; otherwise only the
            item with the model is opened.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000
    max_index_bytes: int = MAX_INDEX_BYTES
    with_optimizer: bool = False
    prefer_rank: tuple[int, ...] = ()
    all_items: bool = False


class OtherSteps(NamedTuple):
    """Other steps of a run that cannot be read, mapped from directory name to the missing parts.

    Attributes:
        unfinished: Steps whose save did not finish.
        damaged: Steps whose save finished.
    """

    unfinished: Mapping[str, str]
    damaged: Mapping[str, str]


class Format(Protocol):
    """A format that can be read; entry points of format plug-ins load such an object."""

    @property
    def name(self) -> str:
        """The name that users see."""

    def mismatch_reason(self, path: Location) -> str | None:
        """Return None if `path` has this format, else a short reason; reads at most a few bytes."""

    def open(self, path: Location, options: ReadOptions) -> Tree:
        """Open the tree at `path` without reading array data.

        Raises:
            FormatError, StorageError: The files cannot be read in this format.
        """


@runtime_checkable
class SupportsShardings(Protocol):
    """A format that stores how arrays were sharded when they were saved."""

    def shardings(self, tree: Tree) -> Mapping[TreePath, Sharding]:
        """Return the stored sharding of each array by path; empty if none is stored.

        Args:
            tree: A tree opened by this format.

        Raises:
            FormatError, StorageError: The file with the shardings is damaged or cannot be read.
        """


@runtime_checkable
class SupportsSteps(Protocol):
    """A format that stores several steps of a run in one directory."""

    def other_steps(self, tree: Tree) -> OtherSteps:
        """Return unreadable steps of the run that a tree was opened from: later ones and unfinished ones.

        Raises:
            StorageError: The run cannot be listed.
        """


@runtime_checkable
class SupportsLocation(Protocol):
    """A format whose checkpoints are directories that can also be opened through a parent directory."""

    def checkpoint_location(self, path: Location) -> Location:
        """Return the checkpoint directory that a path opens; for a run, a step directory."""


@runtime_checkable
class SupportsStepFiles(Protocol):
    """A format whose directories may hold several checkpoints; opening one reads one checkpoint."""

    def checkpoints_in(self, path: Location) -> Sequence[Location]:
        """Return all checkpoints at a path, including damaged ones; only the path if it is one checkpoint.

        Raises:
            StorageError: The path cannot be read.
        """


@runtime_checkable
class SupportsStorage(Protocol):
    """A format that can describe how its arrays are stored in more detail than the arrays do."""

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        """Return the files of a tree opened by this format, with their contents; reads no array data.

        Raises:
            FormatError, StorageError: An index or the metadata of an array is damaged or cannot be read.
        """


@runtime_checkable
class SupportsFaults(Protocol):
    """A format that can find faults in a checkpoint, for diagnosis."""

    @property
    def fault_summary(self) -> str:
        """One-line summary of the faults that are checked."""

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        """Yield the faults of a complete or damaged checkpoint of this format; reads no array data.

        Raises:
            CheckpointError: The last fault, which prevents further checks.
        """


@runtime_checkable
class SupportsChecksums(Protocol):
    """A format whose checksums are not verified when arrays are read."""

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """Yield the byte ranges that have checksums in a complete or damaged checkpoint; reads no array data.

        Raises:
            CheckpointError: Further ranges cannot be examined. `SupportsFaults.faults` reports the reason,
                unless a network store does not respond.
        """


@runtime_checkable
class SupportsRankPreference(Protocol):
    """A format with one file per process, where `ReadOptions.prefer_rank` selects whose values are read."""

    @property
    def rank_files(self) -> str:
        """The names of the per-process files, and the program that writes them."""


@runtime_checkable
class SupportsFiles(Protocol):
    """A format that recognizes its own files, so that checkpoints of other formats are not replaced."""

    def owns(self, name: str) -> bool:
        """Return whether a path relative to a checkpoint is, or may be taken for, a file of this format."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """Yield files in a directory that are not part of the checkpoint that the writer replaces.

        Args:
            directory: The directory to list.
            tree: The tree that this format opened in the directory.

        Raises:
            StorageError: The directory cannot be listed.
        """


@runtime_checkable
class SupportsSidecarLookup(Protocol):
    """A format with a directory for the configuration, tokenizer and so on; see `formats.sidecar`."""

    def sidecars(self, tree: Tree) -> Location:
        """Return the directory of the sidecars of a tree opened by this format, which may not exist."""


@dataclass(frozen=True)
class Layout:
    """The planned location of every array of a checkpoint, known before the first byte is read.

    Attributes:
        placements: The placement of each array.
        files: Final size of each data file in bytes; files that grow and files of single chunks are not
            included.
        links: Existing files by the name of the link that will point to them, relative to the checkpoint's
            root.
        remarks: Remarks for the user about this layout.
        heads: Leading bytes of data files that do not belong to an array.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]
    links: Mapping[str, ByteSource] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    heads: Mapping[str, bytes] = field(default_factory=dict)

    message_fields = ("remarks",)

    @property
    def nbytes(self) -> int:
        """Number of bytes that are certain to be written.

        The size of encoded chunks is unknown until they are encoded, and links and references take no space.
        If the disk fills up, the user can free space and resume.
        """
        files = sum(
            p.nbytes for p in self.placements.values() if isinstance(p.home, ChunkFiles) and not p.codec
        )
        return sum(self.files.values()) + files

    @property
    def referenced(self) -> Iterator[Referenced]:
        """The referenced chunks of each array, which are not written."""
        for placement in self.placements.values():
            if isinstance(placement.home, Referenced):
                yield placement.home

    @cached_property
    def used(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """The (start, stop) ranges of each of `links` that chunks refer to, sorted and without overlap."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.links}
        for reference in self.referenced:
            for span in reference.ranges:
                spans[span.file].append((span.offset, span.offset + span.nbytes))
        return {name: tuple(_merge_spans(sorted(item))) for name, item in spans.items()}


def _merge_spans(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
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
"""Maps (array, grid index) of each encoded chunk to a byte range of a file."""


class Writer(Protocol):
    """Writes one format with options that are already set."""

    @property
    def name(self) -> str:
        """The name of the format."""

    def layout(self, tree: Tree, limit: int) -> Layout:
        """Choose the placement of every array of the tree.

        Args:
            tree: The tree to write.
            limit: Maximum size of a chunk that must be created in one piece, in bytes.

        Raises:
            FormatError: The format cannot store an array or a leaf. The message names it and suggests a
                remedy.
        """

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """Write everything except the data files: index and metadata.

        Files by which readers recognize a checkpoint are written last.

        Args:
            directory: The checkpoint's root.
            tree: The tree that was written.
            layout: The layout from `layout`.
            extents: Locations of the encoded chunks; empty if no chunks are encoded.
        """


@runtime_checkable
class SupportsSidecars(Protocol):
    """A writer with a directory for sidecars; other writers leave sidecars out and report it."""

    def sidecars_at(self, tree: Tree, is_model: bool) -> str:
        """Return the directory for sidecars, relative to the root; empty for the root itself.

        Args:
            tree: The tree to write.
            is_model: Whether the arrays have the model's own names, so that its files apply to them.
        """


@runtime_checkable
class SupportsUnownedFiles(Protocol):
    """A writer that can tell more precisely than its format which files it does not own."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """See `SupportsFiles.unowned_files`."""


@runtime_checkable
class WritesSteps(Protocol):
    """A writer of runs that knows the step number if the user passed one."""

    @property
    def requested_step(self) -> int | None:
        """Step number that the user passed, for example to add a step; None if the user passed none."""


@dataclass(frozen=True, slots=True)
class Target:
    """The source and destination that a writer is created for.

    Attributes:
        tree: The source as opened, which provides default values for the step and the names.
        destination: Directory to write; None if it is not known yet.
        keeps_names: Whether the step and the item keep the source's names by default.
        shares: Whether unchanged data may be shared with the source by default, because the command changes
            the tree rather than how it is stored.
        least_share: Fraction of a file that must be used for sharing it by default; 0 means
            `ckpttools.formats.references.MIN_SHARED_FRACTION`.
        declared: Names of the options that the user set.
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
        """The name that users see, as in `ckpt convert to-NAME`."""

    @property
    def options(self) -> tuple[Option, ...]:
        """The options for writing."""

    @property
    def help(self) -> str:
        """Help text for the command's output option; may end with "Examples:" and lines."""

    def writer(self, target: Target, /, **options: Any) -> Writer:
        """Create the writer for a target.

        Args:
            target: The source and destination.
            options: Values of all `options`, including defaults.

        Raises:
            UsageError: Options contradict each other.
        """
