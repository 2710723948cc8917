"""How a checkpoint grows where nobody takes it for one, and gets its name in one step: asked of the store.

    staging = store.staging(key, overwrite, check_replaced)
    staging.check(plan, nbytes)                      what stops a run before it writes anything
    with staging.opened(purpose, nbytes) as work:    the destination is this process's alone
        files = work.data_files(sizes, heads)        bytes of arrays, from any thread
        work.enter(records)                          what is done and durable: the same command skips it
        work.publish()                               all of it has its name, durable, or none of it
        work.conclude()                              no trace of the work is left

`ckpttools.stores.local` does this with a directory beside the destination and one rename, `memory` with a
dictionary, the hub with one commit (`ckpttools.stores.web.hub_staging`).

**In a bucket** there is no rename and no lock, and an object is written from its first byte to its last. The
same protocol holds with other means (`ckpttools.stores.objects.staging`):

* `Store.streams` says so, and how large an object should be. The plan then cuts tasks that write each file in
  order (`ckpttools.plan.streamed`): all tasks of a file are a group, which one worker does. A group is
  entered when its objects are complete: work goes on object by object. Every object is marked with its plan.
* `content` is the final key itself, where nothing is yet. It is a store of its own that keeps what `write`
  gives it, which are small files, until `publish` puts them: the last two, which say that step and item are
  complete, when all others are there. Until then readers find no checkpoint. Nothing is put over an object
  that somebody else has written.
* What is to be replaced stays until all is complete beside it, below `<destination>.partial/content/`. Then
  it is deleted, and the cloud copies the new one to its place, the last two files last. A conversion that is
  stopped meanwhile goes on with that.
* The journal is objects below `<destination>.partial/journal/`, each put once. The lock is an object that its
  owner puts again every few seconds, on the condition that it is unchanged (`objects/lock.py`).
* `conclude` deletes the journal, then the lock, then what says that all is done.
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
"""File in a checkpoint that is being published: the fingerprint of its plan. The last thing to leave it."""

SUFFIX = ".partial"
JOURNAL, LOCK, CONTENT = "journal", "lock", "content"
"""In buckets: what is appended to the name of a destination, and what is below that."""

UNPROTECTED = "CKPTTOOLS_ALLOW_UNPROTECTED"
"""Environment variable to accept a bucket whose server does not detect a second writer."""

Record: TypeAlias = Sequence[object]
"""A finished task in terms of JSON: its number comes first; the rest is known only to its writer."""


@contextmanager
def allowing_unprotected() -> Iterator[None]:
    """Accept buckets whose server does not detect a second writer, also in worker processes."""
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
    """Another process is at work on the same destination."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What a conversion is for.

    Attributes:
        plan: fingerprint of its plan.
        source: what is converted, for messages.
        command: the command line, for messages; "" where there is none.
        directory: where that was given.
        division: how the work is divided into tasks, as text. It follows from the memory and the number of
            workers; whoever resumes the work with others takes the same division.
    """

    plan: str
    source: str = ""
    command: str = ""
    directory: str = ""
    division: str = ""

    def is_same_command(self, other: JobInfo) -> bool:
        """Whether two plans were made by one command, which may have found another source."""
        return bool(self.command) and (self.source, self.command, self.directory) == (
            other.source,
            other.command,
            other.directory,
        )


class Series:
    """The ends of series of files to which data is appended, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, tuple[int, int]] = {}

    def take(self, name: str, limit: int, nbytes: int) -> tuple[str, int]:
        """The file and the offset that the next `nbytes` get; arguments as of `DataFiles.append`."""
        with self._lock:
            number, end = self._ends.get(name, (0, 0))
            if end >= limit:
                number, end = number + 1, 0
            self._ends[name] = number, end + nbytes
        return f"{name}-{number:05d}", end

    def extend(self, name: str, end: int) -> None:
        """As `DataFiles.extend`."""
        series, dash, number = name.rpartition("-")
        if dash and number.isdigit():
            with self._lock:
                self._ends[series] = max(self._ends.get(series, (0, 0)), (int(number), end))


class Sink(Protocol):
    """What takes the bytes of a group of tasks.

    Attributes:
        is_rehearsal: whether they are only looked at, and will be asked for once more.
    """

    @property
    def is_rehearsal(self) -> bool: ...

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        """Writes all of `data` at `offset`.

        Args:
            name: of the file, below the checkpoint's root.
            offset: byte in the file.
            data: what to write.
            address: where `data` lies in memory.
            loose: size of a file that is not one of those given in the beginning; it is made if need be.

        Raises:
            StorageError, NoSpaceError: the store reports an error.

        Where the store streams files (`Store.streams`), those of a file come in order of their offsets, and
        what lies between two is filled with zeros.
        """

    def write_whole(self, name: str, data: bytes) -> None:
        """Writes a file of its own; errors as `write`."""

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        """Writes at the end of the last file of a series; errors as `write`.

        Args:
            name: of the series; its files have numbers appended.
            limit: bytes after which the next file is begun.
            data: what to write.

        Returns:
            The file and the offset that the data got.
        """


@runtime_checkable
class IdentifiesFiles(Protocol):
    """A sink whose files can be removed or replaced while they are written."""

    def identity(self, name: str) -> str:
        """Return a text that differs for another file with the same name; see `file_identity`."""


@runtime_checkable
class KeepsFiles(Protocol):
    """Work that publishes only files of its plan."""

    def keep_files(self, names: Iterable[str], series: Iterable[str] = ()) -> None:
        """Expect files that earlier runs of the plan wrote.

        Args:
            names: their names below the checkpoint's root.
            series: names of series to which data is appended. An interrupted run may have left any of their
                files.
        """


@runtime_checkable
class FindsChangedFiles(Protocol):
    """Work in a store whose files have versions."""

    def changed_files(self) -> Sequence[str]:
        """Return the names of files that are not what earlier runs of the plan wrote.

        Raises:
            StorageError: the store does not respond.
        """


def file_identity(root: object, file: object) -> str:
    """Identify a file by its inode and that of the checkpoint's root directory.

    Args:
        root, file: `Status.identity` of both.

    Returns:
        The identity; "" if the store has no inodes.
    """
    match root, file:
        case (_, int(root_inode)), (_, int(inode)):
            return f"{root_inode}:{inode}"
    return ""


class DataFiles(Protocol):
    """The data files of a checkpoint that grows, written by several threads."""

    def passes(self, group: int) -> Generator[Sink]:
        """Takes the bytes of a group of tasks, which are made once for every sink.

        When all sinks have been given, the group is written; durable after `sync`. Whoever gives up before
        closes the generator: of a file that is streamed nothing remains then.

        Args:
            group: its number, the same in every run of a plan.

        Raises:
            StorageError, NoSpaceError: the store reports an error.
        """

    def write_heads(self) -> None:
        """Writes the first bytes of files that have such, where that was not done; errors as `passes`."""

    def extend(self, name: str, end: int) -> None:
        """Takes note of what an earlier run appended, so that nothing is written over it.

        Args:
            name: of the file.
            end: bytes of it that are taken.
        """

    def sync(self) -> None:
        """Returns when everything written so far is durable; errors as `passes`."""

    def close(self) -> None:
        """Gives back what writing took. What was not synced may be lost."""


class Work(Protocol):
    """A destination that is this process's alone, from the first look at it to the end."""

    @property
    def content(self) -> Location:
        """Where the checkpoint grows; its store has `Writes`."""

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run of this plan has published all: nothing is left to do but to `conclude`."""

    @property
    def records(self) -> Sequence[Record]:
        """What an earlier run of this plan has entered."""

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> DataFiles:
        """The data files, each of its full size, those of an earlier run with what they hold.

        Args:
            sizes: bytes of each.
            heads: the first bytes of some, which no task writes.

        Raises:
            StorageError, NoSpaceError: they cannot be made.
        """

    def enter(self, records: Iterable[Record]) -> None:
        """Notes, durably, that tasks are done whose bytes are durable; errors as `data_files`."""

    def discard(self) -> None:
        """Gives up what was done; errors as `data_files`."""

    def publish(self) -> None:
        """Gives the content its final name, in one step; what had the name before goes last.

        Raises:
            DestinationExistsError: somebody else has taken the name meanwhile.
            StorageError, NoSpaceError: the store reports an error.
        """

    def conclude(self) -> None:
        """Removes all traces of the work; errors as `data_files`."""


@runtime_checkable
class PublishesChecked(Protocol):
    """Work that keeps the replaced checkpoint until the new one has been checked under its name."""

    def publish_checked(self, check: Callable[[], None]) -> None:
        """As `Work.publish`.

        Args:
            check: called after the checkpoint has replaced an older one. If it raises, the older one gets its
                name back.

        Raises:
            CheckpointError: as `Work.publish`, and as `check`.
        """


@runtime_checkable
class ForksWriters(Protocol):
    """Work whose data files processes may write that are forked from this one."""

    def files_of_fork(self, sizes: Mapping[str, int]) -> Sink:
        """The data files, in a process that was forked from the one that has made them, or will have made
        them when this one writes. What it has written before it says so, their `sync` there makes durable.

        Args:
            sizes: bytes of each. Nothing is appended, and no file is written whole.

        Raises:
            StorageError, NoSpaceError: they cannot be opened.
        """


@dataclass(frozen=True, slots=True)
class Published:
    """What a checkpoint has become in a repository.

    Attributes:
        url: its page.
        is_private: whether only its owners read it.
        commit: the one that has the checkpoint.
    """

    url: str
    is_private: bool
    commit: str


@runtime_checkable
class SupportsPublished(Protocol):
    """Work whose result others find at an address."""

    @property
    def published(self) -> Published | None:
        """What it has become, once `publish` was called."""


class Staging(Protocol):
    """A destination, before anything is written to it."""

    @property
    def taken(self) -> Sequence[Location]:
        """What is written, replaced or deleted: the destination, and where it grows."""

    def check(self, plan: str, nbytes: int) -> None:
        """Refuses before anything is written.

        Args:
            plan: fingerprint of what is to be done.
            nbytes: bytes that will be written.

        Raises:
            UsageError: the destination cannot be one.
            DestinationExistsError: the name is taken and may not be replaced.
            NoSpaceError: there is less room than needed.
        """

    def opened(self, purpose: JobInfo, nbytes: int = 0) -> AbstractContextManager[Work]:
        """Takes the destination for this process.

        Args:
            purpose: what is to be done, which `check` has let pass.
            nbytes: as for `check`: what was published, and changed since, is written once more.

        Raises:
            LockedError: another process is writing it.
            UsageError: the beginning of another conversion is there, or something that is not ours.
            DestinationExistsError: an earlier run has published it, and it was changed since.
            CheckpointError: as `check`; or the store reports an error.
        """


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an interrupted conversion has left.

    Attributes:
        location: where.
        replaced: what had the destination's name and has to get it back; None if nothing has.
        command: the command line that began it, where that is known.
        writer: the process that is at work on it, in words; "" if none is, as far as is known.
        directory: where the command was given; "" where that is not known.
        release: the command that releases the lock of `writer`; "" where there is none.
        plan: fingerprint of its plan; "" where that is not known.
        division: as of `JobInfo`.
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
        """Suggest what to do about the active process."""
        release = f"; if it is gone, release its lock: {self.release}" if self.release else ""
        return f"wait until it is done{release}"

    @property
    def kind(self) -> str:
        """What it was: a copy or a conversion."""
        return "copy" if self.command.startswith("ckpt copy ") else "conversion"


@runtime_checkable
class Publishes(Protocol):
    """A store in which checkpoints can be made."""

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> Staging:
        """A destination.

        Args:
            key: the final name.
            overwrite: whether what has that name, or an unfinished other conversion to it, may be replaced.
            check_replaced: called where something is there; raises `DestinationExistsError` if it may not be
                replaced by what will be written, whatever the user says.
        """

    def unfinished(self, key: str) -> Unfinished | None:
        """What `key` itself is, if it is where a conversion grows or grew until it was interrupted."""

    def begun_at(self, key: str) -> Unfinished | None:
        """What an interrupted conversion to `key` has left, if there was one."""


def staging_of(
    destination: Location, overwrite: bool = False, check_replaced: Callable[[], None] = lambda: None
) -> Staging:
    """How a checkpoint grows before it gets this name; arguments as those of `Publishes.staging`.

    Raises:
        UsageError: no checkpoint can be made in this store.
    """
    if isinstance(destination.store, Publishes):
        return destination.store.staging(destination.key, overwrite, check_replaced)
    raise UsageError(
        f"no checkpoint can be written to {destination.store.scheme}://",
        location=destination,
        expected="a destination that can be written, such as a local directory",
        hint=destination.store.instead_of_writing(destination.key),
    )


def unfinished_at(location: Location) -> Unfinished | None:
    """What an interrupted conversion has left, if `location` is where it grew."""
    return location.store.unfinished(location.key) if isinstance(location.store, Publishes) else None


def begun_at(destination: Location) -> Unfinished | None:
    """What an interrupted conversion to a destination has left beside it, None if there is nothing."""
    return destination.store.begun_at(destination.key) if isinstance(destination.store, Publishes) else None


def check_name(destination: Location) -> None:
    """Raises UsageError if a destination is not a name that a directory can be given."""
    if not destination.name or destination.name == "..":
        raise UsageError(
            f"{str(destination)!r} cannot be a destination",
            expected="the name of a directory to be made, such as out or /data/out",
            hint="give it a name of its own",
        )
