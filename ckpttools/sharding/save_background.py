"""Background saves of host copies, in a thread for which the process waits before it exits."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import field

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, MemoryBudgetError
from ckpttools.core.memory_limit import format_size
from ckpttools.core.message_terms import option
from ckpttools.core.process_memory import available_bytes
from ckpttools.core.text import printable_text
from ckpttools.run.events import Receipt
from ckpttools.sharding.save_shards import Abstract, ShardHolder
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import LockedError

# Number of concurrent copies from devices: while one waits for its device, another is copied into place.
_COPIES = 4


class Saving:
    """A save in the background.

    saving = ckpttools.save_async(state, "gs://bucket/run/1000")     # the arrays may change from here on
    saving.done                                                      # False, for now
    receipt = saving.wait()                                          # raises the save's error

    Attributes:
        destination: The location being written.
    """

    def __init__(self, destination: Location) -> None:
        self.destination = destination
        self._ended = threading.Event()
        self._receipt: Receipt | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Receipt:
        """Wait until everything is written, and return the receipt of `ckpttools.save`.

        Args:
            timeout: Maximum wait in seconds; None for no limit.

        Raises:
            TimeoutError: The save has not ended within that time, and continues.
            CheckpointError: See `ckpttools.save`.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.destination} is still being written")
        self._is_reported = True
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return self._receipt

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error else "done"
        return f"Saving({str(self.destination)!r}: {state})"

    def _run(self, save: Callable[[], Receipt], release: Callable[[], None]) -> None:
        try:
            self._receipt = save()
        except BaseException as error:
            self._error = error
        finally:
            release()
            self._ended.set()


@dataclass
class _Background:
    """The running saves of this process, and the bytes of their copies."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    savings: list[Saving] = field(default_factory=list)
    reserved_bytes: int = 0
    is_awaited: bool = False

    def reserve(self, saving: Saving, nbytes: int, allowed: int | None) -> None:
        """Reserve memory for the copies of another save.

        Raises:
            LockedError: A save to the same destination is running.
            MemoryBudgetError: The copies do not fit.
        """
        with self.lock:
            self.savings = [item for item in self.savings if not (item.done and item._is_reported)]
            _check_location(saving.destination, self.savings)
            _check_room(nbytes, self.reserved_bytes, allowed)
            self.savings.append(saving)
            self.reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        with self.lock:
            self.reserved_bytes -= nbytes

    def remove(self, saving: Saving) -> None:
        """Remove a save that did not start."""
        with self.lock:
            self.savings.remove(saving)

    def await_all(self) -> None:
        """Wait for all saves at the end of the process, and print errors that were not raised."""
        for saving in self.savings:
            try:
                if not saving._is_reported:
                    saving.wait()
            except CheckpointError as error:
                _log_failure(f"{saving.destination} was not saved: {error}")
            except BaseException as error:
                trace = "".join(traceback.format_exception(error))
                _log_failure(f"{saving.destination} was not saved: {type(error).__name__}: {error}\n{trace}")


def _log_failure(text: str) -> None:
    """Log an error, and print it to stderr if Python's logging would not."""
    text = "\n".join(map(printable_text, text.splitlines()))
    log = logging.getLogger("ckpttools")
    log.error("%s", text)
    if log.hasHandlers():
        # Handlers may write anywhere or nowhere, and this is the last chance to show the error.
        sys.stderr.write(f"ckpttools: {text}\n")


_BACKGROUND = _Background()


def start(
    destination: Location,
    holders: Iterable[ShardHolder | Abstract],
    save: Callable[[], Receipt],
    host_memory: int | None = None,
) -> Saving:
    """Copy arrays to the host, then save them in the background.

    Args:
        destination: Destination of the save.
        holders: Holders of the arrays; their contents are replaced by the copies.
        save: Writes the copies.
        host_memory: Maximum bytes of the copies, including those of other running saves; None for half of the
            available memory.

    Raises:
        LockedError: A save to the same destination is running.
        MemoryBudgetError: The copies would exceed `host_memory`.
        SourceChangedError: An array was deleted.
    """
    shards = [item for item in holders if isinstance(item, ShardHolder)]
    nbytes = sum(shard.nbytes for shard in shards)
    saving = Saving(destination)
    _BACKGROUND.reserve(saving, nbytes, host_memory)

    def release() -> None:
        for shard in shards:
            shard.discard()
        _BACKGROUND.release(nbytes)

    try:
        _copy(shards)
        _await_at_exit()
        threading.Thread(target=saving._run, args=(save, release), name=f"saving {destination}").start()
    except BaseException:
        release()
        _BACKGROUND.remove(saving)
        raise
    return saving


def refuse_concurrent_save(destination: Location) -> None:
    """Refuse the destination of a running save of this process, even if its thread has not started.

    Raises:
        LockedError: A save to the destination is running.
    """
    with _BACKGROUND.lock:
        _check_location(destination, _BACKGROUND.savings)


def _copy(shards: Collection[ShardHolder]) -> None:
    map_in_threads(_COPIES, ShardHolder.copy_to_host, shards)


def _check_location(destination: Location, others: Iterable[Saving]) -> None:
    expected = destination.resolve()
    for other in others:
        if not other.done and other.destination.resolve() == expected:
            raise LockedError(
                f"{destination} is being written by an earlier save of this process",
                expected="one save at a time per destination",
                hint="wait for it: saving.wait(), or save to another destination",
            )


def _check_room(nbytes: int, reserved: int, allowed: int | None) -> None:
    limit = (available_bytes() or 1 << 60) // 2 + reserved if allowed is None else allowed
    if reserved + nbytes <= limit:
        return
    others = f", in addition to {format_size(reserved)} of other running saves" if reserved else ""
    raise MemoryBudgetError(
        "copies of the arrays exceed the allowed host memory",
        got=f"{format_size(nbytes)} of arrays{others}",
        expected=f"at most {format_size(limit)} in all",
        hint=f"increase {option('host_memory')}, wait for the running saves, or use ckpttools.save, "
        "which needs no copies",
    )


def _await_at_exit() -> None:
    """Make the process wait for saves before the resources that they need are closed."""
    if not _BACKGROUND.is_awaited:
        _BACKGROUND.is_awaited = True
        # `atexit` functions run too late, when thread pools no longer accept work. These functions run in
        # reverse order.
        import concurrent.futures.thread  # noqa: F401  (registers its own)

        threading._register_atexit(_BACKGROUND.await_all)  # type: ignore[attr-defined]
