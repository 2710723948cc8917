"""Starting threads where the system may refuse to: fewer do the same work."""

from __future__ import annotations

import errno
import mmap
import resource
import threading
from collections.abc import Callable

from ckpttools.core.errors import MemoryBudgetError
from ckpttools.core.wording import option

# What a thread takes before it can say that it has begun, beside its stack.
_BEGINNING_BYTES = 8 << 20
_USUAL_STACK = 8 << 20


def start_some(make: Callable[[], threading.Thread], most: int, started: list[threading.Thread]) -> None:
    """Starts threads until there are so many, or the system gives no memory for another one.

    Args:
        make: allocates what one needs.
        most: how many are wanted.
        started: gets them, also where an error is raised.

    Raises:
        MemoryBudgetError: there is not even one.
    """
    for _ in range(most):
        try:
            thread = make()
            _require_room()
            thread.start()
            started.append(thread)
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


def is_ending(error: MemoryBudgetError) -> bool:
    """Whether no thread began as the interpreter is ending, and waits for those that are at work."""
    # Of Python 3.12 and later: "can't create new thread at interpreter shutdown".
    return isinstance(error.__cause__, RuntimeError) and "shutdown" in str(error.__cause__)


def _require_room() -> None:
    """Raises OSError where a thread would find no memory: one that does not get to its first line is waited
    for without end (CPython's `Thread.start`)."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    mmap.mmap(-1, (_USUAL_STACK if stack == resource.RLIM_INFINITY else stack) + _BEGINNING_BYTES).close()
