"""The line to a server: what is sent over it takes the time that it takes at so many bytes in a second."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class Line:
    """One direction of a line; for many threads at once.

    Attributes:
        bandwidth: bytes in a second, of all that share it; 0 for no limit.
        carried: bytes so far.
    """

    bandwidth: float = 0.0
    carried: int = 0
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, nbytes: int) -> None:
        """Returns when so many bytes have come through, after those before them."""
        with self._lock:
            self.carried += nbytes
            if not self.bandwidth:
                return
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bandwidth
            arrival = self._free_at
        time.sleep(max(0.0, arrival - time.monotonic()))
