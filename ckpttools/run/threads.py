"""Starting threads where the system may refuse to: fewer do the same work."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.wording import option


def start_some(start: Callable[[], threading.Thread], most: int, started: list[threading.Thread]) -> None:
    """Starts threads until there are so many, or the system gives no memory for another one.

    Args:
        start: allocates what one needs, and starts it.
        most: how many are wanted.
        started: gets them, also where an error is raised.

    Raises:
        MemoryBudgetError: there is not even one.
    """
    for _ in range(most):
        try:
            started.append(start())
        # What CPython raises where pthread_create fails is a RuntimeError.
        except (MemoryError, OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN):
                raise
            if not started:
                raise MemoryBudgetError(
                    "the system gives no memory to work in",
                    got=error,
                    hint="raise the limit of the process (ulimit -v, a container's memory), or ask for less "
                    f"with {option('memory')} and {option('jobs', 1)}",
                ) from error
            return
