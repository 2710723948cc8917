"""What a signal that asks to stop does: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed.

While modules are imported there is nothing to end in order, and an exception of a handler can be lost there,
in a callback of the import system: the process ends within the handler. While a command runs, the handler
raises `Stopped` in the main thread, so that workers end between two tasks, what they did is entered in the
journal, and the terminal gets its cursor back. A second signal then ends the process at once: whatever is
half done is gone on with by the same command, as after `kill -9`.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import partial

# Not that of typing: the fewer imports, the sooner a process can be stopped in order.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import NoReturn, TypeAlias

    Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers

MESSAGE = "Stopped."
RESUMES = "What was being written goes on from there when the same command is run again."
IS_DONE = "What was being written is complete."
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a terminal needs that shows a progress bar, which hides it.
_SHOW_CURSOR = b"\x1b[?25h"
# Until a callback has ended in which an exception was lost.
_REPEAT_SECONDS = 0.01


class Stopped(BaseException):
    """A signal asked the process to end; nothing may take it for an error and go on.

    Attributes:
        number: of the signal.
        exit_code: as a shell reports a program that this signal ended.
        goes_on: whether the command was one that writes a checkpoint and goes on where it was stopped.
        is_done: whether it had written it.
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
    """From now on a signal ends the process."""
    _handle(_end_process)


def ignore() -> None:
    """From now on no signal changes how the process ends."""
    _handle(signal.SIG_IGN)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Within it a signal raises `Stopped` in the main thread, once. Does nothing in other threads."""
    hook = sys.unraisablehook
    try:
        before = _handle(_raise_stopped)
    except ValueError:  # only the main thread may say what a signal does
        yield
        return
    sys.unraisablehook = partial(_is_main_thread_idle, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(handler: Handler) -> dict[signal.Signals, Handler]:
    """Sets the handler of all signals but those that whoever started the process ignores, as nohup does."""
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


def _is_main_thread_idle(before: Callable[[UnraisableHookArgs], object], lost: UnraisableHookArgs) -> None:
    """Raises once more what was raised where nothing can be, such as in a finalizer."""
    if not isinstance(lost.exc_value, Stopped):
        before(lost)
        return
    number = lost.exc_value.number
    signal.signal(signal.SIGALRM, lambda _, frame: _raise_stopped(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS)
