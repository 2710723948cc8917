"""The units of a copy that become visible atomically: a step of a run, an item or a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import retry_term
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, SHARDING_FILE, TREE_FILE, V1_FILE
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.base import DirEntry, FileKind, Status
from ckpttools.stores.checksums import sample_files
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.evidence import Stamp, get_stamp
from ckpttools.stores.location import Location
from ckpttools.stores.outside_links import find_outside_links
from ckpttools.stores.publishing import PLAN_MARK

# Files by which readers find a checkpoint and its contents, most significant last.
_IDENTIFYING_FILES = (
    "*.safetensors.index.json",
    CONFIG,
    ".zattrs",
    ".zgroup",
    ".zmetadata",
    "zarr.json",
    SHARDING_FILE,
    MANIFEST,
    TREE_FILE,
    CHECKPOINT_FILE,
    V1_FILE,
)
_MAX_IDENTIFYING_BYTES = 8 << 20
_MAX_TOTAL_IDENTIFYING_BYTES = 32 << 20


@dataclass(frozen=True)
class FileGroup:
    """Files that appear together or not at all.

    Attributes:
        source: The directory or file.
        name: Name below the destination; "" for the destination itself.
        step: Step number; None if the group is not a step.
        commits: Names of the files that mark item and step as complete on `gs://`, in this order.
        left_out: Names of files in the directory that do not belong to the group.
    """

    source: Location
    name: str = ""
    step: int | None = None
    commits: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()

    @cached_property
    def files(self) -> Mapping[str, Status]:
        """The files, with the status they had when first listed; raises the errors of `files_below`."""
        return self.current_files()

    def current_files(self) -> Mapping[str, Status]:
        """List the current files; raises the errors of `files_below`."""
        result = files_below(self.source)
        return (
            {name: result[name] for name in result if name not in self.left_out} if self.left_out else result
        )

    @cached_property
    def outside_links(self) -> Mapping[str, str]:
        """Files included through symbolic links; see `ckpttools.stores.outside_links.find_outside_links`."""
        return find_outside_links(self.source, ((self.source / name).key for name in self.files))

    @cached_property
    def stamps(self) -> Mapping[str, Stamp]:
        """The stamp of each file before it is first read; see `ckpttools.stores.evidence`."""
        return {
            name: get_stamp(self.source / name, status, is_source=True) for name, status in self.files.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(result.size for result in self.files.values())

    @property
    def missing_commits(self) -> tuple[str, ...]:
        """Names of the missing commit files."""
        return tuple(name for name in self.commits if name not in self.files)

    @cached_property
    def last(self) -> Sequence[str]:
        """Names of small files that are written after all others, in order."""
        order = {name: number for number, name in enumerate(self._identifying_names)}
        names: list[str] = []
        room = _MAX_TOTAL_IDENTIFYING_BYTES
        for name in sorted(order, key=lambda name: (-order[name], name)):
            size = self.files[name].size
            if size <= min(room, _MAX_IDENTIFYING_BYTES):
                names.append(name)
                room -= size
        return [*reversed(names), *(name for name in self.commits if name in self.files)]

    @property
    def _identifying_names(self) -> list[str]:
        """Names of files that identify a checkpoint, in order; those of the outermost directory come last."""
        ranked = [
            (-name.count("/"), rank, name)
            for name in self.files
            if name.count("/") <= 1 and name not in self.commits and (rank := _rank(name)) is not None
        ]
        return [name for _, _, name in sorted(ranked)]

    def fingerprint(self) -> str:
        """Return a value that is equal for two copies of the same files.

        The value combines sizes and versions, and sampled bytes of local files. Raises the errors of
        `ckpttools.stores.checksums.compute_sample_digests`.
        """
        files = [[name, result.size, result.version] for name, result in self.files.items()]
        is_local = self.source.store.scheme == "file"
        opened = [(self.source / name).open(result) for name, result in self.files.items() if is_local]
        described = [str(self.source.resolve()), files, self.commits, sample_files(opened)]
        return hashlib.sha256(json.dumps(described).encode(errors="surrogatepass")).hexdigest()


def commits_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the commit files of items and of the step, by item name ("" for the step itself)."""
    inner = tuple(f"{name}/{COMMIT_FILE}" for name in names if name)
    return (*inner, COMMIT_FILE)


def _rank(name: str) -> int | None:
    base = name.rpartition("/")[2]
    return next((rank for rank, pattern in enumerate(_IDENTIFYING_FILES) if fnmatchcase(base, pattern)), None)


def files_below(directory: Location) -> Mapping[str, Status]:
    """Return the status of each file below a directory, sorted by "/"-separated name.

    Links to files are followed.

    Raises:
        FormatError: The directory contains something other than files and directories, or a link to a
            directory.
        StorageError: The directory does not exist, or the store cannot be read.
    """
    names = sorted(_names(directory))
    result = map_concurrently(directory.store, lambda name: (directory / name).stat(), names)
    for name, status in zip(names, result, strict=True):
        if status.kind is not FileKind.FILE:
            raise _unsupported_file_error(directory / name, "something that was a file when it was listed")
    return dict(zip(names, result, strict=True))


def _names(directory: Location) -> Iterator[str]:
    for name, entry in directory.below():
        if entry.is_own_dir:
            continue
        if not entry.is_file:
            raise _unsupported_file_error(directory / name, _describe_entry(entry))
        # The plan mark belongs to the command that wrote this checkpoint, not to a copy.
        if name != PLAN_MARK:
            yield name


def _describe_entry(entry: DirEntry) -> str:
    if entry.is_dir:
        return "a link to a directory"
    return "a link whose target is not a file" if entry.is_link else "neither a file nor a directory"


def _unsupported_file_error(location: Location, got: str) -> FormatError:
    return FormatError(
        "some of the content cannot be copied",
        location=location,
        got=got,
        expected="files, links to files, and directories",
        hint=f"remove it, or replace it with its target; then {retry_term()}",
    )
