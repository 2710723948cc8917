"""Files on the Hub that are already in the `huggingface_hub` cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError
from ckpttools.stores.base import File, FileKind, Status
from ckpttools.stores.local.file import LocalFile

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Entry(NamedTuple):
    """A file on the Hub.

    Attributes:
        size: Size in bytes.
        version: SHA-256 or git blob ID.
    """

    size: int
    version: str

    @property
    def status(self) -> Status:
        return Status(FileKind.FILE, self.size, self.version)


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at a commit.

    Attributes:
        commit: The commit hash, 40 hexadecimal digits.
        files: The entries, by path.
    """

    commit: str
    files: Mapping[str, Entry]

    @cached_property
    def names(self) -> Mapping[str, Mapping[str, FileKind]]:
        """Return the entries of each directory; "" is the root."""
        result: dict[str, dict[str, FileKind]] = {"": {}}
        for path in self.files:
            kind = FileKind.FILE
            while path:
                path, _, name = path.rpartition("/")
                result.setdefault(path, {})[name] = kind
                kind = FileKind.DIRECTORY
        return result

    def status(self, path: str) -> Status | None:
        """Return the status of a path; None if it does not exist."""
        if path in self.files:
            return self.files[path].status
        return Status(FileKind.DIRECTORY) if path in self.names else None


class CachedFile(File):
    """A file on the Hub that is read from its local copy."""

    __slots__ = ("_copy", "path", "size", "version")

    def __init__(self, path: str, version: str, copy: LocalFile) -> None:
        self.path = path
        self.size, self.version = copy.size, version
        self._copy = copy

    @property
    def local_copy(self) -> str:
        return os.path.realpath(self._copy.path)

    def read_into(self, offset: int, out: Buffer) -> None:
        self._copy.read_into(offset, out)

    def remember_head(self, nbytes: int) -> None:
        self._copy.remember_head(nbytes)

    def check_unchanged(self) -> None:
        self._copy.check_unchanged()

    def close(self) -> None:
        self._copy.close()


def cached_file(location: str, repo: str, path: str, commit: str, entry: Entry) -> CachedFile | None:
    """Return the local copy of a file; None if there is no complete copy.

    Args:
        location: Name of the file in messages.
        repo, path, commit: Repository, path and commit of the file.
        entry: The expected size and version.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        result = try_to_load_from_cache(repo, path, revision=commit)
    except ValueError:
        return None  # `huggingface_hub` does not accept names such as `\\..\\`
    if not isinstance(result, str) or not _is_copy(Path(result), entry):
        return None
    return CachedFile(location, entry.version, LocalFile.at(result))


def note_revision(repo: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag in the cache, so that its name works offline.

    `hf_hub_download` does this only if it is called with the name, but here it is called with the commit.
    """
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    location = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "refs" / revision
    try:
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_text(commit)
    except OSError as error:
        raise StorageError(f"cannot write {location}", got=error.strerror) from error


def _is_copy(path: Path, entry: Entry) -> bool:
    """Return whether a cached file matches the Hub's listing; link targets are named after their content."""
    result = _entry(path)
    return result == entry if path.is_symlink() else result.size == entry.size


def cached_snapshot(repo: str, revision: str) -> Snapshot:
    """Return the cached files of a revision in offline mode.

    Raises:
        StorageError: The revision is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise StorageError(
            f"hf://{repo}@{revision} is not in the cache",
            got="HF_HUB_OFFLINE is set, so no request was sent",
            hint=f"unset it, or fetch the model first: hf download {repo} --revision {revision}",
        ) from error
    result = (Path(above) / name for above, _, names in os.walk(folder) for name in names)
    # Skip broken links, whose blobs were removed, and link cycles.
    there = (path for path in result if path.is_file())
    return Snapshot(folder.name, {path.relative_to(folder).as_posix(): _entry(path) for path in there})


def _entry(path: Path) -> Entry:
    """Return the entry of a cached file, which is usually a link whose target is named after the content."""
    real = path.resolve()
    status = real.stat()
    version = real.name if path.is_symlink() else str(status.st_mtime_ns)
    return Entry(status.st_size, version)
