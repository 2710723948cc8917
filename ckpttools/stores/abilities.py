"""Protocols for optional abilities of stores. A store has an ability if it implements the protocol's methods.

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
        """Write a small file atomically and durably, creating its directories if needed.

        Raises:
            StorageError, NoSpaceError: The file cannot be written; an existing file is kept.
        """


@runtime_checkable
class SupportsWrite(Protocol):
    """A store that can write to the unpublished files of a `Staging` at any offset."""

    def write(self, key: str, content: bytes) -> None:
        """Write a small file, creating its directories if needed; it becomes durable when it is published.

        Raises:
            StorageError, NoSpaceError: The file cannot be written.
        """

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """Write to an existing file at an offset; same errors as `write`."""


class CopyIdentity(NamedTuple):
    """Distinguishes a file from its copies.

    Attributes:
        file: Identifier that changes with the file and differs between copies; "" if the file does not exist.
        mount: The host and mount on which `file` is valid; "" if it is valid everywhere.
        is_reliable: Whether different contents always have different identities.
    """

    file: str
    mount: str = ""
    is_reliable: bool = True


@runtime_checkable
class SupportsCopyIdentity(Protocol):
    """A store that uses times as file versions, so that different contents can have the same version."""

    def copy_identity(self, key: str) -> CopyIdentity:
        """Return the identity of a file, which differs between copies.

        Raises:
            StorageError: The store does not respond.
        """


@runtime_checkable
class SupportsHoleDetection(Protocol):
    """A file on a file system that can report which bytes were never written."""

    def has_hole(self, start: int, stop: int) -> bool:
        """Return whether a range has bytes that were never written; False if the file system cannot tell.

        Raises:
            FormatError, StorageError: As for `File.read_into`.
        """


@runtime_checkable
class SupportsAliases(Protocol):
    """A store in which a directory can have several paths that are not links."""

    def aliases(self, key: str) -> Iterable[object]:
        """Yield identifiers that all paths of a file or directory share.

        Args:
            key: The real path (`Store.real`), which need not exist.

        Raises:
            StorageError: The path cannot be accessed.
        """

    def parent_aliases(self, key: str) -> Iterable[object]:
        """Yield such identifiers for all parent directories of a key; same errors as `aliases`."""


@runtime_checkable
class SupportsWalk(Protocol):
    """A store that can list everything below a key faster than directory by directory."""

    def walk(self, key: str) -> Iterator[tuple[str, Status]]:
        """Yield the relative path and status of each file below a key; same errors as `Store.list`."""


class PendingUpload(NamedTuple):
    """A multipart upload that has not been completed.

    Attributes:
        key: Key of the future object.
        upload: The store's ID of the upload.
        begun: Start time, in seconds since 1970.
    """

    key: str
    upload: str
    begun: float


@runtime_checkable
class SupportsUploads(Protocol):
    """A store that keeps the parts of an upload until the upload is completed or aborted."""

    def uploads(self, key: str) -> Sequence[PendingUpload]:
        """Return the pending uploads below a key; raises StorageError if they cannot be listed."""

    def abort(self, uploads: Iterable[PendingUpload]) -> None:
        """Abort uploads, including those that have ended; raises StorageError on failure."""

    def upload_rule(self, key: str) -> str:
        """Return the command that makes the bucket abort incomplete uploads after one day."""


class StoredLock(NamedTuple):
    """A lock that is stored as an object in a bucket.

    Attributes:
        location: Location of the object.
        owner: The process that wrote the lock, for messages.
        age: Age of the lock in seconds.
        is_held: Whether the owner may still be running.
        release: The command that deletes the object.
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
    """A store whose locks are objects, which remain if their process is killed."""

    def locks(self, key: str) -> Sequence[StoredLock]:
        """Return the locks of a destination or a run; raises StorageError if the store does not respond."""


@runtime_checkable
class SupportsCacheInvalidation(Protocol):
    """A store that caches responses."""

    def forget(self, key: str) -> None:
        """Discard the cached status of a key."""


@runtime_checkable
class SupportsRename(Protocol):
    """A store that can rename a file or directory tree in one step."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory to a key that does not exist yet.

        Raises:
            StorageError: The file or directory cannot be renamed.
        """

    def check_can_rename(self, key: str, scratch: str) -> None:
        """Check that a directory can be renamed, without renaming it.

        Args:
            key: Key of the directory.
            scratch: A temporary key that no other process uses; it is removed again.

        Raises:
            StorageError: `rename` would fail.
        """


@runtime_checkable
class SupportsRemove(Protocol):
    """A store that can delete files. None of its methods asks for confirmation."""

    def claim(self, key: str, content: bytes) -> bool:
        """Create a small file durably unless the key exists.

        On a disk, a crash may leave a partial file. Raises the same errors as `SupportsPut.put`.

        Returns:
            Whether the file was created; False if the key exists.
        """

    def locked(self, key: str) -> AbstractContextManager[object]:
        """Hold an exclusive advisory lock on a directory, which only callers of this method respect.

        Does nothing on file systems that do not support locks.

        Raises:
            LockedError: Another process holds the lock.
            StorageError: The directory cannot be accessed.
        """

    def remove(self, key: str) -> None:
        """Delete a file or directory tree durably, if it exists.

        Links are deleted, not followed.

        Raises:
            StorageError: The tree contains a mount point or cannot be deleted.
        """


@runtime_checkable
class SupportsPinning(Protocol):
    """A store that has permanent names for content."""

    def pinned_uri(self, key: str) -> str | None:
        """Return the permanent URL of a key; None if unknown."""


@runtime_checkable
class SupportsLinks(Protocol):
    """A store that can give a file another key without transferring its bytes."""

    def link_trials(self, key: str) -> LinkTrials:
        """Return an object that tests whether files can be linked below a key, which need not exist."""

    def link(self, source: File, key: str) -> bool:
        """Link a file to another key, replacing an existing file there unless it is the same file.

        Returns:
            Whether the file was linked; False if the store refused.

        Raises:
            SourceChangedError, FormatError: The file has changed since it was opened.
            StorageError, NoSpaceError: The store reports any other error.
        """

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """Create a file of the same length with the same bytes in the given ranges (start, stop).

        Raises:
            FormatError, StorageError, NoSpaceError: Reading or writing fails, or the key exists.
        """


class LinkTrials(Protocol):
    """Tests whether files can be linked, once per group of similar files."""

    def refusal(self, source: File) -> str | None:
        """Return the store's reason why a file cannot be linked; None if it can."""
