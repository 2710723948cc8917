"""The share of a step that one host has, in emergency, multi-tier and peer-to-peer checkpoints.

    HOST/STEP/state                          written by an emergency or multi-tier manager, or by peers
    HOST/JOB-sSTEP-nNODE-wWORKER.restore     the same, as named by the agent of multi-tier checkpointing
    HOST/p2p_restore/STEP/state              fetched from another peer
    PERSISTENT/STEP/default                  saved for all by the first slice of an emergency manager

Keys of chunks are global, so a share describes its own content; `ocdbt.process_N` identifies its process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.formats.interrupted import absent
from ckpttools.formats.json_file import json_object, parse_json
from ckpttools.formats.orbax.entries import Entries, entries_of
from ckpttools.formats.orbax.index import PROCESSES
from ckpttools.formats.orbax.metadata import (
    ARRAYS_DIRECTORY,
    COMMIT_FILE,
    SHARDING_FILE,
    TREE_FILE,
    needs_index,
)
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES, Entry, Extent
from ckpttools.formats.orbax.steps import OrbaxItem, Step, directories
from ckpttools.stores.location import Location

FETCHED = "p2p_restore"
_RESTORE = re.compile(r"(?P<job>.+)-s(?P<step>[0-9]+)-n[0-9]+-w[0-9]+\.restore")
# Input file of the multi-tier checkpointing agent, in the directory of a host.
_AGENT, _JOB = "replicator.yaml", re.compile(rb"^\s*job-name\s*:\s*(\S+)", re.MULTILINE)
_LARGEST_AGENT = 1 << 20
OF_PROCESSES = ("process_metadata/global_process_metadata.json", "process_metadata/mesh_metadata.json")
"""Records the devices of each process of the job and their order in the mesh; the same on all hosts."""
# Managers' names for the tree. If a step has only one tree, its name does not matter.
_ITEMS = ("state", "default", "items")
# On GPUs, a host has a directory per process; a parent directory of hosts adds another level.
_DEEPEST = 3
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
        files = [self.step.path / name for name in OF_PROCESSES]
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
    return list(_below(location, _DEEPEST, max_index_bytes))


def _below(location: Location, deepest: int, limit: int) -> Iterator[HostShare]:
    own = list(_of_host(location, location, limit))
    yield from own
    if not own and deepest:
        for directory in directories(location):
            yield from _below(directory, deepest - 1, limit)


def _of_host(host: Location, directory: Location, limit: int) -> Iterator[HostShare]:
    """Yield the shares directly below a directory, and those that were fetched from peers."""
    told = _job_of(directory)
    for location in directories(directory):
        match = _RESTORE.fullmatch(location.name)
        step = Step(location)
        number = int(match["step"]) if match else step.number
        if number is not None and not step.is_in_progress:
            yield from _share(host, number, step, limit, match["job"] if match else told)
        elif location.name == FETCHED:
            yield from _of_host(host / FETCHED, location, limit)


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
