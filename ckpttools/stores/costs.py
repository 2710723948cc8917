"""Costs of reading and writing a store, and counters of its requests."""

from __future__ import annotations

import threading

from ckpttools.core.dataclass import dataclass

FAR = 32
"""`File.price` of a network store. Writing a piece of a local file counts as 64 KiB and takes 20 us, in which
2 KiB arrive at 100 MB/s.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of reading from a store.

    Attributes:
        requests: useful number of concurrent reads; None if the processors are the limit.
        memory: maximum bytes that reading needs in addition to the caller's buffers.
    """

    requests: int | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """How to write a store in which files are written sequentially.

    Attributes:
        memory: bytes needed per file in addition to the data.
        file_bytes: size of a data file: large enough for few requests, small enough to be rewritten.
        files: useful number of concurrent files.
        is_readable: whether data files can be read before they are published.
    """

    memory: int
    file_bytes: int
    files: int
    is_readable: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to a store over a network.

    Attributes:
        requests: number of requests.
        nbytes: bytes received.
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
        """Count requests sent and bytes received."""
        with self._lock:
            self._requests += requests
            self._nbytes += nbytes

    @property
    def total(self) -> Traffic:
        """Return the totals since the process started."""
        with self._lock:
            return Traffic(self._requests, self._nbytes)
