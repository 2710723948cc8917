"""The files that a process writes below a staging directory, and whether their names still lead to them.

Somebody may remove, move or replace a file, the directory, or a link on the way to it, while it is written:
the data then goes to a file that nobody finds. All writers note their files here. Each name is looked at
before an entry is made in the journal, and before the checkpoint is published: 2 microseconds a file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpttools.core.errors import StorageError
from ckpttools.core.wording import again
from ckpttools.stores.base import File
from ckpttools.stores.local.store import LocalStore
from ckpttools.stores.publishing import file_identity


class WrittenFiles:
    """What identifies each file that was written below a directory."""

    def __init__(self, directory: Path) -> None:
        """Notes which directory it is now.

        Raises:
            OSError: it cannot be looked at.
        """
        self._directory = directory
        found = os.stat(directory)  # noqa: PTH116
        self._root = found.st_dev, found.st_ino
        self._lock = threading.Lock()
        # Number of the file and least size, by name. There may be 100,000.
        self._files: dict[str, tuple[int, int]] = {}

    def path(self, name: str) -> Path:
        """Where a file is, by its name below the directory."""
        return self._directory / name

    def check_directory(self, directory: Path | None = None) -> None:
        """Raises StorageError if the path, or the one given, does not lead to the directory."""
        directory = directory or self._directory
        try:
            found = os.stat(directory)  # noqa: PTH116
            is_same = (found.st_dev, found.st_ino) == self._root
        except OSError:
            is_same = False
        if not is_same:
            raise StorageError(
                f"{directory} was removed, moved or replaced while it was written",
                wanted="the directory that this command has made, under its name until the command ends",
                hint=f"look for what moved it, or for a link in its path that was changed; then {again()}",
            )

    def knows(self, name: str) -> bool:
        """Whether a file was noted."""
        return name in self._files

    def note(self, name: str, file: int | str, size: int = 0) -> None:
        """Notes a file, or checks that it is the one noted before.

        Args:
            name: below the directory.
            file: descriptor or path.
            size: bytes that it has at least from now on.

        Raises:
            StorageError: it is another file, or shorter than it was.
            OSError: it cannot be looked at.
        """
        with self._lock:
            found = os.stat(file)  # noqa: PTH116
            number, least = self._files.get(name, (found.st_ino, 0))
            if number == found.st_ino and found.st_size >= least:
                self._files[name] = number, max(least, size)
                return
        raise self._mismatch(name, found, number, least)

    def set_size(self, name: str, size: int) -> None:
        """Sets the least size of a noted file that this process has given another one."""
        with self._lock:
            self._files[name] = self._files[name][0], size

    def forget(self, name: str) -> None:
        """Forgets a file, before another one with its name is noted."""
        with self._lock:
            self._files.pop(name, None)

    def identity(self, name: str) -> str:
        """As `IdentifiesFiles.identity`."""
        number, _ = self._files[name]
        return file_identity(self._root, (self._root[0], number))

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compares what has the names of files with what was written.

        Args:
            names: those looked at; None for all.

        Raises:
            StorageError: a file was removed, replaced or cut, or the directory is another one.
        """
        with self._lock:
            chosen = [*(self._files if names is None else names)]
        self._check(self._directory, chosen)

    def check_at(self, directory: Path) -> None:
        """Compares all files where the directory has got another name; errors as `check`."""
        self._check(directory, list(self._files))

    def _check(self, directory: Path, names: Sequence[str]) -> None:
        self.check_directory(directory)
        for name in names:
            number, least = self._files[name]
            try:
                found = os.stat(os.path.join(directory, name))  # noqa: PTH116, PTH118
            except OSError as error:
                raise self._lost(name, error.strerror) from error
            if found.st_ino != number or found.st_size < least:
                raise self._mismatch(name, found, number, least)

    def _mismatch(self, name: str, found: os.stat_result, number: int, least: int) -> StorageError:
        if found.st_ino != number:
            return self._lost(name, "another file has the name")
        return self._lost(name, f"{found.st_size} bytes", f"at least {least} bytes")

    def _lost(self, name: str, got: str | None, wanted: str = "the file that was written") -> StorageError:
        return StorageError(
            f"{self._directory / name} was removed, replaced or cut while it was written",
            got=got,
            wanted=wanted,
            hint=f"look for what changes files there; then {again()}: what is lost is written again",
        )


class StagingFiles:
    """The files of a staging directory's content, and a store that notes what it writes there.

    Attributes:
        written: notes of all files.
        store: writes small files and links.
    """

    def __init__(self, content: Path) -> None:
        """Raises OSError if the directory cannot be looked at."""
        self.written = WrittenFiles(content)
        self.store = StagingStore(self.written, str(content))


class StagingStore(LocalStore):
    """The local file system, for a checkpoint that grows: what is written is noted."""

    def __init__(self, written: WrittenFiles, directory: str) -> None:
        self._written = written
        self._prefix = f"{directory}/"

    def _note(self, key: str, size: int) -> None:
        name = key.removeprefix(self._prefix)
        self._written.note(name, key, size)

    def write(self, key: str, content: bytes) -> None:
        """As `Writes.write`."""
        self._written.check_directory()
        super().write(key, content)
        self._note(key, len(content))

    def put(self, key: str, content: bytes) -> None:
        """As `Puts.put`: the name gets another file."""
        self._written.check_directory()
        super().put(key, content)
        self._written.forget(key.removeprefix(self._prefix))
        self._note(key, len(content))

    def write_at(self, key: str, offset: int, content: bytes) -> None:
        """As `Writes.write_at`."""
        super().write_at(key, offset, content)
        self._note(key, offset + len(content))

    def link(self, source: File, key: str) -> bool:
        """As `Links.link`."""
        self._written.check_directory()
        is_linked = super().link(source, key)
        if is_linked:
            self._note(key, source.size)
        return is_linked

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """As `Links.copy_parts`."""
        super().copy_parts(source, key, parts)
        self._note(key, source.size)
