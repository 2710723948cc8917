"""Turn the exception that ends a command into a message on stderr and an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from ckpttools.cli.output import click_error, error_width, labeled_lines, print_error, style_label, with_flags
from ckpttools.cli.signals import Stopped
from ckpttools.core.errors import (
    CheckpointError,
    MemoryBudgetError,
    NoSpaceError,
    StorageError,
)
from ckpttools.core.text import printable_text

_DEFECT, _PIPE_CLOSED = 70, 141
# Texts of ImportErrors that the system's loader raises if there is no memory for a library.
_NO_SPACE_ERRORS = ("cannot allocate memory", "failed to map segment", "can't start new thread")


def exit_code_of(end: BaseException, *, traceback: bool) -> int:
    """Print why a command ended on stderr, and return the exit code of the process.

    Args:
        end: Exception that the command raised.
        traceback: Whether to print the traceback as well.
    """
    if isinstance(end, click.Abort):  # click raises Abort at the end of a file.
        end = end.__cause__ or end
    with suppress(OSError):  # stderr may be closed.
        if isinstance(end, click.NoSuchOption):
            from ckpttools.cli.suggestions import explain_unknown_option

            end = click.UsageError(explain_unknown_option(end), end.ctx)
        if isinstance(end, click.ClickException):
            click_error(end)
        elif isinstance(end, Stopped):
            print_error(str(end))
        else:
            print_error(*_describe_error(end, traceback))
    if isinstance(end, (click.ClickException, Stopped)):
        return end.exit_code
    error = _translate_click(end)
    return error.exit_code if error else _DEFECT


@contextmanager
def translate_click_errors() -> Iterator[None]:
    """Replace errors that click would end with exit code 1, which means differences, by their causes."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT) from None
    except BrokenPipeError:
        raise click.exceptions.Exit(_PIPE_CLOSED) from None


def reopen_closed_streams() -> None:
    """Open a closed stdin, stdout or stderr on the null device, as cron and daemons leave them closed.

    Otherwise the next opened file would get the number, and printed text would go to that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def retry_partial_writes() -> None:
    """Buffer stdout even with PYTHONUNBUFFERED.

    Without a buffer, the rest of a long text is lost without an error when its reader closes the pipe.
    """
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        buffer = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(buffer, sys.stdout.encoding, sys.stdout.errors)


def _describe_error(end: BaseException, traceback: bool) -> list[str]:
    from traceback import format_tb

    way = [item.rstrip("\n") for item in format_tb(end.__traceback__)] if traceback else []
    lines = _error_lines(_translate_click(end) or _describe_internal_error(end), error_width())
    return [*way, *(style_label(line) for line in lines)]


def _error_lines(error: CheckpointError, room: int | None) -> list[str]:
    """Format an error in lines of the given width, without breaking text to copy."""
    first, *listed = printable_text(with_flags(error.raw.message)).split("\n")
    lines = [*labeled_lines("Error:", first, 7, room, whole_words=True), *listed]
    for label, text in error.raw.details():
        sentence, *whole = printable_text(with_flags(text)).split("\n")
        is_prose = label != "at" and not _COMMAND_PATTERN.search(sentence)
        lines += (
            labeled_lines(f"  {label}", sentence, 11, room if is_prose else None, whole_words=True) + whole
        )
    return lines


# Commands in a sentence must stay copyable even without backticks.
_COMMAND_PATTERN = re.compile(r"(?<!`)\b(ckpt [a-z]+ |hf download |mkdir |cp -|rm -|mv )")


def _translate_click(end: BaseException) -> CheckpointError | None:
    """Translate an expected exception to a `CheckpointError`; return None for other exceptions."""
    if isinstance(end, CheckpointError):
        return end
    if _is_out_of_memory(end):
        return MemoryBudgetError(
            "the system has no more memory or threads",
            got=str(end) or None,
            hint="free some, raise the process's limits (ulimit -v, ulimit -u), or try a smaller --memory "
            "and --jobs 1",
        )
    if isinstance(end, RecursionError):
        return MemoryBudgetError(
            "something in the input is nested too deeply", hint="--traceback shows where it was read"
        )
    if isinstance(end, OSError):
        return _describe_os_error(end)
    if isinstance(end, ModuleNotFoundError) and not (end.name or "").startswith("ckpttools"):
        from ckpttools.core.extras import missing_package

        return missing_package(end)
    return None


def _is_out_of_memory(end: BaseException) -> bool:
    if isinstance(end, OSError):
        return end.errno == errno.ENOMEM
    text = str(end).lower()
    return isinstance(end, MemoryError) or (
        isinstance(end, (ImportError, RuntimeError)) and any(item in text for item in _NO_SPACE_ERRORS)
    )


def _describe_os_error(error: OSError) -> CheckpointError:
    """Describe a system error outside readers and writers, such as one on stdout."""
    text = f"{error.strerror} (errno {error.errno})" if error.strerror else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if error.filename is None:
            return NoSpaceError(
                "the disk of the output is full",
                location="stdout",
                got=text,
                hint="free some space there; a checkpoint is complete if it has its name",
            )
        return NoSpaceError("the disk is full", location=error.filename, got=text, hint="free some space")
    hint = "check who owns it and its mode bits" if isinstance(error, PermissionError) else None
    return StorageError("the system reports an error", location=error.filename, got=text, hint=hint)


def _describe_internal_error(end: BaseException) -> CheckpointError:
    """Describe an exception that no command should raise: a bug here or in a plug-in."""
    from traceback import extract_tb

    frames = extract_tb(end.__traceback__)
    return CheckpointError(
        "internal error in ckpttools or a plug-in",
        location=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None,
        got=f"{type(end).__name__}: {end}",
        hint="please report it with the command and what `ckpt --traceback …` prints",
    )


def finish_output() -> None:
    """Discard unwritable output, so that the interpreter does not fail to flush it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
