"""Digests that a store declares for its files, and their verification."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import field
from threading import Event, Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError
from ckpttools.core.memory_limit import baseline_bytes, memory_error
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from hashlib import _Hash

# Size of a request in bytes; each concurrent request has a buffer of this size.
_BLOCK = 4 << 20
# One thread hashes about 1 GB/s, which is faster than most networks.
_HASH_CONCURRENCY = 4
_SHA256_DIGITS = 64


class Content(NamedTuple):
    """The expected content of a file.

    Attributes:
        size: Size in bytes.
        digest: Hexadecimal digest: 64 digits of SHA-256, or 40 digits of the git blob ID.
    """

    size: int
    digest: str

    @property
    def algorithm(self) -> str:
        return "SHA-256" if len(self.digest) == _SHA256_DIGITS else "git's SHA-1"

    def hasher(self) -> _Hash:
        """Return a new hash object for this kind of digest."""
        if len(self.digest) == _SHA256_DIGITS:
            return hashlib.sha256()
        result = hashlib.sha1(usedforsecurity=False)
        result.update(b"blob %d\0" % self.size)
        return result


class Contents(NamedTuple):
    """The declared contents of all files below a key.

    Attributes:
        declared: Source of the declaration, for messages such as "equal to what the Hub lists".
        files: Contents by path below the key; "" is the key itself.
    """

    declared: str
    files: Mapping[str, Content]


@runtime_checkable
class SupportsContents(Protocol):
    """A store that declares the contents of its files."""

    def contents(self, key: str) -> Contents:
        """Return the declared contents of all files below a key.

        Raises:
            StorageError: The key does not exist, or a file has no declared content.
        """


class WrongLengthError(StorageError):
    """A response has a different length from the one that the store declared."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that differs from its declared content.

    Attributes:
        name: Path below the key.
        got, expected: The digests, or descriptions of the content.
        copy: The local copy that was read instead; "" if there was none.
    """

    name: str
    got: str
    expected: str
    copy: str = ""


def find_differing_files(
    root: Location,
    files: Mapping[str, Content],
    *,
    memory: int,
    jobs: int | None = None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> list[FileDifference]:
    """Read files completely, several at a time, and return those that differ from their declared content.

    Args:
        root: The directory of the files.
        files: As for `Contents.files`.
        memory: Memory limit in bytes.
        jobs: Number of concurrent files; None means four.
        observe: Called with the number of bytes after each read, from several threads but never concurrently.

    Returns:
        The differences, sorted by name.

    Raises:
        MemoryBudgetError: The limit does not allow even one block.
        StorageError: The store cannot be read.
    """
    costs = root.store.costs
    room = memory - baseline_bytes() - costs.memory
    if room < _BLOCK:
        raise memory_error(
            "not even one block of a file fits into memory", memory, memory - room + _BLOCK, root
        )
    requests = min(costs.requests or os.cpu_count() or 1, room // _BLOCK)
    map_concurrently = max(1, min(jobs or _HASH_CONCURRENCY, requests, len(files)))
    with ThreadPoolExecutor(requests) as reading, ThreadPoolExecutor(map_concurrently) as hashing:
        check = _FileHasher(root, reading, requests // map_concurrently, observe)
        futures = [hashing.submit(check, name, expected) for name, expected in sorted(files.items())]
        try:
            result = [future.result() for future in futures]
        finally:
            check.ended.set()
    return [item for item in result if item is not None]


@dataclass(frozen=True, slots=True)
class _FileHasher:
    """Reads and hashes one file with some read-ahead; stops when the verification has ended."""

    root: Location
    reading: ThreadPoolExecutor
    ahead: int
    observe: Callable[[int], None]
    ended: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def __call__(self, name: str, expected: Content) -> FileDifference | None:
        location = self.root / name if name else self.root
        try:
            with location.open() as file:
                got = self._digest(file, expected)
                copy = file.local_copy
        except (FormatError, WrongLengthError) as error:
            text = ", ".join(filter(None, (error.raw.message, error.raw.got)))
            return FileDifference(name or location.name, text, f"{expected.size} bytes")
        if got == expected.digest:
            return None
        algorithm = expected.algorithm
        return FileDifference(
            name or location.name, f"{algorithm} {got}", f"{algorithm} {expected.digest}", copy
        )

    def _digest(self, file: File, expected: Content) -> str:
        hasher = expected.hasher()
        waiting: deque[Future[bytearray]] = deque()
        try:
            for start in range(0, file.size, _BLOCK):
                if self.ended.is_set():
                    break
                if len(waiting) == self.ahead:
                    self._take(hasher, waiting)
                waiting.append(self.reading.submit(_block, file, start))
            while waiting:
                self._take(hasher, waiting)
        finally:
            for item in waiting:
                item.cancel()
            wait(waiting)  # All reads must end before the file is closed.
        return hasher.hexdigest()

    def _take(self, hasher: _Hash, waiting: deque[Future[bytearray]]) -> None:
        block = waiting.popleft().result()
        hasher.update(block)
        with self.lock:
            self.observe(len(block))


def _block(file: File, start: int) -> bytearray:
    block = bytearray(min(_BLOCK, file.size - start))
    file.read_into(start, block)
    return block
