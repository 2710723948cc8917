"""A place: a store and a key in it. What code calls a path, wherever its bytes are.

The methods are those of `pathlib.Path` that reading and writing a checkpoint takes, under the same names;
errors are in our words. Nothing is looked at before a method is called that has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from ckpttools.core.errors import CheckpointError, StorageError, UsageError
from ckpttools.stores.abilities import Puts, Renames, Walks, Writes
from ckpttools.stores.base import LARGEST_WHOLE, DirEntry, File, FileKind, Status, Store

_NO_PLAIN_NAME = re.compile(r"(?:^|/)\.?(?:/|$)")
_MAGIC = re.compile(r"[*?[]")


class Location:
    """A file, a directory, or what may become one. It does not change, and can be a key of a dictionary.

    Attributes:
        store: where.
        key: its name there; see `ckpttools.stores.base`.
    """

    # No dataclass: a frozen one takes three times as long to make, and there may be 100,000.
    __slots__ = ("key", "store")
    # What an argument may be: what makes a place is a path or text, which messages name already.
    called = ""

    def __init__(self, store: Store, key: str) -> None:
        self.store = store
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self.store is other.store and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    # -- names: nothing is looked at

    def __truediv__(self, name: str) -> Location:
        """What has this name, or these with `/` between them, below."""
        if _NO_PLAIN_NAME.search(name):
            return Location(self.store, _plain(PurePosixPath(self.key, name)))
        return Location(self.store, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return self.store.uri(self.key)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __fspath__(self) -> str:
        """The path of a local file.

        Raises:
            TypeError: it lies elsewhere.
        """
        if self.store.scheme != "file":
            raise TypeError(f"{self} is not a local file")
        return str(self)

    def __lt__(self, other: Location) -> bool:
        return (self.store.scheme, self.parts) < (other.store.scheme, other.parts)

    def as_local(self) -> str:
        """The path, for a command that writes local files; a word in its place where this lies elsewhere."""
        return str(self) if self.store.scheme == "file" else "DIRECTORY"

    @property
    def name(self) -> str:
        """The last part; "" of a root and of `.`."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """From the last dot of the name on; "" where that begins or ends it, or there is none."""
        before, dot, after = self.name.rpartition(".")
        return dot + after if before and after else ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names; those of an absolute path begin with "/"."""
        rest = self.key.removeprefix("/")
        root = ("/",) if rest != self.key else ()
        return (*root, *(rest.split("/") if rest else ()))

    @property
    def parent(self) -> Location:
        """What it is directly in; a root and `.` are in themselves."""
        above = self.key.rpartition("/")[0]
        return Location(self.store, above or ("/" if self.key.startswith("/") else ""))

    @property
    def parents(self) -> list[Location]:
        """What it is in, the nearest first."""
        result, location = [], self
        while location.key not in ("", "/"):
            location = location.parent
            result.append(location)
        return result

    def with_name(self, name: str) -> Location:
        """What would have another name beside it."""
        return self.parent / name

    def relative_to(self, other: Location) -> str:
        """The names from another place to this one, with "/" between them; "" for the same.

        Raises:
            ValueError: it is not in there.
        """
        if self == other:
            return ""
        start = f"{other.key}/" if other.key.strip("/") else other.key
        if self.store is not other.store or not self.key.startswith(start):
            raise ValueError(f"{self} is not in {other}")
        return self.key[len(start) :]

    def absolute(self) -> Location:
        """The same, wherever the process is."""
        return Location(self.store, self.store.absolute(self.key))

    def resolve(self) -> Location:
        """The one name of what may have several: through links, relative paths and `..`.

        Raises:
            StorageError: the store cannot answer.
        """
        return Location(self.store, self.store.real(self.key))

    # -- what is there

    def status(self) -> Status | None:
        """What is here; None if nothing is. Raises StorageError if the store cannot answer."""
        return self.store.stat(self.key)

    def stat(self) -> Status:
        """What is here.

        Raises:
            StorageError: nothing is, or the store cannot answer.
        """
        result = self.status()
        if result is None:
            got, hint = "No such file or directory", "check the spelling of the path"
            raise StorageError(f"cannot look at {self}", got=got, hint=hint)
        return result

    def exists(self) -> bool:
        """Whether anything is here. Raises StorageError if the store cannot answer."""
        return self.status() is not None

    def is_file(self) -> bool:
        """Whether a file is here. Raises StorageError if the store cannot answer."""
        result = self.status()
        return result is not None and result.kind is FileKind.FILE

    def is_dir(self) -> bool:
        """Whether a directory is here. Raises StorageError if the store cannot answer."""
        result = self.status()
        return result is not None and result.kind is FileKind.DIRECTORY

    def folder(self) -> Location:
        """The directory that is here, or that what is here lies in. Raises StorageError as `is_dir`."""
        return self if self.is_dir() else self.parent

    def lexists(self) -> bool:
        """The same also of a link to nothing."""
        return self.is_link() or self.exists()

    def is_link(self) -> bool:
        """Whether the name is that of a link."""
        return self.store.link_target(self.key) is not None

    def readlink(self) -> str:
        """What a link says that it leads to; "" where this is none."""
        return self.store.link_target(self.key) or ""

    def may_read(self) -> bool:
        """Whether this user may read what is here, as far as that can be known without reading it."""
        return self.store.may_read(self.key)

    def entries(self) -> list[DirEntry]:
        """What is directly in a directory, sorted by name.

        Raises:
            StorageError: nothing is here, it is not a directory, or the store cannot answer.
        """
        return sorted(self.store.list(self.key), key=lambda entry: entry.name)

    def iterdir(self) -> Iterator[Location]:
        """The same as places."""
        return (self / entry.name for entry in self.entries())

    def directories(self) -> list[Location]:
        """The directories in a directory, sorted; errors as `entries`."""
        return [self / entry.name for entry in self.entries() if entry.is_dir]

    def walk(self) -> Iterator[tuple[str, Status]]:
        """Each file below, in any order: its names from here on, with "/" between them, and what it is.

        Raises:
            StorageError: as `entries`.
        """
        if isinstance(self.store, Walks):
            yield from self.store.walk(self.key)
            return
        for entry in self.entries():
            below = self / entry.name
            if entry.is_own_dir:
                yield from ((f"{entry.name}/{name}", result) for name, result in below.walk())
            elif entry.is_file:
                yield entry.name, below.stat()

    def below(self) -> Iterator[tuple[str, DirEntry]]:
        """Each file and directory below, what is in a directory after it: names from here on, and entry.

        Links to directories are not followed.

        Raises:
            StorageError: as `entries`.
        """
        for entry in self.entries():
            yield entry.name, entry
            if entry.is_own_dir:
                yield from ((f"{entry.name}/{name}", item) for name, item in (self / entry.name).below())

    def glob(self, pattern: str) -> list[Location]:
        """What has names below that match, sorted; nothing if nothing is here.

        Args:
            pattern: names with "/" between them, in which `*`, `?` and `[…]` stand for anything but "/".

        Raises:
            StorageError: the store cannot answer.
        """
        first, _, rest = pattern.partition("/")
        if not _MAGIC.search(first):
            below = self / first
            return below.glob(rest) if rest else [below] * below.exists()
        if not self.is_dir():
            return []
        result = [self / entry.name for entry in self.entries() if fnmatchcase(entry.name, first)]
        return [inner for item in result for inner in item.glob(rest)] if rest else result

    # -- bytes

    def open(self, result: Status | None = None) -> File:
        """The file, to be read by position.

        Args:
            result: what is here, where that is known already.

        Raises:
            FormatError: nothing is here.
            StorageError: it cannot be accessed.
        """
        return self.store.open(self.key, result)

    def read_bytes(self, limit: int = LARGEST_WHOLE) -> bytes:
        """All of a small file.

        Args:
            limit: bytes that it may have.

        Raises:
            FormatError: it is not a file, or larger; a pipe would wait for a writer.
            StorageError: it cannot be read.
        """
        return self.store.read(self.key, limit)

    def check_takes_files(self) -> None:
        """Raises UsageError if nothing can be `put` here, whatever is here."""
        if not isinstance(self.store, Puts):
            raise self._takes_nothing()

    def put(self, content: bytes) -> None:
        """Writes a small file that is here only once it is complete, and durable then.

        Raises:
            UsageError: the store takes nothing.
            StorageError, NoSpaceError: it cannot be written; what was here stays.
        """
        if not isinstance(self.store, Puts):
            raise self._takes_nothing()
        self.store.put(self.key, content)

    def rename(self, other: Location) -> None:
        """Gives what is here another name, which nothing has, in the same store.

        Raises:
            UsageError: the store cannot do that in one step.
            StorageError: it cannot be done.
        """
        if not isinstance(self.store, Renames):
            raise self._takes_nothing()
        self.store.rename(self.key, other.key)

    def write_bytes(self, content: bytes) -> None:
        """Writes a small file of a checkpoint that grows; errors as `put`."""
        if not isinstance(self.store, Writes):
            raise self._takes_nothing()
        self.store.write(self.key, content)

    def write_at(self, offset: int, content: bytes) -> None:
        """Writes into a file of a checkpoint that grows; errors as `put`."""
        if not isinstance(self.store, Writes):
            raise self._takes_nothing()
        self.store.write_at(self.key, offset, content)

    def _takes_nothing(self) -> UsageError:
        return UsageError(
            f"nothing can be written to {self.store.scheme}://",
            location=self,
            expected="a place that can be written, such as a local directory",
            hint=self.store.instead_of_writing(self.key),
        )


def _plain(path: PurePosixPath) -> str:
    text = str(path)
    return "" if text == "." else text


def is_unanswered(error: Exception, location: Location) -> bool:
    """Whether an error tells of a store behind a network, and nothing of the file that is there."""
    return isinstance(error, StorageError) and location.store.scheme != "file" and location.exists()


def kept_unless_unanswered(error: CheckpointError, location: Location) -> CheckpointError:
    """The error, if it says something of the file at a place; raises it if the store did not answer."""
    if is_unanswered(error, location):
        raise error
    return error


@contextmanager
def faults_told_elsewhere(location: Location) -> Iterator[None]:
    """Ends what is done in it at an error that says something of the files at a place, which others tell.

    Raises:
        StorageError: the store did not answer.
    """
    try:
        yield
    except CheckpointError as error:
        kept_unless_unanswered(error, location)
