"""A location: a store and a key in it; the equivalent of a path for any store.

A location has the methods of `pathlib.Path` that checkpoints need, with the same names, but raises errors of
ckpttools. Creating a location does not access the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import PurePosixPath

from ckpttools.core.errors import CheckpointError, MissingPathError, StorageError, UsageError, similar_names
from ckpttools.core.text import format_ranges
from ckpttools.stores.abilities import SupportsPut, SupportsRename, SupportsWalk, SupportsWrite
from ckpttools.stores.base import LARGEST_WHOLE, DirEntry, File, FileKind, Status, Store

_NO_PLAIN_NAME = re.compile(r"(?:^|/)\.?(?:/|$)")
_MAGIC = re.compile(r"[*?[]")
# Maximum number of names in a directory that are compared with a misspelled name.
_MAX_SIBLINGS = 10_000


class Location:
    """A file or directory, which need not exist. Locations are immutable and hashable.

    Attributes:
        store: The store.
        key: The key in the store; see `ckpttools.stores.base`.
    """

    # Not a dataclass, because creating a frozen one takes three times as long, and there may be 100,000
    # locations.
    __slots__ = ("key", "store")
    # Description of the accepted argument types; messages already name the path or the text.
    called = ""

    def __init__(self, store: Store, key: str) -> None:
        self.store = store
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self.store is other.store and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    # -- names, without access to the store

    def __truediv__(self, name: str) -> Location:
        """Return a location below this one."""
        if _NO_PLAIN_NAME.search(name):
            return Location(self.store, _plain(PurePosixPath(self.key, name)))
        return Location(self.store, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return self.store.uri(self.key)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __fspath__(self) -> str:
        """Return the path of a local file.

        Raises:
            TypeError: The location is not a local file.
        """
        if self.store.scheme != "file":
            raise TypeError(f"{self} is not a local file")
        return str(self)

    def __lt__(self, other: Location) -> bool:
        return (self.store.scheme, self.parts) < (other.store.scheme, other.parts)

    def as_local(self) -> str:
        """Return the local path for a command that writes local files; a placeholder for other stores."""
        return str(self) if self.store.scheme == "file" else "DIRECTORY"

    @property
    def name(self) -> str:
        """Return the last component of the key; "" for a root and for `.`."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the suffix of the name with its dot; "" if it has none."""
        before, dot, after = self.name.rpartition(".")
        return dot + after if before and after else ""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the components of the key; the first component of an absolute path is "/"."""
        rest = self.key.removeprefix("/")
        root = ("/",) if rest != self.key else ()
        return (*root, *(rest.split("/") if rest else ()))

    @property
    def parent(self) -> Location:
        """Return the parent directory; a root and `.` are their own parents."""
        above = self.key.rpartition("/")[0]
        return Location(self.store, above or ("/" if self.key.startswith("/") else ""))

    @property
    def parents(self) -> list[Location]:
        """Return all ancestors, the nearest first."""
        result, location = [], self
        while location.key not in ("", "/"):
            location = location.parent
            result.append(location)
        return result

    def with_name(self, name: str) -> Location:
        """Return the sibling with another name."""
        return self.parent / name

    def relative_to(self, other: Location) -> str:
        """Return the path from another location to this one; "" for the same location.

        Raises:
            ValueError: This location is not below the other one.
        """
        if self == other:
            return ""
        start = f"{other.key}/" if other.key.strip("/") else other.key
        if self.store is not other.store or not self.key.startswith(start):
            raise ValueError(f"{self} is not in {other}")
        return self.key[len(start) :]

    def absolute(self) -> Location:
        """Return the same location independent of the working directory."""
        return Location(self.store, self.store.absolute(self.key))

    def resolve(self) -> Location:
        """Return the canonical location, without links, relative paths or `..`.

        Raises:
            StorageError: The store does not respond.
        """
        return Location(self.store, self.store.real(self.key))

    # -- access to the store

    def status(self) -> Status | None:
        """Return the status; None if the location does not exist. Raises StorageError if the store fails."""
        return self.store.stat(self.key)

    def stat(self) -> Status:
        """Return the current status of the file or directory.

        Raises:
            StorageError: The location does not exist, or the store does not respond.
        """
        result = self.status()
        if result is None:
            raise MissingPathError(f"{self} does not exist", hint=self.spelling_hint())
        return result

    def require_exists(self) -> Location:
        """Check that the location exists and return it.

        Raises:
            MissingPathError: The location does not exist. The message suggests a similar path.
            StorageError: The store does not respond.
        """
        self.stat()
        return self

    def spelling_hint(self) -> str:
        """Return a hint with a similar path in the same local directory."""
        if step := self._step_hint():
            return step
        missing = self
        while missing.store.scheme == "file" and missing.parent != missing:
            if missing.parent.is_dir():
                siblings = (entry.name for entry in missing.parent.entries())
                near = similar_names(missing.name, islice(siblings, _MAX_SIBLINGS), 1)
                similar = missing.parent / near[0] if near else None
                if similar is not None and missing != self:
                    complete = similar / self.key.removeprefix(missing.key).lstrip("/")
                    similar = complete if complete.exists() else similar
                return f"did you mean {similar}?" if similar else "check the spelling of the path"
            missing = missing.parent
        return "check the spelling of the path"

    def _step_hint(self) -> str:
        """Return a hint for the name of a step that does not exist; "" for any other location."""
        if self.store.scheme != "file":
            return ""
        run, at, step = self.name.rpartition("@")
        if at and run and (self.parent / run).is_dir():
            named = self.parent / run / step
            return f"did you mean {named if named.exists() else self.parent / run}?"
        if not self.name.isdecimal() or not self.parent.is_dir():
            return ""
        names = (entry.name for entry in islice(self.parent.entries(), _MAX_SIBLINGS))
        steps = sorted(int(name) for name in names if name.isdecimal())
        return f"the steps there are {format_ranges(steps)}" if steps else ""

    def exists(self) -> bool:
        """Return whether the location exists; raises StorageError if the store does not respond."""
        return self.status() is not None

    def is_file(self) -> bool:
        """Return whether the location is a file; raises StorageError if the store does not respond."""
        result = self.status()
        return result is not None and result.kind is FileKind.FILE

    def is_dir(self) -> bool:
        """Return whether the location is a directory; raises StorageError if the store does not respond."""
        result = self.status()
        return result is not None and result.kind is FileKind.DIRECTORY

    def folder(self) -> Location:
        """Return this directory, or the parent if this is not a directory; same errors as `is_dir`."""
        return self if self.is_dir() else self.parent

    def lexists(self) -> bool:
        """Return whether the location exists, even as a broken link."""
        return self.is_link() or self.exists()

    def is_link(self) -> bool:
        """Return whether the location is a link."""
        return self.store.link_target(self.key) is not None

    def readlink(self) -> str:
        """Return the target of a link; "" if it is not a link."""
        return self.store.link_target(self.key) or ""

    def may_read(self) -> bool:
        """Return whether the user may read the location, as far as this is known without reading."""
        return self.store.may_read(self.key)

    def entries(self) -> list[DirEntry]:
        """List a directory, sorted by name.

        Raises:
            StorageError: The location does not exist or is not a directory, or the store does not respond.
        """
        return sorted(self.store.list(self.key), key=lambda entry: entry.name)

    def iterdir(self) -> Iterator[Location]:
        """Iterate over the entries as locations; same errors as `entries`."""
        return (self / entry.name for entry in self.entries())

    def directories(self) -> list[Location]:
        """Return the subdirectories, sorted; same errors as `entries`."""
        return [self / entry.name for entry in self.entries() if entry.is_dir]

    def walk(self) -> Iterator[tuple[str, Status]]:
        """Iterate over all files below, in any order, as relative path and status.

        Raises:
            StorageError: As for `entries`.
        """
        if isinstance(self.store, SupportsWalk):
            yield from self.store.walk(self.key)
            return
        for entry in self.entries():
            below = self / entry.name
            if entry.is_own_dir:
                yield from ((f"{entry.name}/{name}", result) for name, result in below.walk())
            elif entry.is_file:
                yield entry.name, below.stat()

    def below(self) -> Iterator[tuple[str, DirEntry]]:
        """Iterate over all files and directories below, as relative path and entry, parents first.

        Links to directories are not followed.

        Raises:
            StorageError: As for `entries`.
        """
        for entry in self.entries():
            yield entry.name, entry
            if entry.is_own_dir:
                yield from ((f"{entry.name}/{name}", item) for name, item in (self / entry.name).below())

    def glob(self, pattern: str) -> list[Location]:
        """Return the matching locations below, sorted; empty if this location does not exist.

        Args:
            pattern: Names separated by "/", in which `*`, `?` and `[…]` match anything but "/".

        Raises:
            StorageError: The store does not respond.
        """
        first, _, rest = pattern.partition("/")
        if not _MAGIC.search(first):
            below = self / first
            return below.glob(rest) if rest else [below] * below.exists()
        if not self.is_dir():
            return []
        result = [self / entry.name for entry in self.entries() if fnmatchcase(entry.name, first)]
        return [inner for item in result for inner in item.glob(rest)] if rest else result

    # -- contents of files

    def open(self, status: Status | None = None) -> File:
        """Open the file for reading at any offset.

        Args:
            status: Status of the file, if known; None requests it.

        Raises:
            FormatError: The file does not exist.
            StorageError: The file cannot be accessed.
        """
        return self.store.open(self.key, status)

    def read_bytes(self, limit: int = LARGEST_WHOLE) -> bytes:
        """Read a small file completely.

        Args:
            limit: Maximum size in bytes.

        Raises:
            FormatError: The location is not a file (reading a pipe could wait for a writer), or the file is
                too large.
            StorageError: The file cannot be read.
        """
        return self.store.read(self.key, limit)

    def check_accepts_files(self) -> None:
        """Raise UsageError if the store has no `put`, regardless of whether the location exists."""
        if not isinstance(self.store, SupportsPut):
            raise self._read_only_error()

    def put(self, content: bytes) -> None:
        """Write a small file atomically and durably.

        Raises:
            UsageError: The store is read-only.
            StorageError, NoSpaceError: The file cannot be written; an existing file is kept.
        """
        if not isinstance(self.store, SupportsPut):
            raise self._read_only_error()
        self.store.put(self.key, content)

    def rename(self, other: Location) -> None:
        """Rename to a location in the same store that does not exist yet.

        Raises:
            UsageError: The store cannot rename in one step.
            StorageError: The location cannot be renamed.
        """
        if not isinstance(self.store, SupportsRename):
            raise self._read_only_error()
        self.store.rename(self.key, other.key)

    def write_bytes(self, content: bytes) -> None:
        """Write a small file of an unpublished checkpoint; same errors as `put`."""
        if not isinstance(self.store, SupportsWrite):
            raise self._read_only_error()
        self.store.write(self.key, content)

    def write_at(self, offset: int, content: bytes) -> None:
        """Write to a file of an unpublished checkpoint at an offset; same errors as `put`."""
        if not isinstance(self.store, SupportsWrite):
            raise self._read_only_error()
        self.store.write_at(self.key, offset, content)

    def _read_only_error(self) -> UsageError:
        return UsageError(
            f"{self.store.scheme}:// is read-only",
            location=self,
            expected="a writable location, such as a local directory",
            hint=self.store.write_alternative(self.key),
        )


def _plain(path: PurePosixPath) -> str:
    text = str(path)
    return "" if text == "." else text


def is_store_failure(error: Exception, location: Location) -> bool:
    """Return whether an error means an unreachable network store rather than a damaged file."""
    return isinstance(error, StorageError) and location.store.scheme != "file" and location.exists()


def require_file_error(error: CheckpointError, location: Location) -> CheckpointError:
    """Return the error if it is about the file itself; raise it if the store does not respond."""
    if is_store_failure(error, location):
        raise error
    return error


@contextmanager
def suppress_file_errors(location: Location) -> Iterator[None]:
    """Suppress errors about the files themselves, which other checks report.

    Raises:
        StorageError: The store does not respond.
    """
    try:
        yield
    except CheckpointError as error:
        require_file_error(error, location)
