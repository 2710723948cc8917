"""Handling of Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

During imports, the handler ends the process itself: there is nothing to clean up, and an exception could be
lost in a callback of the import system. While a command runs, the handler raises `Stopped` in the main
thread, so that workers stop between two tasks, finished work is recorded in the journal, and the terminal's
cursor is restored. A second signal ends the process at once. As after `kill -9`, the same command then
resumes unfinished work.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import partial

# typing.TYPE_CHECKING is not used, because fewer imports let the process handle signals sooner.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import NoReturn, TypeAlias

    Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers

MESSAGE = "Stopped."
RESUMES = "Run the same command again to resume."
IS_DONE = "The output is complete."
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Shows the cursor, which a progress bar hides.
_SHOW_CURSOR = b"\x1b[?25h"
# Time for the callback that lost the exception to return.
_REPEAT_SECONDS = 0.01


class Stopped(BaseException):
    """A signal asked the process to end. It is not an Exception, so that error handlers do not continue.

    Attributes:
        number: Number of the signal.
        exit_code: Exit code that a shell reports for a program ended by this signal.
        goes_on: Whether the command writes a checkpoint and resumes when it is run again.
        is_done: Whether the command had finished writing.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number
        self.goes_on = self.is_done = False

    def __str__(self) -> str:
        if self.is_done:
            return f"{MESSAGE} {IS_DONE}"
        return f"{MESSAGE} {RESUMES}" if self.goes_on else MESSAGE


def install_early_handlers() -> None:
    """Let signals end the process from now on."""
    _handle(_end_process)


def ignore() -> None:
    """Ignore signals from now on."""
    _handle(signal.SIG_IGN)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise `Stopped` in the main thread on the first signal. Does nothing in other threads."""
    hook = sys.unraisablehook
    try:
        before = _handle(_raise_stopped)
    except ValueError:  # Only the main thread may set signal handlers.
        yield
        return
    sys.unraisablehook = partial(_reraise_lost, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set the handler of all signals except those that the parent process ignores, as with nohup."""
    before = {}
    for number in _SIGNALS:
        handles = signal.getsignal(number)
        if handles not in (signal.SIG_IGN, None):
            before[number] = handles
            signal.signal(number, handler)
    return before  # type: ignore[return-value]  # no numbers, which signal.signal takes as well


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    _handle(_end_process)
    raise Stopped(number)


def _end_process(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"Stopped.\n")
    os._exit(128 + number)


def _reraise_lost(before: Callable[[UnraisableHookArgs], object], lost: UnraisableHookArgs) -> None:
    """Raise an exception again that was lost, for example in a finalizer."""
    if not isinstance(lost.exc_value, Stopped):
        before(lost)
        return
    number = lost.exc_value.number
    signal.signal(signal.SIGALRM, lambda _, frame: _raise_stopped(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS)
