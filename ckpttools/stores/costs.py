"""Costs of reading from and writing to a store, and counters of its requests."""

from __future__ import annotations

import threading

from ckpttools.core.dataclass import dataclass

REMOTE_COST = 32
"""`File.price` of a network store.

Writing a piece of a local file counts as 64 KiB and takes 20 us, in which time 2 KiB arrive at 100 MB/s.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of reading from a store.

    Attributes:
        requests: Useful number of concurrent reads; None if the processors are the limit.
        memory: Maximum memory for reading in bytes, in addition to the caller's buffers.
    """

    requests: int | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """How to write to a store in which files are written sequentially.

    Attributes:
        memory: Memory per file in bytes, in addition to the data.
        file_bytes: Size of a data file: large enough to need few requests, small enough to be rewritten.
        files: Useful number of concurrent files.
        is_readable: Whether data files can be read before they are published.
    """

    memory: int
    file_bytes: int
    files: int
    is_readable: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to a store over the network.

    Attributes:
        requests: Number of requests.
        nbytes: Number of bytes received.
    """

    requests: int = 0
    nbytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.nbytes - other.nbytes)


class Meter:
    """A thread-safe counter of requests and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._nbytes = 0

    def add(self, requests: int = 0, nbytes: int = 0) -> None:
        """Count sent requests and received bytes."""
        with self._lock:
            self._requests += requests
            self._nbytes += nbytes

    @property
    def total(self) -> Traffic:
        """Return the totals since the process started."""
        with self._lock:
            return Traffic(self._requests, self._nbytes)
