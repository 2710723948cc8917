"""The files of one commit of a repository."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.base import FileKind, Status


class Entry(NamedTuple):
    """A file.

    Attributes:
        size: bytes.
        version: its SHA-256, or what git calls it.
    """

    size: int
    version: str

    @property
    def status(self) -> Status:
        return Status(FileKind.FILE, self.size, self.version)


@dataclass(frozen=True)
class Snapshot:
    """What a repository had at a commit, which never changes.

    Attributes:
        commit: its 40 hexadecimal digits.
        files: by path.
    """

    commit: str
    files: Mapping[str, Entry]

    @cached_property
    def names(self) -> Mapping[str, Mapping[str, FileKind]]:
        """For each directory, "" for the whole, what is directly in it."""
        result: dict[str, dict[str, FileKind]] = {"": {}}
        for path in self.files:
            kind = FileKind.FILE
            while path:
                path, _, name = path.rpartition("/")
                result.setdefault(path, {})[name] = kind
                kind = FileKind.DIRECTORY
        return result

    def status(self, path: str) -> Status | None:
        """What is at a path; None if nothing is."""
        if path in self.files:
            return self.files[path].status
        return Status(FileKind.DIRECTORY) if path in self.names else None
