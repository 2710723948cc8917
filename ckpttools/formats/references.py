"""Arrays that do not need to be written, because their chunks are byte ranges of existing files.

The existing files are hard-linked below the new checkpoint, and its index points into them. Shared files are
never changed, so checkpoints that share them do not affect each other, and either can be deleted.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Chunked
from ckpttools.array.storage import FINE
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import action, option
from ckpttools.formats.orbax.ocdbt import MAX_INLINE_VALUE
from ckpttools.formats.placement import Placement, Referenced
from ckpttools.formats.zarr.chunking import LARGEST
from ckpttools.stores.abilities import LinkTrials, SupportsLinks
from ckpttools.stores.base import File
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.formats.blocks import Chunks, Stretch

# Loading through a `transpose` codec is slower than plain C order. tensorstore reads a complete array of 4096
# x 8 x 8192 bfloat16 at 0.40 GB/s instead of 1.4. Orbax restores an array of 2048 x 4 x 8192 onto 8 simulated
# devices at 0.06 GB/s instead of 0.9 (first axis sharded) and 0.12 instead of 0.8 (last axis), whether chunks
# are complete layers or cut to 4 MiB.
SLOWDOWN_TEXT = "3 to 15 times"
# Warn about chunks larger than this, in bytes: reading any part of a chunk reads all of it.
_GIANT = 1 << 30
MIN_SHARED_FRACTION = 0.001
"""Minimum fraction of a file that must be used to share it, because sharing keeps the full file on disk."""
_PREFIX = re.compile(r"linked-\d{5}-")
_LONGEST_NAME = 200


class ReferenceMode(Enum):
    """Determines which stored bytes are reused.

    Attributes:
        NONE: No bytes are reused; everything is written again.
        SAME_ORDER: Chunks of zarr arrays with unchanged grid, codecs and order, so that reading the result is
            as fast.
        ANY_ORDER: Everything that can be expressed, including ranges of safetensors under a `transpose`
            codec, which load more slowly.
    """

    NONE = "none"
    SAME_ORDER = "same-order"
    ANY_ORDER = "any-order"


def reference_mode(requested: bool | None, *, by_default: bool, encodes: bool) -> ReferenceMode:
    """Choose the mode from the user's options.

    Args:
        requested: True to reference everything possible, False to copy, None for the default.
        by_default: Whether the command references chunks by default. Commands that change the tree do;
            commands whose purpose is another layout do not.
        encodes: Whether the user chose an encoding for chunks, which requires writing them.
    """
    if requested is not None:
        return ReferenceMode.ANY_ORDER if requested else ReferenceMode.NONE
    return ReferenceMode.SAME_ORDER if by_default and not encodes else ReferenceMode.NONE


@dataclass(frozen=True, slots=True)
class References:
    """A writer's options for references.

    Attributes:
        mode: Which bytes are reused.
        destination: Location of the new checkpoint, for testing whether files can be linked there; None if
            unknown, so that only writing shows it.
        least: Minimum fraction of a file that must be used to share it.
    """

    mode: ReferenceMode = ReferenceMode.NONE
    destination: Location | None = field(default=None, repr=False)
    least: float = MIN_SHARED_FRACTION


NO_REFERENCES = References()


@dataclass(frozen=True)
class SharedArrays:
    """The arrays of a tree that are referenced.

    Attributes:
        placements: Placements of the referenced arrays.
        links: The linked files, by their names below the checkpoint's root.
        remarks: Remarks for the user.
    """

    placements: Mapping[Path, Placement] = field(default_factory=dict)
    links: Mapping[str, ByteSource] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def find(tree: Tree, references: References, directory: str) -> SharedArrays:
    """Find the arrays of a tree that do not need to be written.

    Args:
        tree: The tree to store.
        references: Which bytes may be referenced.
        directory: Directory of links, relative to the checkpoint's root.

    Raises:
        FormatError: A chunk is missing or exceeds its file.
    """
    if references.mode is ReferenceMode.NONE:
        return SharedArrays()
    search = _ReferenceSearch(references, directory)
    for path, leaf in tree.arrays.items():
        # JAX's metadata about chunks is written together with them, and bytes of booleans must be validated.
        if path not in tree.metadata.key_impls and leaf.dtype.kind != "bool":
            search.try_reference(path, leaf)
    return search.result()


def _trials(destination: Location) -> LinkTrials | None:
    """Return the link test for a destination; None if its store does not support links."""
    store = destination.store
    return store.link_trials(destination.key) if isinstance(store, SupportsLinks) else None


class _ReferenceSearch:
    """The state of a search for arrays to reference."""

    def __init__(self, references: References, directory: str) -> None:
        self._mode, self._directory, self._least = references.mode, directory, references.least
        where = references.destination
        self._trials = None if where is None else _trials(where)
        # Most commands reference nothing.
        from ckpttools.formats.blocks import Finder, chunks_of

        self._finder, self._chunks_of = Finder(), chunks_of
        self._names: dict[str, str] = {}
        self._refusals: dict[str, str | None] = {}
        self._refused: Counter[str] = Counter()
        self._transposed: list[int] = []
        self._giants: dict[Path, int] = {}
        self._alone = 0
        self.placements: dict[Path, Placement] = {}
        self.links: dict[str, ByteSource] = {}

    def try_reference(self, path: Path, leaf: LazyArray) -> None:
        """Reference an array if that is possible and expected."""
        blocks = self._finder.blocks(leaf)
        chunks = None if blocks is None else self._chunks_of(blocks, LARGEST)
        if chunks is None or not self._is_expected(leaf, chunks):
            return
        locations = list(chunks.locations())
        if not all(_is_sharable(location, chunks.blocks.is_grid) for location in locations):
            return
        reasons = {self._refusal_reason(source) for source, _, _ in locations} - {None}
        if reasons:
            self._refused[", ".join(sorted(map(str, reasons)))] += leaf.nbytes
            return
        destination = self._referenced_chunks(chunks, locations)
        self.placements[path] = Placement(leaf.shape, leaf.dtype.itemsize, chunks.chunk, destination)
        if not chunks.is_in_order:
            self._transposed.append(leaf.nbytes)
        if chunks.nbytes >= _GIANT:
            self._giants[path] = chunks.nbytes

    def _is_expected(self, leaf: LazyArray, chunks: Chunks) -> bool:
        blocks = chunks.blocks
        is_kept = blocks.is_grid and (chunks.is_in_order or blocks.is_transposed)
        if self._mode is ReferenceMode.SAME_ORDER and not is_kept:
            return False
        # Arrays that are stored as zarr keep their grid.
        return isinstance(leaf, Chunked) or chunks.count == 1 or chunks.nbytes >= FINE

    def _refusal_reason(self, source: ByteSource) -> str | None:
        """Return why a file cannot be linked to the destination; None if it can, as far as known."""
        if self._trials is None or isinstance(source, Bytes):
            return None
        if source.path not in self._refusals:
            reason = self._trials.refusal(source) if isinstance(source, File) else "it is not a file"
            self._refusals[source.path] = reason
        return self._refusals[source.path]

    def _referenced_chunks(self, chunks: Chunks, locations: Sequence[Stretch]) -> Referenced:
        numbers, starts, lengths = array("l"), array("q"), array("q")
        files: dict[str, int] = {}
        inline: dict[int, bytes] = {}
        for position, (source, start, length) in enumerate(locations):
            if isinstance(source, Bytes):
                inline[position] = source.data[start : start + length]
                numbers.append(-1)
            else:
                numbers.append(files.setdefault(self._name(source), len(files)))
            starts.append(start)
            lengths.append(length)
        return Referenced(tuple(files), chunks.codecs, numbers, starts, lengths, inline)

    def _name(self, source: ByteSource) -> str:
        """Return the name of a file's link: its own name with a number, so that names are unique."""
        if source.path not in self._names:
            own = _PREFIX.sub("", parse(source.path).name)
            suffix = f"-{own}" if own.isascii() and len(own) <= _LONGEST_NAME else ""
            name = f"{self._directory}/linked-{len(self._names):05d}{suffix}"
            self._names[source.path] = name
            self.links[name] = source
        return self._names[source.path]

    def result(self) -> SharedArrays:
        """Return the arrays worth a link; a scalar alone does not justify keeping a weights file on disk."""
        used = {path: _bytes_by_file(placement) for path, placement in self.placements.items()}
        links, kept = dict(self.links), dict(used)
        while True:
            total: Counter[str] = Counter()
            for item in kept.values():
                total.update(item)
            links = {name: item for name, item in links.items() if total[name] >= self._least * item.size > 0}
            still = {path: item for path, item in kept.items() if item.keys() <= links.keys()}
            if len(still) == len(kept):
                break
            kept = still  # Ranges of arrays that are not shared do not count as used.
        self._alone = sum(self.placements[path].nbytes for path in used if path not in kept)
        return SharedArrays({path: self.placements[path] for path in kept}, links, tuple(self.remarks()))

    def remarks(self) -> Iterator[str]:
        """Yield remarks for the user."""
        for reason, nbytes in self._refused.items():
            yield f"{_size(nbytes)} are copied: the file system refuses to link them to DST ({reason})"
        if self._alone and self._least > MIN_SHARED_FRACTION:
            yield (
                f"{_size(self._alone)} are copied: they are less than {self._least:.0%} of files that "
                f"sharing would keep; {option('reference', True)} shares them"
            )
        if self._transposed:
            yield (
                f"{_size(sum(self._transposed))} are shared with the axis order of SRC: they "
                f"load {SLOWDOWN_TEXT} slower than plain chunks; "
                f"{action('convert', format='orbax', copy=True)} "
                "makes a plain "
                "checkpoint of the result"
            )
        for path, nbytes in self._giants.items():
            yield f"{keystr(path)} stays in chunks of {_size(nbytes)}: any read of a chunk reads all of it"


def _bytes_by_file(placement: Placement) -> Counter[str]:
    """Return how many bytes of each file an array uses, by file name."""
    used: Counter[str] = Counter()
    if isinstance(placement.home, Referenced):
        for span in placement.home.ranges:
            used[span.file] += span.nbytes
    return used


def _is_sharable(location: Stretch, is_grid: bool) -> bool:
    """Return whether a chunk is in a file that can be linked, or inline in an index."""
    source, _, nbytes = location
    if isinstance(source, Bytes):
        return is_grid and nbytes <= MAX_INLINE_VALUE
    return isinstance(source, File)


def _size(nbytes: int) -> str:
    """Format a number of bytes with decimal units."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
