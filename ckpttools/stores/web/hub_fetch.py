"""Download files from the Hub into the `huggingface_hub` cache and verify them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from ckpttools.core.errors import (
    CheckpointError,
    FormatError,
    NoSpaceError,
    StorageError,
    first_line,
    listing,
)
from ckpttools.core.message_terms import option, retry_term
from ckpttools.stores.contents import Content
from ckpttools.stores.fetching import Observe
from ckpttools.stores.web.hub_errors import Answer, refuse_untrusted, trust_certificates

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
            f"files differ from the hub's listing{listing(differing)}",
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
    with _converted_errors(expected, explain):
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
def _converted_errors(expected: ExpectedFile, explain: Explain) -> Iterator[None]:
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
