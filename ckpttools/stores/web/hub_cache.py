"""The cache of `huggingface_hub`: files that are in it, and verified downloads into it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    CheckpointError,
    FormatError,
    NoSpaceError,
    StorageError,
    first_line,
    listing,
)
from ckpttools.core.message_terms import option, retry_term
from ckpttools.stores.base import File, FileKind, Status
from ckpttools.stores.contents import Content
from ckpttools.stores.fetching import Observe
from ckpttools.stores.local.file import LocalFile
from ckpttools.stores.web.hub_errors import Answer, refuse_untrusted, trust_certificates

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
    files = (path for path in result if path.is_file())
    return Snapshot(folder.name, {path.relative_to(folder).as_posix(): _entry(path) for path in files})


def _entry(path: Path) -> Entry:
    """Return the entry of a cached file, which is usually a link whose target is named after the content."""
    real = path.resolve()
    status = real.stat()
    version = real.name if path.is_symlink() else str(status.st_mtime_ns)
    return Entry(status.st_size, version)


# The number that `hf download` uses.
_AT_ONCE = 8
_BLOCK = 1 << 20


class ExpectedFile(NamedTuple):
    """A file to fetch, with its expected content.

    Attributes:
        key: Key of the file in the store.
        location: Name of the file in messages.
        repo, path, commit: Repository, path and commit of the file.
        content: Expected content of the file.
    """

    key: str
    location: str
    repo: str
    path: str
    commit: str
    content: Content


Explain = Callable[["ExpectedFile", Answer], CheckpointError]
"""Function that converts an unsuccessful response of the Hub to an error."""


def fetch(files: Sequence[ExpectedFile], endpoint: str, explain: Explain, observe: Observe) -> None:
    """Fetch files, several at a time. Each file is complete and verified, or does not exist.

    Raises:
        FormatError: Files differ from the Hub's listing. They are removed.
        StorageError, NoSpaceError: A file cannot be fetched or stored.
    """
    trust_certificates()
    progress = _FetchProgress(sum(file.content.size for file in files), observe)
    _check_room(progress.total)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(_fetch_file, file, endpoint, explain, progress) for file in files]
        try:
            wrong = [future.result() for future in futures]
        finally:
            progress.ended.set()
            for future in futures:
                future.cancel()
    if differing := [text for text in wrong if text]:
        raise FormatError(
            f"files differ from the Hub's listing{listing(differing)}",
            expected="files with the listed digests",
            hint=f"they were removed from the cache; {retry_term()}, and report it to the owner of the "
            "model if it happens again",
        )


class _FetchStoppedError(Exception):
    """Another file could not be fetched, or the user has interrupted the command."""


class _FetchProgress:
    """Total progress of all files; raises an error in updates after the end."""

    def __init__(self, total: int, observe: Observe) -> None:
        self.total = total
        self.ended = threading.Event()
        self._observe = observe
        self._lock = threading.Lock()
        self._done = 0
        observe(0, total)

    def add(self, nbytes: int) -> None:
        if self.ended.is_set():
            raise _FetchStoppedError
        with self._lock:
            self._done += nbytes
            self._observe(self._done, self.total)


class _TqdmBar:
    """A progress bar for one file, with the tqdm interface that `huggingface_hub` expects."""

    def __init__(self, add: Callable[[int], None], **_: object) -> None:
        self._add = add
        self.n = 0

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        self._add(int(n or 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


def _fetch_file(
    expected: ExpectedFile, endpoint: str, explain: Explain, progress: _FetchProgress
) -> str | None:
    """Fetch a file; return a description of the mismatch, or None if the file is correct."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    came = 0

    def add(nbytes: int) -> None:
        nonlocal came
        came += nbytes
        progress.add(nbytes)

    bar: Any = partial(_TqdmBar, add)
    progress.add(0)
    with _convert_errors(expected, explain):
        known = try_to_load_from_cache(expected.repo, expected.path, revision=expected.commit)
        path = hf_hub_download(
            expected.repo,
            expected.path,
            revision=expected.commit,
            endpoint=endpoint,
            tqdm_class=bar,
            force_download=isinstance(known, str),  # Otherwise the file would not be fetched.
        )
        got = _digest(path, expected.content, progress)
    progress.add(expected.content.size - came)
    if got == expected.content.digest:
        return None
    for item in {os.path.realpath(path), path}:
        Path(item).unlink(missing_ok=True)
    return f"{expected.location}: {expected.content.algorithm} {got} instead of {expected.content.digest}"


def _digest(path: str, content: Content, progress: _FetchProgress) -> str:
    hasher = content.hasher()
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            progress.add(0)
    return hasher.hexdigest()


def _check_room(nbytes: int) -> None:
    from huggingface_hub import constants

    there = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise NoSpaceError(
            "the cache has too little space",
            location=constants.HF_HUB_CACHE,
            got=f"{free} bytes free",
            expected=f"{nbytes} bytes",
            hint="free some space with `hf cache prune`, or set HF_HOME to another directory; without "
            f"{option('download', True)} nothing is stored on disk",
        )


@contextmanager
def _convert_errors(expected: ExpectedFile, explain: Explain) -> Iterator[None]:
    """Convert errors from `huggingface_hub` and its dependencies."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (CheckpointError, _FetchStoppedError):
        raise
    except Exception as error:
        for item in (error, error.__cause__):
            if isinstance(item, HfHubHTTPError):
                response = item.response
                answer = Answer(response.status_code, response.reason_phrase, response.headers)
                raise explain(expected, answer) from error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"cannot store {expected.location} in the cache", got=error) from error
        refuse_untrusted(error, expected.location)
        raise StorageError(
            f"cannot fetch {expected.location}",
            got=first_line(error.__cause__ or error),
            hint=f"{retry_term()}: complete files are not fetched again",
        ) from error
