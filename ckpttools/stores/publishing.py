"""Protocols for writing a checkpoint where readers cannot see it, and publishing it in one step.

    staging = store.staging(key, overwrite, check_replaced)
    staging.check(plan, nbytes)                      raises errors before anything is written
    with staging.opened(purpose, nbytes) as work:    locks the destination for this process
        files = work.data_files(sizes, heads)        receives bytes of arrays from any thread
        work.record(records)                         records durable tasks, which a resumed command skips
        work.publish()                               gives the complete, durable checkpoint its name
        work.finalize()                              removes all remains of the work

`ckpttools.stores.local` uses a directory next to the destination and one rename, `memory` uses a dictionary,
and the Hub uses one commit (`ckpttools.stores.web.hub_staging`).

**Buckets** have neither renames nor locks, and objects are written sequentially. For them, the protocol is
implemented differently (`ckpttools.stores.objects.staging`):

* `Store.streams` declares sequential writes and the best size of an object. The plan then orders the tasks of
  each file (`ckpttools.plan.task`): all tasks of a file form a group for one worker. A group is recorded
  when its objects are complete, so work resumes object by object. Every object is marked with its plan.
* `content` is the final key itself if that does not exist yet. Its store buffers the small files passed to
  `write` until `publish` writes them. The two files that mark the step and the item as complete are written
  last, so readers find no checkpoint before that. Objects of other writers are never overwritten.
* A checkpoint that will be replaced remains until the new one is complete in
  `<destination>.partial/content/`. It is then deleted, and the cloud copies the new one to its location, with
  the same two files last. After an interruption, the same command resumes this.
* The journal consists of objects in `<destination>.partial/journal/`, each written once. The lock is an
  object that its owner rewrites every few seconds, on the condition that it is unchanged (`objects/lock.py`).
* `finalize` deletes the journal, then the lock, then the object that marks the work as done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.stores.location import Location

PLAN_MARK = ".ckpttools-plan"
"""File in a checkpoint that is being published, with the fingerprint of its plan. It is removed last."""

PLAN_KINDS = "ckpttools-plan-"
"""Start of the first text in a plan file, followed by the version of the format."""

SUFFIX = ".partial"
JOURNAL, LOCK, CONTENT = "journal", "lock", "content"
"""In buckets, suffix of a destination's staging directory, and names below it."""

UNPROTECTED = "CKPTTOOLS_ALLOW_UNPROTECTED"
"""Environment variable that accepts buckets whose server does not detect a second writer."""

Record: TypeAlias = Sequence[object]
"""A finished task as JSON values: the task index, followed by values that only the writer interprets."""


@contextmanager
def allowing_unprotected() -> Iterator[None]:
    """Accept buckets whose server does not detect a second writer, in worker processes as well."""
    before = os.environ.get(UNPROTECTED)
    os.environ[UNPROTECTED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[UNPROTECTED]
        else:
            os.environ[UNPROTECTED] = before


class LockedError(UsageError):
    """Another process is using the same destination."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """The description of a conversion.

    Attributes:
        plan: Fingerprint of the plan.
        source: The source, for messages.
        command: The command line, for messages; "" if there is none.
        directory: Working directory of the command.
        division: How the work is divided into tasks, as text. It depends on the memory limit and the number
            of workers; a resumed run keeps the division even if those differ.
    """

    plan: str
    source: str = ""
    command: str = ""
    directory: str = ""
    division: str = ""

    def is_same_command(self, other: JobInfo) -> bool:
        """Return whether two plans come from the same command, even if the source has changed."""
        return bool(self.command) and (self.source, self.command, self.directory) == (
            other.source,
            other.command,
            other.directory,
        )


class Series:
    """Thread-safe end offsets of file series to which data is appended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, tuple[int, int]] = {}

    def take(self, name: str, limit: int, nbytes: int) -> tuple[str, int]:
        """Return the file and offset for the next `nbytes`; arguments as for `DataFiles.append`."""
        with self._lock:
            number, end = self._ends.get(name, (0, 0))
            if end >= limit:
                number, end = number + 1, 0
            self._ends[name] = number, end + nbytes
        return f"{name}-{number:05d}", end

    def extend(self, name: str, end: int) -> None:
        """See `DataFiles.extend`."""
        series, dash, number = name.rpartition("-")
        if dash and number.isdigit():
            with self._lock:
                self._ends[series] = max(self._ends.get(series, (0, 0)), (int(number), end))


class Sink(Protocol):
    """Writes the bytes of a group of tasks.

    Attributes:
        is_dry_pass: Whether the bytes are only inspected and must be written again.
    """

    @property
    def is_dry_pass(self) -> bool: ...

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        """Write all of `data` at `offset`.

        If the store writes files sequentially (`Store.streams`), writes to a file must be in the order of
        their offsets. Gaps are filled with zeros.

        Args:
            name: Path of the file below the checkpoint's root.
            offset: Offset in the file in bytes.
            data: The bytes to write.
            address: Memory address of `data`.
            loose: Size of a file that was not declared in advance, which is created if needed.

        Raises:
            StorageError, NoSpaceError: The store reports an error.
        """

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a complete file that was not declared in advance; same errors as `write`."""

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        """Append to the last file of a series; same errors as `write`.

        Args:
            name: Name of the series; its files have numbers appended.
            limit: File size in bytes after which a new file is started.
            data: The bytes to write.

        Returns:
            The file and offset of the data.
        """


@runtime_checkable
class SupportsFileIdentity(Protocol):
    """A sink whose files other processes can remove or replace while they are written."""

    def identity(self, name: str) -> str:
        """Return a text that changes if another file gets the same name; see `file_identity`."""


@runtime_checkable
class SupportsKeepFiles(Protocol):
    """Work that publishes only files of its plan."""

    def keep_files(self, names: Iterable[str], series: Iterable[str] = ()) -> None:
        """Register files that earlier runs of the plan wrote.

        Args:
            names: Names of the files below the checkpoint's root.
            series: Names of series to which data is appended. An interrupted run may have left any of their
                files.
        """


@runtime_checkable
class SupportsChangedFiles(Protocol):
    """Work in a store whose files have versions."""

    def changed_files(self) -> Sequence[str]:
        """Return the names of files that have changed since earlier runs of the plan wrote them.

        Raises:
            StorageError: The store does not respond.
        """


def file_identity(root: object, file: object) -> str:
    """Identify a file by its inode and the inode of the checkpoint's root directory.

    Args:
        root, file: The `Status.identity` of both.

    Returns:
        The identity; "" if the store has no inodes.
    """
    match root, file:
        case (_, int(root_inode)), (_, int(inode)):
            return f"{root_inode}:{inode}"
    return ""


class DataFiles(Protocol):
    """The data files of an unpublished checkpoint, written by several threads."""

    def write_passes(self, group: int) -> Generator[Sink]:
        """Yield the sinks of a group of tasks; the bytes must be produced once for each sink.

        The group is written when the generator ends, and durable after `sync`. To give up, close the
        generator; nothing remains of sequentially written files then.

        Args:
            group: Index of the group, which is the same in every run of a plan.

        Raises:
            StorageError, NoSpaceError: The store reports an error.
        """

    def write_heads(self) -> None:
        """Write the declared first bytes of files, unless that was done; same errors as `write_passes`."""

    def extend(self, name: str, end: int) -> None:
        """Reserve the data that an earlier run appended, so that it is not overwritten.

        Args:
            name: Name of the file.
            end: End offset of the data in bytes.
        """

    def sync(self) -> None:
        """Make everything written so far durable; same errors as `write_passes`."""

    def close(self) -> None:
        """Release resources. Data that has not been synced may be lost."""


class Work(Protocol):
    """A destination that this process has locked."""

    @property
    def content(self) -> Location:
        """Return the location of the unpublished checkpoint; its store has `SupportsWrite`."""

    @property
    def is_complete(self) -> bool:
        """Return whether an earlier run of this plan has published everything, so that only `finalize`
        remains.
        """

    @property
    def records(self) -> Sequence[Record]:
        """Return the records of earlier runs of this plan."""

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> DataFiles:
        """Open the data files at their full sizes, keeping the content of earlier runs.

        Args:
            sizes: Size of each file in bytes.
            heads: The first bytes of some files, which no task writes.

        Raises:
            StorageError, NoSpaceError: The files cannot be created.
        """

    def record(self, records: Iterable[Record]) -> None:
        """Durably record tasks whose bytes are durable; same errors as `data_files`."""

    def discard(self) -> None:
        """Discard the finished work; same errors as `data_files`."""

    def publish(self) -> None:
        """Give the content its final name in one step, then remove a replaced checkpoint.

        Raises:
            DestinationExistsError: Another process has created the destination in the meantime.
            StorageError, NoSpaceError: The store reports an error.
        """

    def finalize(self) -> None:
        """Remove all remains of the work; same errors as `data_files`."""


@runtime_checkable
class SupportsCheckedPublish(Protocol):
    """Work that keeps the replaced checkpoint until the new one has been checked under its name."""

    def publish_checked(self, check: Callable[[], None]) -> None:
        """See `Work.publish`.

        Args:
            check: Called after the checkpoint has replaced an older one. If it raises, the older one gets its
                name back.

        Raises:
            CheckpointError: As for `Work.publish` and `check`.
        """


@runtime_checkable
class SupportsForkedWriters(Protocol):
    """Work whose data files forked processes can write to."""

    def files_of_fork(self, sizes: Mapping[str, int]) -> Sink:
        """Open the data files in a forked process.

        The parent process also opens the files. After a report from the fork, the parent's `sync` makes the
        fork's bytes durable.

        Args:
            sizes: Size of each file in bytes. The fork cannot append to files or write complete files.

        Raises:
            StorageError, NoSpaceError: The files cannot be opened.
        """


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that was published in a repository.

    Attributes:
        url: URL of the repository's page.
        is_private: Whether only the owners can read the repository.
        commit: The commit that contains the checkpoint.
    """

    url: str
    is_private: bool
    commit: str


@runtime_checkable
class SupportsPublished(Protocol):
    """Work whose result has a public address."""

    @property
    def published(self) -> Published | None:
        """Return the published checkpoint, after `publish`."""


class Staging(Protocol):
    """The destination of a conversion before anything is written to it."""

    @property
    def taken(self) -> Sequence[Location]:
        """Return the locations that are written, replaced or deleted: the destination and its staging."""

    def check(self, plan: str, nbytes: int) -> None:
        """Check the destination before anything is written.

        Args:
            plan: Fingerprint of the plan.
            nbytes: Number of bytes that will be written.

        Raises:
            UsageError: The location cannot be a destination.
            DestinationExistsError: The destination exists and may not be replaced.
            NoSpaceError: There is too little free space.
        """

    def opened(self, purpose: JobInfo, nbytes: int = 0) -> AbstractContextManager[Work]:
        """Lock the destination for this process.

        Args:
            purpose: The conversion, which has passed `check`.
            nbytes: As for `check`, in case a published checkpoint was changed and must be rewritten.

        Raises:
            LockedError: Another process is writing to the destination.
            UsageError: The staging location has another unfinished conversion, or files that ckpttools does
                not own.
            DestinationExistsError: An earlier run published the checkpoint, and it has changed since.
            CheckpointError: As for `check`, or the store reports an error.
        """


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The remains of an interrupted conversion.

    Attributes:
        location: The staging location.
        replaced: The checkpoint that must get the destination's name back, or None.
        command: The command line that started the conversion, if known.
        writer: Description of the active process; "" if none is known.
        directory: Working directory of the command; "" if unknown.
        release: The command that releases the lock of `writer`; "" if there is none.
        plan: Fingerprint of the plan; "" if unknown.
        division: As for `JobInfo`.
    """

    location: Location
    replaced: Location | None = None
    command: str = ""
    writer: str = ""
    directory: str = ""
    release: str = ""
    plan: str = ""
    division: str = ""

    @property
    def wait(self) -> str:
        """Return a hint about the active process."""
        release = f"; to release its lock: {self.release}" if self.release else ""
        return f"wait until it is done{release}"

    @property
    def kind(self) -> str:
        """Return the kind of work: a copy or a conversion."""
        return "copy" if self.command.startswith("ckpt copy ") else "conversion"


@runtime_checkable
class SupportsPublishing(Protocol):
    """A store in which checkpoints can be created."""

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> Staging:
        """Return a staging area for a destination.

        Args:
            key: Key of the destination.
            overwrite: Whether an existing checkpoint or another unfinished conversion may be replaced.
            check_replaced: Called if the destination exists. Raises `DestinationExistsError` if the new
                checkpoint must not replace it.
        """

    def unfinished(self, key: str) -> Unfinished | None:
        """Return the unfinished conversion whose staging location is `key`, or None."""

    def find_unfinished(self, key: str) -> Unfinished | None:
        """Return the unfinished conversion to the destination `key`, or None."""


def staging_of(
    destination: Location, overwrite: bool = False, check_replaced: Callable[[], None] = lambda: None
) -> Staging:
    """Return the staging of a destination; arguments as for `SupportsPublishing.staging`.

    Raises:
        UsageError: New checkpoints cannot be created in the store.
    """
    if isinstance(destination.store, SupportsPublishing):
        return destination.store.staging(destination.key, overwrite, check_replaced)
    raise UsageError(
        f"checkpoints cannot be written to {destination.store.scheme}://",
        location=destination,
        expected="a writable destination, such as a local directory",
        hint=destination.store.write_alternative(destination.key),
    )


def read_unfinished(location: Location) -> Unfinished | None:
    """Return the unfinished conversion whose staging location is `location`, or None."""
    return location.store.unfinished(location.key) if isinstance(location.store, SupportsPublishing) else None


def find_unfinished(destination: Location) -> Unfinished | None:
    """Return the unfinished conversion to a destination, or None."""
    return (
        destination.store.find_unfinished(destination.key)
        if isinstance(destination.store, SupportsPublishing)
        else None
    )


def check_name(destination: Location) -> None:
    """Raise UsageError if a destination is not a valid directory name."""
    if not destination.name or destination.name == "..":
        raise UsageError(
            f"{str(destination)!r} cannot be a destination",
            expected="the name of a new directory, such as out or /data/out",
            hint="choose another name",
        )
