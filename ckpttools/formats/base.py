"""What a format is: a way to recognize and open a checkpoint, and a way to lay one out in files.

Adding a format is one module with a `FORMAT` object and one line: see docs/add-a-format.md.

`Format` is what every format is; what else one can do or tell, it says by having the methods of the other
protocols here: `Writable` and `Tells…`. Who wants to know asks `formats.registry`.
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
"""Directory inside an Orbax item for what belongs to the model besides its arrays: see `formats.sidecar`."""

RECORD = "ckpttools.json"
"""File beside them that says which names the model used."""


@validate_fields
@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about reading.

    Attributes:
        step: the training step to open; None takes the latest finished one.
        max_header_bytes: longest safetensors header accepted; the reference implementation stops at 100 MB.
        max_index_bytes: memory that an OCDBT index may take, where its size on disk does not account for it.
        with_optimizer: whether to read an optimizer's moments, too, where a format leaves them out otherwise.
        prefer_rank: processes, the most preferred first, whose numbers are taken where processes have
            different ones of the same tensor.
        all_items: whether to open all items of a step as one tree, each below its name, where a format keeps
            several; else the one that holds the model.
    """

    step: int | None = None
    max_header_bytes: int = 100_000_000
    max_index_bytes: int = MAX_INDEX_BYTES
    with_optimizer: bool = False
    prefer_rank: tuple[int, ...] = ()
    all_items: bool = False


class OtherSteps(NamedTuple):
    """Other steps of a run that cannot be read: name of the directory -> what is missing.

    Attributes:
        unfinished: those whose save has not ended.
        damaged: those whose save has.
    """

    unfinished: Mapping[str, str]
    damaged: Mapping[str, str]


class Format(Protocol):
    """A format that can be read. The object named by the entry point has this shape."""

    @property
    def name(self) -> str:
        """The name users see."""

    def why_not(self, path: Location) -> str | None:
        """None if `path` is of this format, else the reason in a few words. Reads a few bytes at most."""

    def open(self, path: Location, options: ReadOptions) -> Tree:
        """Return the tree at `path`, without reading any array.

        Raises:
            FormatError, StorageError: what is there cannot be read as this format.
        """


@runtime_checkable
class SupportsShardings(Protocol):
    """A format that keeps how arrays lay on devices when they were saved."""

    def shardings(self, tree: Tree) -> Mapping[TreePath, Sharding]:
        """Path of an array -> its sharding, of a tree that this format opened; empty where none was stored.

        Raises:
            FormatError, StorageError: a file that should say it is damaged or cannot be read.
        """


@runtime_checkable
class SupportsSteps(Protocol):
    """A format that keeps several steps of a run beside each other."""

    def other_steps(self, tree: Tree) -> OtherSteps:
        """Later or half-written steps of the run that a tree is of, which this format opened.

        Raises:
            StorageError: the run may not be looked into.
        """


@runtime_checkable
class SupportsLocation(Protocol):
    """A format whose checkpoints are directories and all below them, which directories above open, too."""

    def lies_at(self, path: Location) -> Location:
        """Return the directory of the checkpoint that is opened at a place: of a run that of a step."""


@runtime_checkable
class SupportsStepFiles(Protocol):
    """A format whose directories hold several checkpoints, of which opening the directory reads one."""

    def checkpoints_in(self, path: Location) -> Sequence[Location]:
        """Return all checkpoints at a path, also damaged ones; the path alone if it is one checkpoint.

        Raises:
            StorageError: the path cannot be read.
        """


@runtime_checkable
class SupportsStorage(Protocol):
    """A format that knows more of how its arrays lie in files than the arrays themselves tell."""

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        """Return the files of a tree that this format opened, and what they hold; reads no array.

        Raises:
            FormatError, StorageError: an index or the metadata of an array is damaged or cannot be read.
        """


@runtime_checkable
class SupportsFaults(Protocol):
    """A format that can say what is wrong with a checkpoint: `ckpt doctor` asks it."""

    @property
    def looks_for(self) -> str:
        """What that is, in a line."""

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        """What is wrong with a file or directory of this format, whole or damaged; reads no array.

        Raises:
            CheckpointError: the last thing that is wrong: what comes after it cannot be looked at.
        """


@runtime_checkable
class SupportsChecksums(Protocol):
    """A format whose files have checksums of data that are not looked at when arrays are read."""

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """What has one, in a file or directory of this format, whole or damaged; reads no array.

        Raises:
            CheckpointError: nothing else can be examined; `SupportsFaults.faults` says why, unless a store
                behind a network does not answer.
        """


@runtime_checkable
class SupportsRankPreference(Protocol):
    """A format with files of each process: `ReadOptions.prefer_rank` says whose numbers are taken."""

    @property
    def rank_files(self) -> str:
        """How they are called, and who writes them."""


@runtime_checkable
class SupportsFiles(Protocol):
    """A format that knows which files are its own; without it no checkpoint of it is ever replaced."""

    def owns(self, name: str) -> bool:
        """Return whether a path relative to a checkpoint is, or could be mistaken for, this format's."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """What lies in a directory and is not part of the one checkpoint that the writer puts there.

        Args:
            directory: where.
            tree: what this format opened there.

        Raises:
            StorageError: the directory cannot be listed.
        """


@runtime_checkable
class SupportsSidecarLookup(Protocol):
    """A format in which configuration, tokenizer and so on have a place: see `formats.sidecar`."""

    def sidecars(self, tree: Tree) -> Location:
        """Return the directory where they lie, or would, of a tree that this format opened."""


@dataclass(frozen=True)
class Layout:
    """All arrays of a checkpoint in their places, known before the first byte is read.

    Attributes:
        placements: for each array its place.
        files: final size in bytes of each data file whose content is known in size; those that grow, and
            those of single chunks, are not in here.
        links: files that are there already and get another name below the checkpoint's root, by that name.
        remarks: what the user should know of this layout.
        heads: the first bytes of data files, which are no array's.
    """

    placements: Mapping[TreePath, Placement]
    files: Mapping[str, int]
    links: Mapping[str, ByteSource] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    heads: Mapping[str, bytes] = field(default_factory=dict)

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
            for span in home.ranges:
                spans[span.file].append((span.offset, span.offset + span.nbytes))
        return {name: tuple(_joined(sorted(item))) for name, item in spans.items()}


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

    def layout(self, tree: Tree, limit: int) -> Layout:
        """Place every array of the tree.

        Args:
            tree: what will be written.
            limit: bytes that a chunk may have at most, where chunks must be made whole.

        Raises:
            FormatError: the format cannot hold an array or a leaf; names it and what would do.
        """

    def finish(self, directory: Location, tree: Tree, layout: Layout, extents: Extents) -> None:
        """Write everything but the data files: index, metadata. What makes readers take it for a checkpoint
        is written last, in one file or two.

        Args:
            directory: the checkpoint's root.
            tree: what was written.
            layout: as `layout` gave it.
            extents: where encoded chunks went; empty where none are encoded.
        """


@runtime_checkable
class SupportsSidecars(Protocol):
    """A writer with a place for configuration, tokenizer and so on; others leave them out, which is said."""

    def sidecars_at(self, tree: Tree, is_model: bool) -> str:
        """Return the directory where they go, relative to the root; empty for the root itself.

        Args:
            tree: what will be written.
            is_model: whether the arrays have the model's own names, so that its files may lie beside them.
        """


@runtime_checkable
class SupportsUnownedFiles(Protocol):
    """A writer that knows better than its format what lies at a destination and is not what it puts there."""

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        """See `SupportsFiles.unowned_files`."""


@runtime_checkable
class WritesSteps(Protocol):
    """A writer of runs that may have been told which step of a run it writes."""

    @property
    def step_said(self) -> int | None:
        """The number that the user said: one who says it may mean to add the step; None if nothing was."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a writer is made for.

    Attributes:
        tree: the source as it was opened: where the user says nothing, it tells step and names.
        destination: directory that will be written; None where that is not known yet.
        keeps_names: whether step, item and the like are called as in the source where the user says nothing.
        shares: whether what stays as it is may be shared with the source where the user says nothing: the
            command is about the tree rather than about how it is stored.
        least_share: the part of a file that must be used for it to be shared where the user says nothing;
            0 for as little as `ckpttools.formats.references.LEAST_SHARE`.
        declared: names of the options that the user gave a value.
    """

    tree: Tree
    destination: Location | None = None
    keeps_names: bool = True
    shares: bool = False
    least_share: float = 0.0
    declared: frozenset[str] = frozenset()


@runtime_checkable
class Writable(Protocol):
    """A format that can be written, too."""

    @property
    def name(self) -> str:
        """The name users see: the command is `ckpt convert to-NAME`."""

    @property
    def options(self) -> tuple[Option, ...]:
        """What may be said of how it is written."""

    @property
    def help(self) -> str:
        """What is written, for readers of the help of the command; may end with "Example:" and lines."""

    def writer(self, target: Target, /, **options: Any) -> Writer:
        """What writes a target.

        Args:
            target: what it is made for.
            options: all of `options`, those that were not said with their defaults.

        Raises:
            UsageError: options that do not go together.
        """
