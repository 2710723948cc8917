"""Saves that go on while their caller computes: of copies on the host, in a thread that exit waits for."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import field

from ckpttools.core.budget import format_size
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, MemoryBudgetError
from ckpttools.core.message_terms import option
from ckpttools.core.process_memory import available_bytes
from ckpttools.core.text import printable_text
from ckpttools.run.events import Receipt
from ckpttools.sharding.save_shards import Abstract, ShardHolder
from ckpttools.stores.concurrency import in_threads
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import LockedError

# Copies from devices that are under way at once: one waits for its device while another is put in its place.
_COPIES = 4


class Saving:
    """A save that is under way.

    saving = ckpttools.save_async(state, "gs://bucket/run/1000")     # the arrays may change from here on
    state = step(state, batch)
    saving.done                                                      # False, for now
    receipt = saving.wait()                                          # raises what went wrong

    Attributes:
        destination: where it is written.
    """

    def __init__(self, destination: Location) -> None:
        self.destination = destination
        self._ended = threading.Event()
        self._receipt: Receipt | None = None
        self._error: BaseException | None = None
        self._is_told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Receipt:
        """Waits until all is written, and returns what `ckpttools.save` does.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended after that time, and goes on.
            CheckpointError: as `ckpttools.save`.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.destination} is still being written")
        self._is_told = True
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
    """The saves of this process that are under way, and the bytes that their copies take."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    savings: list[Saving] = field(default_factory=list)
    held: int = 0
    is_awaited: bool = False

    def take(self, saving: Saving, nbytes: int, allowed: int | None) -> None:
        """Makes room for the copies of one more.

        Raises:
            LockedError: one is under way to the same place.
            MemoryBudgetError: there is no such room.
        """
        with self.lock:
            self.savings = [item for item in self.savings if not (item.done and item._is_told)]
            _check_location(saving.destination, self.savings)
            _check_room(nbytes, self.held, allowed)
            self.savings.append(saving)
            self.held += nbytes

    def release(self, nbytes: int) -> None:
        with self.lock:
            self.held -= nbytes

    def give_up(self, saving: Saving) -> None:
        """Forgets one that did not begin."""
        with self.lock:
            self.savings.remove(saving)

    def await_all(self) -> None:
        """Waits for all at the end of the process, and says of what nobody was told."""
        for saving in self.savings:
            try:
                if not saving._is_told:
                    saving.wait()
            except CheckpointError as error:
                _tell(f"{saving.destination} was not saved: {error}")
            except BaseException as error:
                told = "".join(traceback.format_exception(error))
                _tell(f"{saving.destination} was not saved: {type(error).__name__}: {error}\n{told}")


def _tell(text: str) -> None:
    """Logs what went wrong, and prints it to stderr as well where Python's logging would not."""
    text = "\n".join(map(printable_text, text.splitlines()))
    log = logging.getLogger("ckpttools")
    log.error("%s", text)
    if log.hasHandlers():
        # They may write anywhere, or nowhere; and there is nobody left to be told otherwise.
        sys.stderr.write(f"ckpttools: {text}\n")


_BACKGROUND = _Background()


def start(
    destination: Location,
    held: Iterable[ShardHolder | Abstract],
    save: Callable[[], Receipt],
    host_memory: int | None = None,
) -> Saving:
    """Copies arrays to the host, then saves them while the caller goes on.

    Args:
        destination: where they are saved.
        held: what holds them; gives way to the copies.
        save: writes them.
        host_memory: bytes that copies may take, those of other saves under way included; None for half of
            what the system has available.

    Raises:
        LockedError: a save to the same place is under way.
        MemoryBudgetError: the copies would take more than `host_memory`.
        SourceChangedError: an array was deleted.
    """
    shards = [item for item in held if isinstance(item, ShardHolder)]
    nbytes = sum(shard.nbytes for shard in shards)
    saving = Saving(destination)
    _BACKGROUND.take(saving, nbytes, host_memory)

    def release() -> None:
        for shard in shards:
            shard.let_go()
        _BACKGROUND.release(nbytes)

    try:
        _copy(shards)
        _await_at_exit()
        threading.Thread(target=saving._run, args=(save, release), name=f"saving {destination}").start()
    except BaseException:
        release()
        _BACKGROUND.give_up(saving)
        raise
    return saving


def refuse_under_way(destination: Location) -> None:
    """Refuses a place where a save of this process is under way, also one whose thread has not begun.

    Raises:
        LockedError: there is one.
    """
    with _BACKGROUND.lock:
        _check_location(destination, _BACKGROUND.savings)


def _copy(shards: Collection[ShardHolder]) -> None:
    in_threads(_COPIES, ShardHolder.copy_to_host, shards)


def _check_location(destination: Location, others: Iterable[Saving]) -> None:
    expected = destination.resolve()
    for other in others:
        if not other.done and other.destination.resolve() == expected:
            raise LockedError(
                f"{destination} is being written by an earlier save of this process",
                expected="one save to a place at a time",
                hint="wait for it: saving.wait(), or save to another place",
            )


def _check_room(nbytes: int, held: int, allowed: int | None) -> None:
    limit = (available_bytes() or 1 << 60) // 2 + held if allowed is None else allowed
    if held + nbytes <= limit:
        return
    others = f", and {format_size(held)} are those of saves under way" if held else ""
    raise MemoryBudgetError(
        "copies of the arrays do not fit into the memory of the host that is allowed",
        got=f"{format_size(nbytes)} of arrays{others}",
        expected=f"at most {format_size(limit)} in all",
        hint=f"allow more with {option('host_memory')}, wait for the saves under way, or use ckpttools.save, "
        "which needs no copies",
    )


def _await_at_exit() -> None:
    """Has the process wait before anything is closed that a save needs."""
    if not _BACKGROUND.is_awaited:
        _BACKGROUND.is_awaited = True
        # Those of `atexit` are called when pools of threads take no more work. Called last to first.
        import concurrent.futures.thread  # noqa: F401  (registers its own)

        threading._register_atexit(_BACKGROUND.await_all)  # type: ignore[attr-defined]
