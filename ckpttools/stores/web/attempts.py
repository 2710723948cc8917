"""Retries of requests: their number, pauses and limits."""

from __future__ import annotations

import random
import threading
import time
from email.utils import parsedate_to_datetime

from ckpttools.core.dataclass import dataclass
from ckpttools.core.details import log_detail
from ckpttools.core.errors import StorageError
from ckpttools.core.message_terms import retry_term

# Minimum bytes of a truncated body that count as progress.
_PROGRESS = 1 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and limits of retries.

    Attributes:
        connect: Seconds to establish a connection.
        stall: Seconds to wait for the first byte and for each further byte.
        attempts: Maximum number of attempts without progress for one read.
        first_wait: Maximum seconds before the second attempt; doubled before each further attempt.
        longest_wait: Maximum seconds that a server may request with `Retry-After`.
        failures: Failed attempts that the process may have in addition to one per ten successful ones.
    """

    connect: float = 10
    stall: float = 30
    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 120
    failures: int = 100


class Budget:
    """Counts the attempts of a process, so that retries stop if most of them fail."""

    def __init__(self, failures: int) -> None:
        self._lock = threading.Lock()
        self._failures = failures
        self.failed = self.answered = 0

    def succeeded(self) -> None:
        with self._lock:
            self.answered += 1

    def allows_another(self) -> bool:
        """Count a failed attempt, and return whether another one may follow."""
        with self._lock:
            self.failed += 1
            return self.failed <= self._failures + self.answered // 10


class Attempts:
    """The attempts of one read.

    Args:
        location: The location that is read, for messages.
        patience: The limits.
        budget: The budget of the process.
        doing: The action, for messages.
    """

    def __init__(self, location: str, patience: Patience, budget: Budget, doing: str = "read") -> None:
        self.location, self.doing = location, doing
        self.patience = patience
        self._budget = budget
        self._made = 0

    def succeeded(self) -> None:
        self._budget.succeeded()

    def cut(self, received: int, got: str) -> None:
        """Count a truncated response as failed, unless it brought enough progress; see `failed`."""
        if received < _PROGRESS:
            self.failed(got)

    def failed(self, got: str, asked: float | None = None, limit: int | None = None, hint: str = "") -> None:
        """Wait until another attempt may start.

        Args:
            got: Description of the failed attempt.
            asked: Seconds that the server asks to wait.
            limit: Useful number of attempts after this failure, if smaller than usual.
            hint: Hint for the error; "" for the general one.

        Raises:
            StorageError: No more attempts are allowed.
        """
        self._made += 1
        limit = min(limit or self.patience.attempts, self.patience.attempts)
        if asked is not None and asked > self.patience.longest_wait:
            got = f"{got}, and a request to wait {asked:,.0f} s"
            raise self._error(got + attempts_suffix(self._made), "run the command again after that time")
        if self._made >= limit:
            hint = hint or f"check the address and the network, then {retry_term()}"
            raise self._error(got + attempts_suffix(self._made), hint)
        if not self._budget.allows_another():
            budget = self._budget
            got += attempts_suffix(self._made)
            got = f"{got}; {budget.failed} requests failed and {budget.answered} succeeded"
            raise self._error(got, "the server or the network is unreliable: run the command again later")
        backoff = self.patience.first_wait * 2 ** (self._made - 1) * random.uniform(0.5, 1)
        seconds = max(asked or 0, backoff)
        failed = "attempt %s to %s %s failed (%s); the next is in %.1f s"
        log_detail(failed, self._made, self.doing, self.location, got, seconds)
        time.sleep(seconds)

    def _error(self, got: str, hint: str) -> StorageError:
        return StorageError(f"cannot {self.doing} {self.location}", got=got, hint=hint)


def attempts_suffix(attempts: int) -> str:
    """Format the number of attempts for the end of a message; "" for one attempt."""
    return f", tried {attempts} times" if attempts > 1 else ""


def parse_retry_after(text: str | None) -> float | None:
    """Parse `Retry-After`, which has seconds or a date; return None if it is invalid."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
