"""A save that is spread over hosts: the share of each, whether all are complete, and what is missing.

A save is complete if its shares together contain every chunk of every array, for any mesh. Shares of
different steps are never mixed, and neither are two saves of the same step: if a job goes back and saves
a step again, arrays may be sharded the same way and have other values.

    HOST/STEP/state                          written by an emergency or multi-tier manager, or by peers
    HOST/JOB-sSTEP-nNODE-wWORKER.restore     the same, as named by the agent of multi-tier checkpointing
    HOST/p2p_restore/STEP/state              fetched from another peer
    PERSISTENT/STEP/default                  saved for all by the first slice of an emergency manager

Keys of chunks are global, so a share describes its own content; `ocdbt.process_N` identifies its process.

Peer-to-peer checkpoints store the states of all processes in one file, `data_iter/pygrain_states.json`.
Other checkpoints store one file per process, such as `process_3-of-8.json`. Emergency and multi-tier
managers store none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, TypeVar

from ckpttools.array.tree import Path, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.region import Shape, grid_indices
from ckpttools.formats.interrupted import absent
from ckpttools.formats.json_file import json_object, parse_json, read_json
from ckpttools.formats.orbax.entries import Entries, entries_of
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.metadata import (
    ARRAYS_DIRECTORY,
    COMMIT_FILE,
    SHARDING_FILE,
    TREE_FILE,
    SavedLeaf,
    needs_index,
    parse_tree,
)
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES, Entry, Extent, length_of
from ckpttools.formats.orbax.steps import OrbaxItem, Step, directories
from ckpttools.formats.orbax.write import OtherItem
from ckpttools.formats.zarr.array import ZarrArray
from ckpttools.formats.zarr.chunks import DOCUMENTS, parse_array
from ckpttools.stores.location import Location

T = TypeVar("T")
# All hosts start a save at the same time, except for clock differences and hosts that are a step behind. A
# restarted job needs longer than the first limit to reach the same step again. Up to the second limit, shares
# belong to one save if they have values in common, which are compared before use.
MAX_SAVE_SPREAD_SECONDS = 60.0
_WITH_EVIDENCE_SECONDS = 600.0
# Values up to this size may be a single number that is equal in all runs.
_COUNTER = 16
# Maximum number of missing cells that are listed for an array; a damaged shape may imply more missing cells
# than the file has bytes.
_MAX_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class UnsavedChunks:
    """The cells of an array that all shares together lack.

    Attributes:
        path: Path of the array.
        cells: Grid indices of the chunks; empty if the metadata is missing or there are too many to list.
        num_chunks: Number of chunks in the grid; 0 if unknown.
        num_missing: Number of missing chunks.
    """

    path: Path
    cells: tuple[Shape, ...]
    num_chunks: int
    num_missing: int

    def __str__(self) -> str:
        if not self.num_chunks:
            return f"{keystr(self.path)}: its metadata"
        return f"{keystr(self.path)}: {self.num_missing:,} of {self.num_chunks:,} chunks"


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
    def missing(self) -> tuple[UnsavedChunks, ...]:
        """The missing cells; empty if the save is complete."""
        return tuple(item for item in self._iter_missing() if item is not None)

    def _iter_missing(self) -> Iterator[UnsavedChunks | None]:
        owners = self.owners
        for path, (prefix, document) in self.arrays.items():
            if document is None:
                yield UnsavedChunks(path, (), 0, 0)
                continue
            keys, chunks = document.keys, prod(document.grid)
            if chunks > len(owners) + _MAX_CELLS:
                present = sum(key.startswith(prefix) for key in owners) - 1
                yield UnsavedChunks(path, (), chunks, chunks - present)
                continue
            indices = grid_indices(document.shape, document.chunk)
            cells = tuple(cell for cell in indices if prefix + keys.key(cell) not in owners)
            yield UnsavedChunks(path, cells, chunks, len(cells)) if cells else None

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

    def prefer_hosts(self, hosts: Sequence[Location]) -> Save:
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
    if share.number != first.number or not _may_belong_together(share, group):
        return False
    if not (
        _may_be(share.job, [item.job for item in group]) and _may_be(share.mesh, [s.mesh for s in group])
    ):
        return False
    document, first_document = share.document, first.document
    if document is not first_document and document.get("tree_metadata") != first_document.get(
        "tree_metadata"
    ):
        return False
    return all(_documents_agree(share, item) for item in (first, group[-1]))


def _may_be(declared: T, others: Sequence[T]) -> bool:
    """Return whether the declared metadata of a share is compatible with that of the others."""
    known = next(filter(None, others), None)
    return not declared or known is None or declared == known


def _may_belong_together(share: HostShare, group: Sequence[HostShare]) -> bool:
    """Return whether a share may belong to a save whose other shares started earlier, judged by time."""
    start_times = [item.began for item in group if item.began is not None]
    delay = 0.0 if share.began is None or not start_times else share.began - min(start_times)
    if delay <= MAX_SAVE_SPREAD_SECONDS:
        return True
    return delay <= _WITH_EVIDENCE_SECONDS and any(_have_common(share, item) for item in group)


def _have_common(share: HostShare, other: HostShare) -> bool:
    return any(key in other.entries and has_numbers(key, entry) for key, entry in share.entries.items())


def has_numbers(key: str, entry: Entry) -> bool:
    """Return whether a value is numeric data that differs between runs, not metadata or a counter."""
    return not key.endswith(DOCUMENTS) and length_of(entry) > _COUNTER


def _documents_agree(share: HostShare, other: HostShare) -> bool:
    """Return whether the common arrays of two shares agree in shape, dtype, grid and codecs."""
    entries, other_entries = share.entries, other.entries
    both = (
        key
        for key in entries
        if key.endswith(DOCUMENTS) and key in other_entries and entries[key] != other_entries[key]
    )
    return all(share.index.read(entries[key]) == other.index.read(other_entries[key]) for key in both)


def newest_complete(saves: Sequence[Save], step: int | None = None) -> Save | None:
    """Return the newest complete save, optionally of a given step; None if there is none."""
    return next((save for save in saves if step in (None, save.step) and save.is_complete), None)


FETCHED = "p2p_restore"
_RESTORE = re.compile(r"(?P<job>.+)-s(?P<step>[0-9]+)-n[0-9]+-w[0-9]+\.restore")
# Input file of the multi-tier checkpointing agent, in the directory of a host.
_AGENT, _JOB = "replicator.yaml", re.compile(rb"^\s*job-name\s*:\s*(\S+)", re.MULTILINE)
_LARGEST_AGENT = 1 << 20
PROCESS_METADATA_FILES = (
    "process_metadata/global_process_metadata.json",
    "process_metadata/mesh_metadata.json",
)
"""Records the devices of each process of the job and their order in the mesh; the same on all hosts."""
# Managers' names for the tree. If a step has only one tree, its name does not matter.
_ITEMS = ("state", "default", "items")
# On GPUs, a host has a directory per process; a parent directory of hosts adds another level.
_MAX_DEPTH = 3
_BESIDE = frozenset((TREE_FILE, SHARDING_FILE, COMMIT_FILE, ARRAYS_DIRECTORY))


@lru_cache(maxsize=8)
def _parsed(content: bytes) -> Mapping[str, Any]:
    return json_object(content, TREE_FILE, FormatError, "fetch the file again, or leave out this host")


@dataclass(frozen=True)
class HostShare:
    """The share of one step that a host has.

    Attributes:
        host: Directory of the host.
        number: The step number.
        step: Directory of the step.
        item: The item of the tree in the step.
        max_index_bytes: See `ckpttools.formats.base.ReadOptions`.
        job: Name of the job from the agent of multi-tier checkpointing; "" if it is not recorded.
    """

    host: Location
    number: int
    step: Step
    item: Location
    max_index_bytes: int = MAX_INDEX_BYTES
    job: str = ""

    @property
    def name(self) -> str:
        """The name of the share in messages."""
        return str(self.host)

    @cached_property
    def began(self) -> float | None:
        """Time when the save started, in seconds since 1970; None if unknown."""
        declared = self.step.declared.fields.get("init_timestamp_nsecs")
        return declared / 1e9 if isinstance(declared, int) and 0 <= declared < 1 << 63 else None

    @cached_property
    def mesh(self) -> tuple[bytes, ...]:
        """JSON records of the job's processes and their devices; empty if not recorded."""
        files = [self.step.path / name for name in PROCESS_METADATA_FILES]
        result = tuple(file.read_bytes() for file in files if file.is_file())
        try:
            is_known = len(result) == len(files) and all(
                isinstance(parse_json(item), list) for item in result
            )
        except ValueError:
            return ()
        return result if is_known else ()

    @cached_property
    def fault(self) -> str | None:
        """Why the share cannot be used; None if it can. Raises StorageError."""
        if not (self.item / TREE_FILE).is_file():
            return f"no {self.item.name}/{TREE_FILE}"
        reasons = ", ".join(self.step.faults([OrbaxItem(self.item, self.step)]))
        if reasons:
            return reasons
        try:
            self.document, self.entries, self.mesh  # noqa: B018
        except StorageError:
            raise
        except CheckpointError as error:
            return error.raw.message
        return None

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The parsed `_METADATA`; shares with the same text, such as a save's hosts, share one object."""
        location = self.item / TREE_FILE
        content = location.read_bytes()
        try:
            return _parsed(content)
        except CheckpointError as error:
            raise error.at(location) from error

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """Distributed ids of the job's processes that wrote the chunks of this share."""
        names = (location.name.partition("_")[2] for location in self.item.glob(PROCESSES))
        return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))

    @cached_property
    def index(self) -> Entries:
        """The unfiltered index of the share."""
        return entries_of(self.item, needs_index(self.document), self.max_index_bytes)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The keys whose bytes exist, judged by file sizes."""
        faults, entries = self.index.faults, self.index.all
        if not self.index.manifests:
            # Without an index, each file is a key. These files do not belong to an array and differ between
            # hosts.
            entries = {key: entry for key, entry in entries.items() if key.partition("/")[0] not in _BESIDE}
        if not faults:
            return entries
        return {
            key: entry
            for key, entry in entries.items()
            if not (isinstance(entry, Extent) and (bad := faults.get(entry.file)) and bad.takes(entry))
        }

    @property
    def lost(self) -> tuple[str, ...]:
        """The missing and truncated data files."""
        return tuple(map(str, self.index.faults.values()))


def shares_of(location: Location, max_index_bytes: int = MAX_INDEX_BYTES) -> list[HostShare]:
    """Return the shares in a directory of one host, one step of a host, or several hosts.

    The first slice of an emergency manager has no host shares.

    Raises:
        StorageError: The location does not exist, or a directory cannot be accessed.
    """
    if not location.exists():
        raise absent(location)
    step = Step(location.absolute())
    if step.number is not None and step.is_one:
        host = location.absolute().parent
        return list(_share(host, step.number, step, max_index_bytes, _job_of(host)))
    return list(_below(location, _MAX_DEPTH, max_index_bytes))


def _below(location: Location, deepest: int, limit: int) -> Iterator[HostShare]:
    own = list(_host_shares(location, location, limit))
    yield from own
    if not own and deepest:
        for directory in directories(location):
            yield from _below(directory, deepest - 1, limit)


def _host_shares(host: Location, directory: Location, limit: int) -> Iterator[HostShare]:
    """Yield the shares directly below a directory, and those that were fetched from peers."""
    job = _job_of(directory)
    for location in directories(directory):
        match = _RESTORE.fullmatch(location.name)
        step = Step(location)
        number = int(match["step"]) if match else step.number
        if number is not None and not step.is_in_progress:
            yield from _share(host, number, step, limit, match["job"] if match else job)
        elif location.name == FETCHED:
            yield from _host_shares(host / FETCHED, location, limit)


def _job_of(host: Location) -> str:
    """Return a host's job name from the agent's input file, or ""."""
    file = host / _AGENT
    result = _JOB.search(file.read_bytes(_LARGEST_AGENT)) if file.is_file() else None
    return result[1].decode(errors="replace").strip("\"'") if result else ""


def _share(host: Location, number: int, step: Step, limit: int, job: str) -> Iterator[HostShare]:
    items = {item.directory.name: item.directory for item in step.items if item.directory != step.path}
    name = next((name for name in _ITEMS if name in items), next(iter(items), None))
    if name is not None and (name in _ITEMS or len(items) == 1):
        yield HostShare(host, number, step, items[name], limit, job)
    elif name is None:
        # A part without its metadata, or without its item next to the records of the job.
        found = [item for item in _ITEMS if (step.path / item).is_dir()]
        if found or (step.path / PROCESS_METADATA_FILES[0]).is_file():
            yield HostShare(host, number, step, step.path / (found or _ITEMS)[0], limit, job)


ITEM = "iter"
"""MaxText's name for the item of iterator states."""
_HANDLER = "grain._src.python.checkpoint.handler.CheckpointHandler"
_ITERATOR_NAMES = ("data_iter", "iter")
_ALL = "pygrain_states.json"


def iterators_of(save: Save) -> OtherItem | None:
    """Return the iterator states that the hosts of a save stored, or None.

    Raises:
        FormatError: Two files differ, or one is damaged.
        StorageError: A file cannot be read.
    """
    result: dict[str, bytes] = {}
    for share in save.shares:
        for name in _ITERATOR_NAMES:
            for file, content in _states(share.step.path / name):
                if result.setdefault(file, content) != content:
                    raise FormatError(
                        "hosts are at different positions in the data",
                        location=share.step.path / name,
                        got=f"{file} differs from that of {save.shares[0].host} or a later host",
                        hint="leave out the directory of one of them",
                    )
    return OtherItem(_HANDLER, dict(sorted(result.items()))) if result else None


def _states(directory: Location) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the state of each process."""
    shared_directory = directory / _ALL
    if shared_directory.is_file():
        states = read_json(shared_directory)
        invalid = [process for process in states if not (process.isascii() and process.isdigit())]
        if invalid:
            description, expected = "states of data iterators are numbered by process", "0, 1, and so on"
            raise FormatError(description, location=shared_directory, got=repr(invalid[0]), expected=expected)
        for process, state in states.items():
            text = state if isinstance(state, str) else json.dumps(state, indent=4)
            yield f"process_{process}-of-{len(states)}.json", text.encode()
    for location in directory.glob("process_*.json"):
        yield location.name, location.read_bytes()
