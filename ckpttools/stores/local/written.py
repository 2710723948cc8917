"""Track the files that a process writes to a staging directory, and check that their names still exist.

During the write, another process may remove, move or replace a file, the directory, or a link in its path.
The data would then go to a file without a name. All writers register their files here. Each name is checked
before records enter the journal and before the checkpoint is published, which takes 2 microseconds per file.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from ckpttools.core.errors import StorageError, UsageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.base import File
from ckpttools.stores.local.files import moved_error, write_error
from ckpttools.stores.local.store import LocalStore
from ckpttools.stores.publishing import PLAN_MARK, file_identity


class WrittenFiles:
    """The inodes and sizes of files written below a directory."""

    def __init__(self, directory: Path) -> None:
        """Record the identity of the directory; raises OSError if it cannot be accessed."""
        self._directory = directory
        status = os.stat(directory)
        self._root = status.st_dev, status.st_ino
        self._lock = threading.Lock()
        # Inode, size, and whether the size is exact, by name. There may be 100,000 files.
        self._files: dict[str, tuple[int, int, bool]] = {}
        self._kept: set[str] = set()
        self._series: set[str] = set()

    def check_directory(self, directory: Path | None = None) -> None:
        """Raise StorageError if a path (by default the recorded one) now leads to another directory."""
        directory = directory or self._directory
        try:
            status = os.stat(directory)
            is_same = (status.st_dev, status.st_ino) == self._root
        except OSError:
            is_same = False
        if not is_same:
            raise moved_error(directory)

    def has(self, name: str) -> bool:
        """Return whether a file is registered."""
        return name in self._files

    def register(self, name: str, file: int | str, size: int = 0, *, is_exact: bool = False) -> None:
        """Register a file, or check that it is the file already registered under the name.

        Args:
            name: Name of the file below the directory.
            file: Descriptor or path of the file.
            size: Minimum size of the file from now on, in bytes.
            is_exact: Whether `size` is the exact size from now on, regardless of earlier values.

        Raises:
            StorageError: The file is a different one or has another size.
            OSError: The file cannot be accessed.
        """
        with self._lock:
            status = os.stat(file)
            expected = self._files.get(name, (status.st_ino, 0, False))
            if is_exact:
                expected = expected[0], size, True
            if _is_expected(status, expected):
                self._files[name] = expected[0], max(expected[1], size), expected[2]
                return
        raise self._mismatch_error(name, status, expected)

    def set_size(self, name: str, size: int) -> None:
        """Set the size of a registered file after this process has resized it."""
        with self._lock:
            self._files[name] = self._files[name][0], size, True

    def keep(self, names: Iterable[str], series: Iterable[str]) -> None:
        """Register files of earlier runs; arguments as for `SupportsKeepFiles.keep_files`."""
        self._kept.update(names)
        self._series.update(series)

    def check_no_others(self) -> None:
        """Raise UsageError if the directory has a file that is neither registered nor from an earlier run.

        Raises:
            OSError: The directory cannot be listed.
        """
        series = tuple(f"{name}-" for name in self._series)
        start = len(os.path.join(self._directory, ""))
        for directory, _, files in os.walk(self._directory):
            for file in files:
                name = os.path.join(directory, file)[start:]
                is_known = name in self._files or name in self._kept or name == PLAN_MARK
                if not (is_known or name.startswith(series)):
                    raise UsageError(
                        f"{self._directory / name} is not a file of the checkpoint",
                        expected="only files that this command writes",
                        hint=f"move it away, or delete it; then {retry_term()}",
                    )

    def forget(self, name: str) -> None:
        """Unregister a file before another file is registered under its name."""
        with self._lock:
            self._files.pop(name, None)

    def identity(self, name: str) -> str:
        """Return the identity of a registered file; see `SupportsFileIdentity.identity`."""
        inode = self._files[name][0]
        return file_identity(self._root, (self._root[0], inode))

    def check(self, names: Iterable[str] | None = None, directory: Path | None = None) -> None:
        """Check that names still refer to the files that were written.

        Args:
            names: The names to check; None for all.
            directory: The directory's current path; None for the recorded path.

        Raises:
            StorageError: A file was removed, replaced or truncated, or the path leads to another directory.
        """
        directory = directory or self._directory
        with self._lock:
            chosen = [*(self._files if names is None else names)]
        self.check_directory(directory)
        for name in chosen:
            # Read the expected size before the stat, because other threads append and raise it.
            expected = self._files[name]
            try:
                status = os.stat(os.path.join(directory, name))
            except OSError as error:
                raise self._lost_error(name, error.strerror) from error
            if not _is_expected(status, expected):
                raise self._mismatch_error(name, status, expected)

    def _mismatch_error(
        self, name: str, status: os.stat_result, entry: tuple[int, int, bool]
    ) -> StorageError:
        inode, size, is_exact = entry
        if status.st_ino != inode:
            return self._lost_error(name, "another file has the name")
        expected = f"{size:,} bytes" if is_exact else f"at least {size:,} bytes"
        return self._lost_error(name, f"{status.st_size:,} bytes", expected)

    def _lost_error(
        self, name: str, got: str | None, expected: str = "the file that was written"
    ) -> StorageError:
        return StorageError(
            f"{self._directory / name} was removed, replaced or cut while it was written",
            got=got,
            expected=expected,
            hint=f"find the process that changes files there; then {retry_term()} to rewrite the lost data",
        )


def _is_expected(status: os.stat_result, expected: tuple[int, int, bool]) -> bool:
    inode, size, is_exact = expected
    has_size = status.st_size == size if is_exact else status.st_size >= size
    return status.st_ino == inode and has_size


class StagingFiles:
    """The files in a staging directory's content, and a store that registers its writes.

    Attributes:
        written: The registered files.
        store: Writes small files and links.
    """

    def __init__(self, content: Path) -> None:
        """Record the directory; raises OSError if it cannot be accessed."""
        self.written = WrittenFiles(content)
        self.store = StagingStore(self.written, str(content))


class StagingStore(LocalStore):
    """The local file system while a checkpoint is written; registers every written file."""

    def __init__(self, written: WrittenFiles, directory: str) -> None:
        self._written = written
        self._prefix = f"{directory}/"

    def _register(self, key: str, size: int, *, is_exact: bool = True) -> None:
        self._written.register(key.removeprefix(self._prefix), key, size, is_exact=is_exact)

    def write(self, key: str, content: bytes) -> None:
        """Write a file; see `SupportsWrite.write`."""
        self._written.check_directory()
        if os.path.islink(key):
            raise write_error(key, OSError(errno.ELOOP, "it is a symbolic link"))
        super().write(key, content)
        self._register(key, len(content))

    def put(self, key: str, content: bytes) -> None:
        """Replace a file by a new one; see `SupportsPut.put`."""
        self._written.check_directory()
        super().put(key, content)
        self._written.forget(key.removeprefix(self._prefix))
        self._register(key, len(content))

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """Write to a file at an offset; see `SupportsWrite.write_at`."""
        super().write_at(key, offset, content)
        self._register(key, offset + len(content), is_exact=False)

    def link(self, source: File, key: str) -> bool:
        """Link a file; see `SupportsLinks.link`."""
        self._written.check_directory()
        is_linked = super().link(source, key)
        if is_linked:
            self._register(key, source.size)
        return is_linked

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """Copy ranges of a file; see `SupportsLinks.copy_parts`."""
        super().copy_parts(source, key, parts)
        self._register(key, source.size)
