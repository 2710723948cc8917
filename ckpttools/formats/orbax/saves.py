"""Saves assembled from the shares of several hosts: whether they are complete, and what is missing.

A save is complete if its shares together contain every chunk of every array, for any mesh. Shares of
different steps are never mixed, and neither are two saves of the same step: if a job goes back and saves a
step again, arrays may be sharded the same way and have other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TypeVar

from ckpttools.array.tree import Path, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape, grid_indices
from ckpttools.formats.orbax.metadata import SavedLeaf, parse_tree
from ckpttools.formats.orbax.ocdbt import Entry, length_of
from ckpttools.formats.orbax.shares import HostShare
from ckpttools.formats.zarr.array import ZarrArray
from ckpttools.formats.zarr.chunks import DOCUMENTS, parse_array
from ckpttools.stores.location import Location

T = TypeVar("T")
# All hosts start a save at the same time, except for clock differences and hosts that are a step behind. A
# restarted job needs longer than the first limit to reach the same step again. Up to the second limit, shares
# belong to one save if they have values in common, which are compared before use.
TOGETHER_SECONDS = 60.0
_WITH_EVIDENCE_SECONDS = 600.0
# Values up to this size may be a single number that is equal in all runs.
_COUNTER = 16
# Maximum number of missing cells that are listed for an array; a damaged shape may imply more missing cells
# than the file has bytes.
_MOST_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class MissingCells:
    """The cells of an array that all shares together lack.

    Attributes:
        path: Path of the array.
        cells: Grid indices of the chunks; empty if the metadata is missing or there are too many to list.
        chunks: Number of chunks in the grid; 0 if unknown.
        count: Number of missing chunks.
    """

    path: Path
    cells: tuple[Shape, ...]
    chunks: int
    count: int

    def __str__(self) -> str:
        if not self.chunks:
            return f"{keystr(self.path)}: its metadata"
        return f"{keystr(self.path)}: {self.count:,} of {self.chunks:,} chunks"


@dataclass(frozen=True)
class Save:
    """A save of one step, as far as its shares are available.

    Attributes:
        step: The step number.
        shares: The shares of the save. A value that several shares have is read from the first of them.
    """

    step: int
    shares: tuple[HostShare, ...]

    @cached_property
    def began(self) -> float | None:
        """Time when the first host started the save, in seconds since 1970; None if unknown."""
        return min((share.began for share in self.shares if share.began is not None), default=None)

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """The index of the share that each key is read from."""
        result: dict[str, int] = {}
        for number, share in enumerate(self.shares):
            for key in share.entries:
                result.setdefault(key, number)
        return result

    @cached_property
    def twins(self) -> Mapping[str, tuple[int, ...]]:
        """The indices of the shares that have a key, for keys in several shares."""
        result: dict[str, tuple[int, ...]] = {}
        owners = self.owners
        for number, share in enumerate(self.shares):
            for key in share.entries:
                if (owner := owners[key]) != number:
                    result[key] = (*result.get(key, (owner,)), number)
        return result

    @cached_property
    def leaves(self) -> Sequence[SavedLeaf]:
        """The leaves of the tree."""
        first = self.shares[0]
        return parse_tree(first.document, str(first.item))

    @cached_property
    def arrays(self) -> Mapping[Path, tuple[str, ZarrArray | None]]:
        """The key prefix and the metadata of each array; the metadata is None if no share has it."""
        expected = [leaf.path for leaf in self.leaves if not leaf.is_empty and leaf.value_type != "string"]
        known: dict[bytes, ZarrArray] = {}
        return {path: (_prefix(path), self._document(_prefix(path), known)) for path in expected}

    def _document(self, prefix: str, known: dict[bytes, ZarrArray]) -> ZarrArray | None:
        for name in DOCUMENTS:
            owner = self.owners.get(prefix + name)
            if owner is not None:
                share = self.shares[owner]
                text = share.index.read(share.entries[prefix + name])
                if text not in known:
                    known[text] = parse_array(name, text, f"{share.item}: {prefix}{name}")
                return known[text]
        return None

    @cached_property
    def missing(self) -> tuple[MissingCells, ...]:
        """The missing cells; empty if the save is complete."""
        return tuple(item for item in self._looked_through() if item is not None)

    def _looked_through(self) -> Iterator[MissingCells | None]:
        there = self.owners
        for path, (prefix, document) in self.arrays.items():
            if document is None:
                yield MissingCells(path, (), 0, 0)
                continue
            keys, chunks = document.keys, prod(document.grid)
            if chunks > len(there) + _MOST_CELLS:
                present = sum(key.startswith(prefix) for key in there) - 1
                yield MissingCells(path, (), chunks, chunks - present)
                continue
            indices = grid_indices(document.shape, document.chunk)
            cells = tuple(cell for cell in indices if prefix + keys.key(cell) not in there)
            yield MissingCells(path, cells, chunks, len(cells)) if cells else None

    @cached_property
    def unnamed(self) -> tuple[str, ...]:
        """Arrays that the tree's metadata does not list, so they belong to another tree."""
        named = {_prefix(leaf.path) for leaf in self.leaves}
        ends = ((key, name) for key in self.owners for name in DOCUMENTS if key.endswith(name))
        return tuple(key.removesuffix(name) for key, name in ends if key.removesuffix(name) not in named)

    @property
    def is_complete(self) -> bool:
        """Whether the save has all chunks."""
        return not self.missing

    def preferring(self, hosts: Sequence[Location]) -> Save:
        """Return a copy that prefers these hosts, in order, for values in several shares."""
        order = {host.resolve(): number for number, host in enumerate(hosts)}
        ranked = sorted(self.shares, key=lambda share: order.get(share.host.resolve(), len(order)))
        return replace(self, shares=tuple(ranked))


def _prefix(path: Path) -> str:
    return f"{dotted(path)}/" if path else ""


def saves_of(shares: Sequence[HostShare]) -> list[Save]:
    """Group shares into saves, newest step first; saves of the same step are sorted by latest start.

    Unusable shares are ignored.
    """
    result: list[list[HostShare]] = []
    usable = [share for share in shares if share.fault is None]
    for share in sorted(usable, key=lambda item: item.began or 0.0):
        group = next((item for item in result if _belongs(share, item)), None)
        if group is None:
            result.append([share])
        else:
            group.append(share)
    saves = [Save(group[0].number, tuple(group)) for group in result]
    return sorted(saves, key=lambda save: (save.step, save.began or 0.0), reverse=True)


def _belongs(share: HostShare, group: Sequence[HostShare]) -> bool:
    """Return whether a share belongs to the same save as the shares of a group."""
    first = group[0]
    if share.number != first.number or not _are_together(share, group):
        return False
    if not (
        _may_be(share.job, [item.job for item in group]) and _may_be(share.mesh, [s.mesh for s in group])
    ):
        return False
    ours, theirs = share.document, first.document
    if ours is not theirs and ours.get("tree_metadata") != theirs.get("tree_metadata"):
        return False
    return all(_documents_agree(share, item) for item in (first, group[-1]))


def _may_be(declared: T, others: Sequence[T]) -> bool:
    """Return whether the declared metadata of a share is compatible with that of the others."""
    known = next(filter(None, others), None)
    return not declared or known is None or declared == known


def _are_together(share: HostShare, group: Sequence[HostShare]) -> bool:
    """Return whether a share may belong to a save whose other shares started earlier, judged by time."""
    began = [item.began for item in group if item.began is not None]
    apart = 0.0 if share.began is None or not began else share.began - min(began)
    if apart <= TOGETHER_SECONDS:
        return True
    return apart <= _WITH_EVIDENCE_SECONDS and any(_have_common(share, item) for item in group)


def _have_common(share: HostShare, other: HostShare) -> bool:
    return any(key in other.entries and has_numbers(key, entry) for key, entry in share.entries.items())


def has_numbers(key: str, entry: Entry) -> bool:
    """Return whether a value is numeric data that differs between runs, not metadata or a counter."""
    return not key.endswith(DOCUMENTS) and length_of(entry) > _COUNTER


def _documents_agree(share: HostShare, other: HostShare) -> bool:
    """Return whether the common arrays of two shares agree in shape, dtype, grid and codecs."""
    ours, theirs = share.entries, other.entries
    both = (key for key in ours if key.endswith(DOCUMENTS) and key in theirs and ours[key] != theirs[key])
    return all(share.index.read(ours[key]) == other.index.read(theirs[key]) for key in both)


def newest_complete(saves: Sequence[Save], step: int | None = None) -> Save | None:
    """Return the newest complete save, optionally of a given step; None if there is none."""
    return next((save for save in saves if step in (None, save.step) and save.is_complete), None)
