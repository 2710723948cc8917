"""What a store says that its files are, and whether what it sends is that."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import field
from threading import Event, Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ckpttools.core.budget import baseline_bytes, memory_error
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from hashlib import _Hash

# What comes in one request. Each of those under way has as much of memory.
_BLOCK = 4 << 20
# One thread hashes about 1 GB/s, which is more than most networks bring.
_HASHED_AT_ONCE = 4
_SHA256_DIGITS = 64


class Content(NamedTuple):
    """What a file has to hold.

    Attributes:
        size: bytes.
        digest: in hexadecimal digits: 64 of its SHA-256, 40 of what git calls it.
    """

    size: int
    digest: str

    @property
    def algorithm(self) -> str:
        return "SHA-256" if len(self.digest) == _SHA256_DIGITS else "git's SHA-1"

    def hasher(self) -> _Hash:
        """What makes such a digest of the bytes of a file."""
        if len(self.digest) == _SHA256_DIGITS:
            return hashlib.sha256()
        built = hashlib.sha1(usedforsecurity=False)
        built.update(b"blob %d\0" % self.size)
        return built


class Contents(NamedTuple):
    """What a store says of the files below a key.

    Attributes:
        declared: who says it, as in "equal to what the hub lists".
        files: by the rest of their key; "" for the key itself.
    """

    declared: str
    files: Mapping[str, Content]


@runtime_checkable
class ListsContents(Protocol):
    """A store that says what its files have to hold, apart from the files."""

    def contents(self, key: str) -> Contents:
        """All files below a key.

        Raises:
            StorageError: nothing is there, or the store does not say it of all of them.
        """


class WrongLengthError(StorageError):
    """What a store sends of a file is of another length than it said."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that is not what its store says.

    Attributes:
        name: below the key.
        got, expected: digests, or in words what stands for them.
        copy: the local file that was read in its place; "" where none was.
    """

    name: str
    got: str
    expected: str
    copy: str = ""


def differing(
    root: Location,
    files: Mapping[str, Content],
    *,
    memory: int,
    jobs: int | None = None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> list[FileDifference]:
    """Reads files to their ends, several at once, and finds those that are not what they have to be.

    Args:
        root: what they are below.
        files: as `Contents.files`.
        memory: bytes that may be resident at most.
        jobs: files at a time; None for four.
        observe: called with bytes that were read, from several threads but never at once.

    Returns:
        Those that differ, by name.

    Raises:
        MemoryBudgetError: not one block fits into the memory.
        StorageError: the store cannot be read.
    """
    costs = root.store.costs
    room = memory - baseline_bytes() - costs.memory
    if room < _BLOCK:
        raise memory_error("no block of a file fits into the memory", memory, memory - room + _BLOCK, root)
    requests = min(costs.requests or os.cpu_count() or 1, room // _BLOCK)
    at_once = max(1, min(jobs or _HASHED_AT_ONCE, requests, len(files)))
    with ThreadPoolExecutor(requests) as reading, ThreadPoolExecutor(at_once) as hashing:
        check = _FileHasher(root, reading, requests // at_once, observe)
        futures = [hashing.submit(check, name, expected) for name, expected in sorted(files.items())]
        try:
            result = [future.result() for future in futures]
        finally:
            check.ended.set()
    return [item for item in result if item is not None]


@dataclass(frozen=True, slots=True)
class _FileHasher:
    """Reads one file, some blocks ahead of the one that is being hashed; none once it has ended for all."""

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
            declared = ", ".join(filter(None, (error.message, error.got)))
            return FileDifference(name or location.name, declared, f"{expected.size} bytes")
        if got == expected.digest:
            return None
        what = expected.algorithm
        return FileDifference(name or location.name, f"{what} {got}", f"{what} {expected.digest}", copy)

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
            wait(waiting)  # before the file is closed
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
