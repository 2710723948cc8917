"""Interface of a store: bytes under keys, as in a file system, a bucket or a hub.

A new store is one module with a `Store` and one line in the registry: see docs/add-a-store.md. Three methods
make a readable store. A store declares other abilities by having the methods of protocols, such as those of
`ckpttools.stores.abilities`.

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


# Configurations have kilobytes, tokenizers megabytes.
LARGEST_WHOLE = 512 << 20


class FileKind(Enum):
    """What a key refers to. In a bucket, a directory is a common prefix of keys that ends before a `/`."""

    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "neither a file nor a directory"


class Status(NamedTuple):
    """The current status of a key.

    Attributes:
        kind: whether it is a file, a directory or something else.
        size: length of a file in bytes.
        version: changes when a file's content does: modification time, ETag or generation.
        identity: changes when another file or directory gets the name; None if the version does.
        links: number of keys of a file, if the store knows it.
        modified: modification time in nanoseconds since 1970; None if the store does not know it.
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
        name: last part of the key.
        kind: kind of the file or directory, with links followed.
        is_link: whether it is a link.
    """

    name: str
    kind: FileKind
    is_link: bool = False

    @property
    def is_dir(self) -> bool:
        return self.kind is FileKind.DIRECTORY

    @property
    def is_own_dir(self) -> bool:
        """Whether it is a directory and not a link to one."""
        return self.is_dir and not self.is_link

    @property
    def is_file(self) -> bool:
        return self.kind is FileKind.FILE


class File(ABC):
    """A file that several threads can read at any offset: the `ByteSource` of a store.

    Attributes:
        path: its name in messages, which `ckpttools.stores.parse` accepts.
        size: its length in bytes when it was opened.
        version: see `Status`.
        gap: bytes that arrive in the time of one more read (latency times bandwidth). Reading a shorter gap
            between two reads is faster than a second read.
        price: cost of reading a byte, relative to a local disk.
    """

    __slots__ = ()

    path: str
    size: int
    version: str
    gap: ClassVar[int] = 16 << 10
    price: ClassVar[int] = 1

    @property
    def costs(self) -> Costs:
        """Return the read costs of its store."""
        return Costs()

    @property
    def local_copy(self) -> str:
        """Return the path of the local copy that is read instead; "" if there is none."""
        return ""

    @abstractmethod
    def read_into(self, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes from `offset`.

        Raises:
            FormatError: the file is too short, was removed, or was replaced after it had been read.
            StorageError: the store reports an error.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`; errors as `read_into`."""
        out = bytearray(length)
        self.read_into(offset, out)
        return bytes(out)

    def remember_head(self, nbytes: int) -> None:
        """Remember the first bytes, in case the version can be set back; errors as `read_into`."""
        return

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            SourceChangedError: it was changed, so the bytes read may be a mix of two states.
            FormatError: it was removed.
            StorageError: it cannot be accessed.
        """
        return

    def close(self) -> None:
        """Release resources; a later read acquires them again. Must not be called during a read."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Large enough for fast reads, and small compared to the memory budget.
_BLOCK = 1 << 20


def is_inside(name: str) -> bool:
    """Return whether a relative "/"-separated name in a file stays below that file's directory."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def count_occurrences(words: bytes, source: File, end: int | None = None) -> int:
    """Count the occurrences of `words` before an offset, block by block; errors as reading."""
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
        scheme: the part before `://`.
        streams: how checkpoints are written; None if files can be written at any offset, or not at all.
        link_copies: whether `link` makes an independent copy.
    """

    scheme: ClassVar[str]
    streams: ClassVar[Streams | None] = None
    link_copies: ClassVar[bool] = False

    @property
    def costs(self) -> Costs:
        """Return the costs of reading."""
        return Costs()

    @property
    def traffic(self) -> Traffic | None:
        """Return the requests since the process started; None for a store without a network."""
        return None

    @abstractmethod
    def stat(self, key: str) -> Status | None:
        """Return the status of a key; None if it does not exist.

        Raises:
            StorageError: the store cannot be asked.
        """

    @abstractmethod
    def list(self, key: str) -> Iterable[DirEntry]:
        """List a directory, in any order.

        Raises:
            StorageError: it does not exist, is not a directory, or the store cannot be asked.
        """

    @abstractmethod
    def open(self, key: str, result: Status | None = None) -> File:
        """Open a file for reading.

        Args:
            key: its key.
            result: its status if it is known; None to request it.

        Raises:
            FormatError: it does not exist.
            StorageError: it cannot be accessed.
        """

    def read(self, key: str, limit: int = LARGEST_WHOLE) -> bytes:
        """Read a small file completely.

        Args:
            key: its key.
            limit: maximum size in bytes.

        Raises:
            FormatError: it is not a file, or it is too large.
            StorageError: it does not exist or cannot be read.
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
            raise too_large(location, result.size, limit)
        with self.open(key, result) as file:
            return file.read(0, result.size)

    def uri(self, key: str) -> str:
        """Return a key as users write it; the inverse of `ckpttools.stores.parse`."""
        return f"{self.scheme}://{key}"

    def absolute(self, key: str) -> str:
        """Return the key independent of the working directory, for messages."""
        return key

    def real(self, key: str) -> str:
        """Return the canonical key, without links, relative paths and `..`."""
        return self.absolute(key)

    def link_target(self, key: str) -> str | None:
        """Return the target of a link, which need not exist; None if the key is not a link."""
        return None

    def write_alternative(self, key: str) -> str | None:
        """Return a hint for stores that cannot be written; None if this one can."""
        return None

    def removal(self, key: str) -> str:
        """Return the command that deletes a directory tree, for messages."""
        return "rm -r LOCAL_COPY"

    def may_read(self, key: str) -> bool:
        """Return whether the user may read a key, as far as that is known without reading it."""
        return True

    def lists_all(self, key: str) -> bool:
        """Return whether listings of a directory are complete; errors as `list`."""
        return True

    def takes(self, key: str) -> bool:
        """Return whether a file with this key can be written."""
        return True

    def absence_reason(self, key: str) -> CheckpointError | None:
        """Return the reason why a key does not exist, if the store knows it."""
        return None


def too_large(location: object, size: int, limit: int) -> FormatError:
    """Return the error for a file that is too large to be read completely."""
    expected = f"at most {limit} bytes"
    return FormatError(
        "is too large for such a file", location=location, got=f"{size} bytes", expected=expected
    )


def check_unchanged(sources: Iterable[object]) -> None:
    """Check that files have not changed since they were opened.

    Args:
        sources: the sources that were read. Only files of a store can change.

    Raises:
        SourceChangedError, FormatError, StorageError: as `File.check_unchanged`.
    """
    for source in sources:
        if isinstance(source, File):
            source.check_unchanged()
