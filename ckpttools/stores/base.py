"""What a store is: a place for bytes under keys, as a file system, a bucket or a hub is.

Adding a store is one module with a `Store` and one line: see docs/add-a-store.md. Three methods make one that
can be read; what else a store can do it shows by having the methods of protocols, those of
`ckpttools.stores.abilities` and others.

A key is what follows `scheme://`: names with one `/` between them, none of them empty, "" for the root.
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


# Configurations take kilobytes, tokenizers megabytes.
LARGEST_WHOLE = 512 << 20


class FileKind(Enum):
    """What can have a key. In a bucket a directory is whatever keys have in common before a `/`."""

    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "neither a file nor a directory"


class Status(NamedTuple):
    """What is at a key now.

    Attributes:
        kind: of it.
        size: length in bytes of a file.
        version: of a file, something that changes when its content does: time of change, ETag, generation.
        identity: something that changes when another file or directory takes the name; None where the version
            does.
        links: how many keys a file has, where the store knows.
        modified: when it was changed last, in nanoseconds since 1970; None where the store cannot answer.
    """

    kind: FileKind
    size: int = 0
    version: str = ""
    identity: object = None
    modified: int | None = None
    links: int = 1


class DirEntry(NamedTuple):
    """What a listing says of one name.

    Attributes:
        name: the last part of the key.
        kind: of what it names, through links.
        is_link: whether it names something else, which lies elsewhere.
    """

    name: str
    kind: FileKind
    is_link: bool = False

    @property
    def is_dir(self) -> bool:
        return self.kind is FileKind.DIRECTORY

    @property
    def is_own_dir(self) -> bool:
        """Whether it is a directory here, not one that a link leads to."""
        return self.is_dir and not self.is_link

    @property
    def is_file(self) -> bool:
        return self.kind is FileKind.FILE


class File(ABC):
    """Bytes that are read by position, from several threads at once: the `ByteSource` of a store.

    Attributes:
        path: what messages call it, and what `ckpttools.stores.parse` finds it by.
        size: its length in bytes when it was opened.
        version: see `Status`.
        gap: bytes that come in the time that one more read takes, latency times bandwidth: what lies between
            two reads and is shorter is better read, too.
        price: of a byte read, in those of a local disk.
    """

    __slots__ = ()

    path: str
    size: int
    version: str
    gap: ClassVar[int] = 16 << 10
    price: ClassVar[int] = 1

    @property
    def costs(self) -> Costs:
        """What reading takes; that of its store."""
        return Costs()

    @property
    def local_copy(self) -> str:
        """The path of a copy on this machine that is read in its place; "" where there is none."""
        return ""

    @abstractmethod
    def read_into(self, offset: int, out: Buffer) -> None:
        """Fills `out` with the bytes from `offset` on.

        Raises:
            FormatError: the file ends before, is gone, or was replaced after it had been read.
            StorageError: the store reports an error.
        """

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; errors as `read_into`."""
        out = bytearray(length)
        self.read_into(offset, out)
        return bytes(out)

    def remember_head(self, nbytes: int) -> None:
        """Takes note of the first bytes, where a version can be set back; errors as `read_into`."""
        return

    def check_unchanged(self) -> None:
        """Compares the file with what it was when it was opened.

        Raises:
            SourceChangedError: it was changed, so what was read of it may be of two states.
            FormatError: it is gone.
            StorageError: it cannot be accessed.
        """
        return

    def close(self) -> None:
        """Gives back what reading it took; a later read takes it again. Not while others read."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Enough for a fast read, and nothing beside what may be in memory.
_BLOCK = 1 << 20


def is_inside(name: str) -> bool:
    """Whether a name in a file, with "/" between its parts, can only be one below where the file is."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def occurrences(words: bytes, source: File, end: int | None = None) -> int:
    """How often words stand in a file before a byte of it, without having it in memory; errors as reading."""
    end = source.size if end is None else end
    result, before = 0, b""
    for start in range(0, end, _BLOCK):
        block = before + source.read(start, min(_BLOCK, end - start))
        result += block.count(words)
        before = block[-len(words) + 1 :]
    return result


class Store(ABC):
    """Where bytes lie under keys, read.

    Attributes:
        scheme: what stands before `://`.
        streams: how checkpoints are written; None where files can be written at any offset, or not at all.
        link_copies: whether `link` makes a copy, which shares nothing with the file that it is of.
    """

    scheme: ClassVar[str]
    streams: ClassVar[Streams | None] = None
    link_copies: ClassVar[bool] = False

    @property
    def costs(self) -> Costs:
        """What reading takes."""
        return Costs()

    @property
    def traffic(self) -> Traffic | None:
        """What it was asked since the process began; None where no network is between."""
        return None

    @abstractmethod
    def stat(self, key: str) -> Status | None:
        """What is at a key; None if nothing is.

        Raises:
            StorageError: the store cannot answer.
        """

    @abstractmethod
    def list(self, key: str) -> Iterable[DirEntry]:
        """What is directly below a key, in any order.

        Raises:
            StorageError: nothing is there, it is not a directory, or the store cannot answer.
        """

    @abstractmethod
    def open(self, key: str, result: Status | None = None) -> File:
        """A file, to be read.

        Args:
            key: its key.
            result: what `stat` said of it just now; None to look at it.

        Raises:
            FormatError: it is not there.
            StorageError: it cannot be accessed.
        """

    def read(self, key: str, limit: int = LARGEST_WHOLE) -> bytes:
        """All of a small file.

        Args:
            key: its key.
            limit: bytes that it may have.

        Raises:
            FormatError: it is not a file, or larger.
            StorageError: it is not there, or cannot be read.
        """
        result, location = self.stat(key), self.uri(key)
        if result is None or result.kind is FileKind.DIRECTORY:
            raise StorageError(
                f"cannot read {location}",
                got="nothing of this name" if result is None else "a directory",
                hint="check the spelling of the path",
            )
        if result.kind is FileKind.OTHER:
            raise FormatError("not a file", location=location, got=result.kind.value)
        if result.size > limit:
            raise too_large(location, result.size, limit)
        with self.open(key, result) as file:
            return file.read(0, result.size)

    def uri(self, key: str) -> str:
        """A key as users write it; the inverse of `ckpttools.stores.parse`."""
        return f"{self.scheme}://{key}"

    def absolute(self, key: str) -> str:
        """The same key wherever the process is, for messages."""
        return key

    def real(self, key: str) -> str:
        """The one key of what may have several: through links, relative paths and `..`."""
        return self.absolute(key)

    def link_target(self, key: str) -> str | None:
        """What a link says that it leads to, which need not be there; None if this is not a link."""
        return None

    def instead_of_writing(self, key: str) -> str | None:
        """What to do where nothing can be written; None where it can."""
        return None

    def removal(self, key: str) -> str:
        """The command that deletes a directory with all that is in it, for messages."""
        return "rm -r LOCAL_COPY"

    def may_read(self, key: str) -> bool:
        """Whether this user may read what is there, as far as that can be known without reading it."""
        return True

    def lists_all(self, key: str) -> bool:
        """Whether what is listed of a directory is all that is in it; errors as `list`."""
        return True

    def takes(self, key: str) -> bool:
        """Whether something can be written that has this key."""
        return True

    def why_absent(self, key: str) -> CheckpointError | None:
        """Why nothing is at a key, where the store knows; None where it does not."""
        return None


def too_large(location: object, size: int, limit: int) -> FormatError:
    """The error of a file that is read whole, and has more bytes than any of its name."""
    expected = f"at most {limit} bytes"
    return FormatError(
        "too large for what it should be", location=location, got=f"{size} bytes", expected=expected
    )


def check_unchanged(sources: Iterable[object]) -> None:
    """Compares files with what they were when they were first looked at.

    Args:
        sources: what was read; what is not a file of a store cannot change.

    Raises:
        SourceChangedError, FormatError, StorageError: as `File.check_unchanged`.
    """
    for source in sources:
        if isinstance(source, File):
            source.check_unchanged()
