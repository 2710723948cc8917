"""Open files: few at a time, whatever the number of files; those that were not used for longest are closed.

A checkpoint may have more shards than a process may have open files.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

# More open files than this make nothing quicker.
_MOST = 4096
# What other parts of a process open: libraries, the journal, directories and files that are synced, pipes.
_RESERVE = 48
_LEAST = 8


class Reopened:
    """A file that is open while it is used, and afterwards as long as there is room.

    Args:
        opener: opens it; called again after it was closed. May raise `OSError`.
    """

    def __init__(self, opener: Callable[[], int]) -> None:
        self._opener = opener
        self._opening = threading.Lock()
        # One descriptor or none. Whoever takes it out closes it, which only one thread can do.
        self._descriptor: list[int] = []
        self._users = 0

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Its descriptor, which stays open inside the `with`; errors as those of the opener."""
        _POOL.enter(self)
        try:
            yield self._opened()
        finally:
            _POOL.leave(self)

    def close(self) -> None:
        """Gives the descriptor back now; the next use opens the file again. Not while others use it."""
        try:
            descriptor = self._descriptor.pop()
        except IndexError:
            return
        os.close(descriptor)

    @property
    def is_idle(self) -> bool:
        return self._users == 0

    def _opened(self) -> int:
        with self._opening:
            if not self._descriptor:
                _POOL.make_room()
                self._descriptor.append(self._open())
            return self._descriptor[0]

    def _open(self) -> int:
        try:
            return self._opener()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _POOL.close_idle(0)
            return self._opener()


class _Pool:
    """What may be open, the longest unused first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[Reopened, None] = OrderedDict()

    def enter(self, file: Reopened) -> None:
        with self._lock:
            file._users += 1
            self._files[file] = None
            self._files.move_to_end(file)

    def leave(self, file: Reopened) -> None:
        with self._lock:
            file._users -= 1

    def make_room(self) -> None:
        if len(self._files) > _allowed(raised=False):
            self.close_idle(_allowed(raised=True))

    def close_idle(self, limit: int) -> None:
        """Closes files that nobody uses until there are so many at most."""
        with self._lock:
            extra = len(self._files) - limit
            idle = (file for file in self._files if file.is_idle)
            # Closed under the lock: nobody can begin to use one meanwhile.
            for file in list(islice(idle, max(0, extra))):
                del self._files[file]
                file.close()


_POOL = _Pool()


def _allowed(*, raised: bool) -> int:
    """How many files may be open here.

    Args:
        raised: whether the process's own limit may be raised, as far as the system permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = _MOST + _RESERVE
    if raised and soft != resource.RLIM_INFINITY and soft < expected and soft != hard:
        soft = expected if hard == resource.RLIM_INFINITY else min(expected, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, soft - _RESERVE))
