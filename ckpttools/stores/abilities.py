"""Protocols for optional abilities of a store. A store has an ability if it has the protocol's methods.

More protocols are next to the code that uses them: `ckpttools.stores.contents.SupportsContents`,
`ckpttools.stores.fetching.SupportsFetch`, `ckpttools.stores.sharing.SupportsSharing`, and
`ckpttools.stores.publishing.SupportsPublishing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from ckpttools.core.text import format_age
from ckpttools.stores.base import File, Status


@runtime_checkable
class SupportsPut(Protocol):
    """A store that can write complete files."""

    def put(self, key: str, content: bytes) -> None:
        """Write a small file atomically and durably; create its directories if needed.

        Raises:
            StorageError, NoSpaceError: the file cannot be written; an existing file is kept.
        """


@runtime_checkable
class SupportsWrite(Protocol):
    """A store that can write at any offset into the unpublished files of a `Staging`."""

    def write(self, key: str, content: bytes) -> None:
        """Write a small file and create its directories if needed. It is durable once it is published.

        Raises:
            StorageError, NoSpaceError: the file cannot be written.
        """

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """Write into an existing file; errors as `write`."""


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
class SupportsCopyIdentity(Protocol):
    """A store whose file versions are times, so that different contents can have equal versions."""

    def copy_identity(self, key: str) -> CopyIdentity:
        """Identify a file among its copies.

        Raises:
            StorageError: the store does not respond.
        """


@runtime_checkable
class SupportsHoleDetection(Protocol):
    """A file in a file system that knows which bytes were never written."""

    def has_hole(self, start: int, stop: int) -> bool:
        """Return whether a range has bytes that are not stored; False if the file system cannot tell.

        Raises:
            FormatError, StorageError: as `File.read_into`.
        """


@runtime_checkable
class SupportsAliases(Protocol):
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
class SupportsWalk(Protocol):
    """A store that lists everything below a key faster than directory by directory."""

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """Yield the relative path and status of each file below a key. Errors as `Store.list`."""


class PendingUpload(NamedTuple):
    """A multipart upload that is not complete.

    Attributes:
        key: key of the future object.
        upload: the store's ID of the upload.
        begun: start time in seconds since 1970.
    """

    key: str
    upload: str
    begun: float


@runtime_checkable
class SupportsUploads(Protocol):
    """A store that keeps the parts of an upload until the upload is completed or aborted."""

    def uploads(self, key: str) -> Sequence[PendingUpload]:
        """Return the uploads to objects below a key. Raises StorageError if they cannot be listed."""

    def abort(self, uploads: Iterable[PendingUpload]) -> None:
        """Abort uploads, even if they have ended. Raises StorageError on failure."""

    def upload_rule(self, key: str) -> str:
        """Return the command that makes the bucket abort all incomplete uploads after one day."""


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
class SupportsLocks(Protocol):
    """A store whose locks are objects, which remain when their process is killed."""

    def locks(self, key: str) -> Sequence[StoredLock]:
        """Return the locks of a destination or a run. Raises StorageError if the store does not respond."""


@runtime_checkable
class SupportsCacheInvalidation(Protocol):
    """A store that caches responses."""

    def forget(self, key: str) -> None:
        """Discard the cached status of a key."""


@runtime_checkable
class SupportsRename(Protocol):
    """A store that can rename a file or a directory tree in one step."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory to a key that does not exist.

        Raises:
            StorageError: it cannot be renamed.
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
class SupportsRemove(Protocol):
    """A store that can delete. None of these methods asks for confirmation."""

    def claim(self, key: str, content: bytes) -> bool:
        """Create a small file unless its key exists; durable on return.

        On a disk, a crash may leave part of the file. Errors as `SupportsPut.put`.

        Returns:
            Whether the file was created; False if the key exists.
        """

    def locked(self, key: str) -> AbstractContextManager[object]:
        """Hold an exclusive lock on a directory, which only callers of this method respect.

        Does nothing on file systems without locks.

        Raises:
            LockedError: another process holds the lock.
            StorageError: the directory cannot be inspected.
        """

    def remove(self, key: str) -> None:
        """Delete a file or a directory tree if it exists; durable on return.

        Links are deleted, not followed.

        Raises:
            StorageError: it contains a mount point or cannot be deleted.
        """


@runtime_checkable
class SupportsPinning(Protocol):
    """A store in which content has permanent names."""

    def pinned_uri(self, key: str) -> str | None:
        """Return the permanent URL of a key; None if it is unknown."""


@runtime_checkable
class SupportsLinks(Protocol):
    """A store that can give a file a second key without moving its bytes through this process."""

    def link_trials(self, key: str) -> LinkTrials:
        """Return an object that tests whether files can be linked below a key, which need not exist."""

    def link(self, source: File, key: str) -> bool:
        """Give a file an additional key unless it already has it. An existing file with that key is replaced.

        Returns:
            Whether the file was linked; False if the store refuses.

        Raises:
            SourceChangedError, FormatError: the file has changed since it was opened.
            StorageError, NoSpaceError: any other error of the store.
        """

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """Create a file of the same length that has the same bytes in the given ranges (start, stop).

        Raises:
            FormatError, StorageError, NoSpaceError: reading or writing fails, or the key exists.
        """


class LinkTrials(Protocol):
    """Tests whether files can be linked, once per group of similar files."""

    def refusal(self, source: File) -> str | None:
        """Return the store's reason why a file cannot be linked; None if it can."""
