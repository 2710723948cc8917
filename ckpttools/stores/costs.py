"""What reading and writing a store takes, and what it has taken."""

from __future__ import annotations

import threading

from ckpttools.core.dataclass import dataclass

FAR = 32
"""`File.price` behind a network: a piece of a local file, which counts as 64 KiB, is written in 20 us, and in
these come 2 KiB at 100 MB/s."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What reading from a store takes.

    Attributes:
        requests: reads under way at once that are of use; None where the processors are what limits them.
        memory: bytes that reading takes at most beside the buffers that it fills.
    """

    requests: int | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """How a store is written in which a file is written from its first byte to its last.

    Attributes:
        memory: bytes that writing a file takes, beside what is written.
        file_bytes: of a data file that is large enough for few requests and small enough to be written
            again.
        files: that are of use at a time.
        is_readable: whether data files can be read where they grow, before all is published.
    """

    memory: int
    file_bytes: int
    files: int
    is_readable: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a store was asked over a network.

    Attributes:
        requests: how many were made.
        nbytes: bytes that came in answer to them.
    """

    requests: int = 0
    nbytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.nbytes - other.nbytes)


class Meter:
    """Counts requests and bytes; for many threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._nbytes = 0

    def add(self, requests: int = 0, nbytes: int = 0) -> None:
        """Counts requests that were made, or bytes that came."""
        with self._lock:
            self._requests += requests
            self._nbytes += nbytes

    @property
    def total(self) -> Traffic:
        """All since the process began."""
        with self._lock:
            return Traffic(self._requests, self._nbytes)
