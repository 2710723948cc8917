"""What a store was asked over a network, counted where requests are made."""

from __future__ import annotations

import threading

from ckpttools.stores.costs import Traffic


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
