"""The interface of a store: bytes under keys, as in a file system, a bucket or a hub.

A new store takes one module with a `Store` and one line in the registry; see docs/add-a-store.md. A readable
store needs three methods. Other abilities are optional: a store has them if it implements protocols such as
those of `ckpttools.stores.abilities`.

A key is the part after `scheme://`: non-empty names separated by `/`, or "" for the root.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.stores.costs import Costs, Streams, Traffic

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Size limit for small files: configurations take kilobytes, tokenizers take megabytes.
LARGEST_WHOLE = 512 << 20


class FileKind(Enum):
    """The type of a key. In a bucket, a directory is a common prefix of keys that ends before a `/`."""

    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "neither a file nor a directory"


class Status(NamedTuple):
    """The current status of a key.

    Attributes:
        kind: Whether the key is a file, a directory or something else.
        size: Size of a file in bytes.
        version: Version of a file's content: modification time, ETag or generation.
        identity: Identifier that changes when another file or directory gets the name; None if the version
            changes then.
        links: Number of hard links to a file; None if unknown.
        modified: Modification time in nanoseconds since 1970; None if unknown.
    """

    kind: FileKind
    size: int = 0
    version: str = ""
    identity: object = None
    modified: int | None = None
    links: int = 1


class DirEntry(NamedTuple):
    """An entry of a directory listing.

    Attributes:
        name: Last component of the key.
        kind: Type of the entry, after following links.
        is_link: Whether the entry is a link.
    """

    name: str
    kind: FileKind
    is_link: bool = False

    @property
    def is_dir(self) -> bool:
        return self.kind is FileKind.DIRECTORY

    @property
    def is_own_dir(self) -> bool:
        """Whether the entry is a directory and not a link to one."""
        return self.is_dir and not self.is_link

    @property
    def is_file(self) -> bool:
        return self.kind is FileKind.FILE


class File(ABC):
    """A file that several threads can read at any offset; the `ByteSource` of a store.

    Attributes:
        path: Name for messages, which `ckpttools.stores.parse` accepts.
        size: Size in bytes when the file was opened.
        version: See `Status`.
        gap: Number of bytes that arrive in the time of one more read (latency times bandwidth). Reading a
            shorter gap between two reads is faster than a second read.
        price: Cost of reading a byte, relative to a local disk.
    """

    __slots__ = ()

    path: str
    size: int
    version: str
    gap: ClassVar[int] = 16 << 10
    price: ClassVar[int] = 1

    @property
    def costs(self) -> Costs:
        """Return the read costs of the file's store."""
        return Costs()

    @property
    def local_copy(self) -> str:
        """Return the path of the local copy that is read instead; "" if there is none."""
        return ""

    @abstractmethod
    def read_into(self, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes from `offset`.

        Raises:
            FormatError: The file is too short, was removed, or was replaced after an earlier read.
            StorageError: The store reports an error.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`; same errors as `read_into`."""
        out = bytearray(length)
        self.read_into(offset, out)
        return bytes(out)

    def remember_head(self, nbytes: int) -> None:
        """Remember the first bytes, in case the version is set back later; same errors as `read_into`."""
        return

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            SourceChangedError: The file has changed, so the bytes that were read may mix two versions.
            FormatError: The file was removed.
            StorageError: The file cannot be accessed.
        """
        return

    def close(self) -> None:
        """Release resources; a later read acquires them again. Must not be called during a read."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Block size: large enough for fast reads, but small compared to the memory budget.
_BLOCK = 1 << 20


def is_inside(name: str) -> bool:
    """Return whether a relative "/"-separated name in a file stays below the file's directory."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def count_occurrences(words: bytes, source: File, end: int | None = None) -> int:
    """Count the occurrences of `words` before an offset, block by block; same errors as reading."""
    end = source.size if end is None else end
    result, before = 0, b""
    for start in range(0, end, _BLOCK):
        block = before + source.read(start, min(_BLOCK, end - start))
        result += block.count(words)
        before = block[-len(words) + 1 :]
    return result


class Store(ABC):
    """A readable store of bytes under keys.

    Attributes:
        scheme: The part before `://`.
        streams: How files are written sequentially; None if files can be written at any offset, or not at
            all.
        link_copies: Whether `link` makes an independent copy.
    """

    scheme: ClassVar[str]
    streams: ClassVar[Streams | None] = None
    link_copies: ClassVar[bool] = False

    @property
    def costs(self) -> Costs:
        """Return the costs of reading from the store."""
        return Costs()

    @property
    def traffic(self) -> Traffic | None:
        """Return the requests since the process started; None for a store without a network."""
        return None

    @abstractmethod
    def stat(self, key: str) -> Status | None:
        """Return the status of a key; None if it does not exist.

        Raises:
            StorageError: The store does not respond.
        """

    @abstractmethod
    def list(self, key: str) -> Iterable[DirEntry]:
        """List a directory, in any order.

        Raises:
            StorageError: The key does not exist or is not a directory, or the store does not respond.
        """

    @abstractmethod
    def open(self, key: str, status: Status | None = None) -> File:
        """Open a file for reading.

        Args:
            key: Key of the file.
            status: Status of the file, if known; None requests it.

        Raises:
            FormatError: The file does not exist.
            StorageError: The file cannot be accessed.
        """

    def read(self, key: str, limit: int = LARGEST_WHOLE) -> bytes:
        """Read a small file completely.

        Args:
            key: Key of the file.
            limit: Maximum size in bytes.

        Raises:
            FormatError: The key is not a file, or the file is too large.
            StorageError: The file does not exist or cannot be read.
        """
        result, location = self.stat(key), self.uri(key)
        if result is None or result.kind is FileKind.DIRECTORY:
            raise StorageError(
                f"cannot read {location}",
                got="it does not exist" if result is None else "a directory",
                hint="check the spelling of the path",
            )
        if result.kind is FileKind.OTHER:
            raise FormatError("not a file", location=location, got=result.kind.value)
        if result.size > limit:
            raise size_limit_error(location, result.size, limit)
        with self.open(key, result) as file:
            return file.read(0, result.size)

    def uri(self, key: str) -> str:
        """Return the URL or path of a key as users write it; the inverse of `ckpttools.stores.parse`."""
        return f"{self.scheme}://{key}"

    def absolute(self, key: str) -> str:
        """Return the key independent of the working directory, for messages."""
        return key

    def real(self, key: str) -> str:
        """Return the canonical key, without links, relative paths or `..`."""
        return self.absolute(key)

    def link_target(self, key: str) -> str | None:
        """Return the target of a link, which need not exist; None if the key is not a link."""
        return None

    def write_alternative(self, key: str) -> str | None:
        """Return a hint for a read-only store; None if this store is writable."""
        return None

    def removal(self, key: str) -> str:
        """Return the command that deletes a directory tree, for messages."""
        return "rm -r LOCAL_COPY"

    def may_read(self, key: str) -> bool:
        """Return whether the user may read a key, as far as this is known without reading."""
        return True

    def lists_all(self, key: str) -> bool:
        """Return whether listings of a directory are complete; same errors as `list`."""
        return True

    def takes(self, key: str) -> bool:
        """Return whether the store can write a file with this key."""
        return True

    def absence_reason(self, key: str) -> CheckpointError | None:
        """Return an error that explains why a key does not exist; None if the store does not know."""
        return None


def size_limit_error(location: object, size: int, limit: int) -> FormatError:
    """Return the error for a file that is too large to read completely."""
    expected = f"at most {limit} bytes"
    return FormatError(
        "is too large for such a file", location=location, got=f"{size} bytes", expected=expected
    )


def check_unchanged(sources: Iterable[object]) -> None:
    """Check that files have not changed since they were opened.

    Args:
        sources: The sources that were read. Only files of a store are checked.

    Raises:
        SourceChangedError, FormatError, StorageError: As for `File.check_unchanged`.
    """
    for source in sources:
        if isinstance(source, File):
            source.check_unchanged()
