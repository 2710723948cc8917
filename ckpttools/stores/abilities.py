"""What a store can do beyond being read: it says so by having the methods of one of these protocols.

There are more beside what they are about: `ckpttools.stores.contents.ListsContents`,
`ckpttools.stores.fetching.Fetches`, `ckpttools.stores.sharing.Shares`, and
`ckpttools.stores.publishing.Publishes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from ckpttools.core.text import format_age
from ckpttools.stores.base import File, Status


@runtime_checkable
class Puts(Protocol):
    """A store that takes whole files."""

    def put(self, key: str, content: bytes) -> None:
        """Writes a small file that has its key only once it is complete, and is durable then; also its
        directories, if need be.

        Raises:
            StorageError, NoSpaceError: it cannot be written; what had the key keeps it.
        """


@runtime_checkable
class Writes(Protocol):
    """A store in which files that nobody reads yet are written at any offset: what grows in a `Staging`."""

    def write(self, key: str, content: bytes) -> None:
        """Writes a small file, in directories that are made if need be; durable when it is published.

        Raises:
            StorageError, NoSpaceError: it cannot be written.
        """

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """Writes into a file that is there; errors as `write`."""


class CopyIdentity(NamedTuple):
    """Identifies a file among its copies.

    Attributes:
        file: changes with the file, and differs between its copies; "" if the file does not exist.
        mount: the host and the mount, if `file` identifies the file only there; "" otherwise.
        is_reliable: whether two different contents never have the same identity.
    """

    file: str
    mount: str = ""
    is_reliable: bool = True


@runtime_checkable
class DistinguishesCopies(Protocol):
    """A store whose file versions are times, so that different contents can have equal versions."""

    def copy_identity(self, key: str) -> CopyIdentity:
        """Identify a file among its copies.

        Raises:
            StorageError: the store does not respond.
        """


@runtime_checkable
class FindsHoles(Protocol):
    """A file in a file system that knows which bytes were never written."""

    def has_hole(self, start: int, stop: int) -> bool:
        """Whether a range has bytes that are not stored; False if the file system cannot tell.

        Raises:
            FormatError, StorageError: as `File.read_into`.
        """


@runtime_checkable
class HasAliases(Protocol):
    """A store in which one directory can have several paths that are not links."""

    def aliases(self, key: str) -> Iterable[object]:
        """Yield identifiers that all paths of a file or directory share.

        Args:
            key: its real path (`Store.real`); it need not exist.

        Raises:
            StorageError: it cannot be inspected.
        """

    def parent_aliases(self, key: str) -> Iterable[object]:
        """Yield the same for all directories that contain it; errors as `aliases`."""


@runtime_checkable
class Walks(Protocol):
    """A store that lists all below a key at less cost than directory by directory."""

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """Each file below a key: the rest of its key, and what it is. Errors as `Store.list`."""


class PendingUpload(NamedTuple):
    """An object that is uploaded in parts, and not there yet.

    Attributes:
        key: that it will have.
        upload: what the store calls it.
        begun: when, in seconds since 1970.
    """

    key: str
    upload: str
    begun: float


@runtime_checkable
class KeepsUploads(Protocol):
    """A store that keeps the parts of uploads until somebody ends or aborts these."""

    def uploads(self, key: str) -> Sequence[PendingUpload]:
        """Those to objects below a key. Raises StorageError where they cannot be listed."""

    def abort(self, uploads: Iterable[PendingUpload]) -> None:
        """Gives them up, also such as have ended. Raises StorageError where that fails."""

    def upload_rule(self, key: str) -> str:
        """The command that has the store abort them, those of the whole bucket, after a day."""


class StoredLock(NamedTuple):
    """A lock that is an object in a bucket.

    Attributes:
        location: the object's location.
        owner: the process that wrote it, for messages.
        age: seconds since it was written.
        is_held: whether that process may still be running.
        release: the command that deletes the object.
    """

    location: str
    owner: str
    age: float
    is_held: bool
    release: str

    def __str__(self) -> str:
        return f"{self.owner}, last seen {format_age(self.age)} ago"


@runtime_checkable
class KeepsLocks(Protocol):
    """A store whose locks are objects, which remain when their process is killed."""

    def locks(self, key: str) -> Sequence[StoredLock]:
        """Return the locks of a destination or a run. Raises StorageError if the store does not respond."""


@runtime_checkable
class SupportsCacheInvalidation(Protocol):
    """A store that remembers what it was told, to ask less."""

    def forget(self, key: str) -> None:
        """Asks again for what is at a key."""


@runtime_checkable
class Renames(Protocol):
    """A store in which a file, or a directory with all below it, gets another key in one step."""

    def rename(self, old: str, new: str) -> None:
        """Gives what has one key another, which nothing has.

        Raises:
            StorageError: it cannot be done.
        """

    def check_can_rename(self, key: str, scratch: str) -> None:
        """Check that a directory can be renamed, without renaming it.

        Args:
            key: the directory's key.
            scratch: a key that only this process uses; nothing is left there.

        Raises:
            StorageError: `rename` would fail.
        """


@runtime_checkable
class Removes(Protocol):
    """A store in which what is there can be deleted. Nothing here asks whether that is expected."""

    def claim(self, key: str, content: bytes) -> bool:
        """Writes a small file that nothing has the key of; durable when it returns.

        A crash may leave a part of it, on a disk. Errors as `Puts.put`.

        Returns:
            Whether that was done; False where something has the key.
        """

    def locked(self, key: str) -> AbstractContextManager[object]:
        """Has the directory at a key to itself, against others that ask for the same, while it is entered.

        On file systems without locks nothing is locked.

        Raises:
            LockedError: another process has it.
            StorageError: it cannot be looked at.
        """

    def remove(self, key: str) -> None:
        """Deletes a file, or a directory with all below it, if it is there; durable when it returns.

        Links are deleted, not followed.

        Raises:
            StorageError: something is mounted in it, or cannot be deleted.
        """


@runtime_checkable
class Pins(Protocol):
    """A store in which what is at a key has a name that never means something else."""

    def pinned(self, key: str) -> str | None:
        """That name, with the scheme; None where it is not known."""


@runtime_checkable
class Links(Protocol):
    """A store in which a file gets a second key without its bytes being moved by this process."""

    def trials(self, key: str) -> LinkTrials:
        """What finds out whether files can be linked below a key, where nothing may be yet."""

    def link(self, source: File, key: str) -> bool:
        """Gives a file another key, too, unless it has it already; what has that key is replaced.

        Returns:
            Whether that was done; False where the store refuses it.

        Raises:
            SourceChangedError, FormatError: the file is not what it was when it was opened.
            StorageError, NoSpaceError: anything else that the store reports.
        """

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """Makes a file of the same length that has the same bytes in some parts (start, stop).

        Raises:
            FormatError, StorageError, NoSpaceError: reading or writing fails, or something has the key.
        """


class LinkTrials(Protocol):
    """Finds out whether files can be linked, once for files that are alike."""

    def refusal(self, source: File) -> str | None:
        """Why a file cannot be linked, in the store's words; None if it can."""
