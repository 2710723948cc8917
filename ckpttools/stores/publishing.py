"""How a checkpoint grows where nobody takes it for one, and gets its name in one step: asked of the store.

    staging = store.staging(key, overwrite, check_replaced)
    staging.check(plan, nbytes)                      what stops a run before it writes anything
    with staging.opened(purpose) as work:            the destination is this process's alone
        files = work.data_files(sizes)               bytes of arrays, at any place, from any thread
        work.enter(records)                          what is done and durable: the same command skips it
        work.publish()                               all of it has its name, durable, or none of it
        work.conclude()                              nothing tells of the work any more

`ckpttools.stores.local` does this with a directory beside the destination and one rename, `memory` with a
dictionary.

**On an object store** there is no rename, no lock, and an object is written from its first byte to its last.
The same protocol holds with other means, in one file for all such stores:

* `content` is the final prefix itself. A reader goes by what is put last, so what is there before is only
  bytes: for Orbax data files, index, `manifest.ocdbt`, metadata, the item's commit file, the step's commit
  file, in this order (Orbax itself lists a step without its commit files). `content` is therefore a store of
  its own that keeps what `write` gives it, which are small files, until `publish` puts them: commit files
  last, everything else before them.
* The layout must cut data into files of limited size, and `write` be called for each of these by one thread,
  from its beginning to its end: a group of tasks is one object, a write a part of its upload. Nothing asks a
  store for that yet. `sync` ends the uploads of files that are full and returns when they are there; others
  are begun again by the next run. `append` and `write_whole` make an object each.
* The journal is objects below `<destination>.partial/`: one for each call of `enter`, numbered, put under the
  condition that there is none (`if-none-match: *`). The first is the purpose. The lock is such an object,
  too, which names its owner and is put again every few seconds under the condition that it is unchanged
  (`if-match`); whoever finds one that has not changed for a minute takes it over in the same way.
* What is replaced cannot be moved away: `publish` deletes its commit file first, then what the new checkpoint
  does not have; `check` says so, and refuses without `overwrite`. `check_replaced` is asked before, as
  everywhere.
* `conclude` deletes the journal, then the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.stores.place import Place

PLAN_MARK = ".ckpttools-plan"
"""File in a checkpoint that is being published: the fingerprint of its plan. The last thing to leave it."""

Record: TypeAlias = Sequence[object]
"""A finished task in terms of JSON: its number comes first; the rest is known only to its writer."""


class LockedError(UsageError):
    """Another process is at work on the same destination."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a conversion is for.

    Attributes:
        plan: fingerprint of its plan.
        source: what is converted, for messages.
        command: the command line, for messages; "" where there is none.
        directory: where that was given.
    """

    plan: str
    source: str = ""
    command: str = ""
    directory: str = ""


class Series:
    """The ends of series of files to which data is appended, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, tuple[int, int]] = {}

    def take(self, name: str, most: int, nbytes: int) -> tuple[str, int]:
        """The file and the offset that the next `nbytes` get; arguments as of `DataFiles.append`."""
        with self._lock:
            number, end = self._ends.get(name, (0, 0))
            if end >= most:
                number, end = number + 1, 0
            self._ends[name] = number, end + nbytes
        return f"{name}-{number:05d}", end

    def extend(self, name: str, end: int) -> None:
        """As `DataFiles.extend`."""
        series, dash, number = name.rpartition("-")
        if dash and number.isdigit():
            with self._lock:
                self._ends[series] = max(self._ends.get(series, (0, 0)), (int(number), end))


class DataFiles(Protocol):
    """The data files of a checkpoint that grows, written by several threads."""

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
        """

    def write_whole(self, name: str, data: bytes) -> None:
        """Writes a file of its own; errors as `write`."""

    def append(self, name: str, most: int, data: bytes) -> tuple[str, int]:
        """Writes at the end of the last file of a series; errors as `write`.

        Args:
            name: of the series; its files have numbers appended.
            most: bytes after which the next file is begun.
            data: what to write.

        Returns:
            The file and the offset that the data got.
        """

    def extend(self, name: str, end: int) -> None:
        """Takes note of what an earlier run appended, so that nothing is written over it.

        Args:
            name: of the file.
            end: bytes of it that are taken.
        """

    def sync(self) -> None:
        """Returns when everything written so far is durable; errors as `write`."""

    def close(self) -> None:
        """Gives back what writing took. What was not synced may be lost."""


class Work(Protocol):
    """A destination that is this process's alone, from the first look at it to the end."""

    @property
    def content(self) -> Place:
        """Where the checkpoint grows; its store has `Writes`."""

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run of this plan has published all: nothing is left to do but to `conclude`."""

    @property
    def records(self) -> Sequence[Record]:
        """What an earlier run of this plan has entered."""

    def data_files(self, sizes: Mapping[str, int]) -> DataFiles:
        """The data files, each of its full size, those of an earlier run with what they hold.

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


class Staging(Protocol):
    """A destination, before anything is written to it."""

    @property
    def taken(self) -> Sequence[Place]:
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

    def opened(self, purpose: Purpose, nbytes: int = 0) -> AbstractContextManager[Work]:
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
        place: where.
        replaced: what had the destination's name and has to get it back; None if nothing has.
    """

    place: Place
    replaced: Place | None = None


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
    destination: Place, overwrite: bool = False, check_replaced: Callable[[], None] = lambda: None
) -> Staging:
    """How a checkpoint grows before it gets this name; arguments as those of `Publishes.staging`.

    Raises:
        UsageError: no checkpoint can be made in this store.
    """
    if isinstance(destination.store, Publishes):
        return destination.store.staging(destination.key, overwrite, check_replaced)
    raise UsageError(
        f"no checkpoint can be written to {destination.store.scheme}://",
        place=destination,
        wanted="a destination that can be written, such as a local directory",
        hint=destination.store.instead_of_writing(destination.key),
    )


def unfinished_at(place: Place) -> Unfinished | None:
    """What an interrupted conversion has left, if `place` is where it grew."""
    return place.store.unfinished(place.key) if isinstance(place.store, Publishes) else None


def begun_at(destination: Place) -> Unfinished | None:
    """What an interrupted conversion to a destination has left beside it, None if there is nothing."""
    return destination.store.begun_at(destination.key) if isinstance(destination.store, Publishes) else None


def check_name(destination: Place) -> None:
    """Raises UsageError if a destination is not a name that a directory can be given."""
    if not destination.name or destination.name == "..":
        raise UsageError(
            f"{str(destination)!r} cannot be a destination",
            wanted="the name of a directory to be made, such as out or /data/out",
            hint="give it a name of its own",
        )
