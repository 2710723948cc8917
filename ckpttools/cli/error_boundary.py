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

from ckpttools.cli.output import (
    click_error,
    error_width,
    format_labeled,
    print_error,
    print_json,
    style_label,
    with_flags,
)
from ckpttools.cli.signals import Stopped
from ckpttools.core.dataclass import dataclass
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


def exit_code_of(end: BaseException, *, traceback: bool, as_json: bool = False) -> int:
    """Print why a command ended on stderr, and return the exit code of the process.

    Args:
        end: Exception that the command raised.
        traceback: Whether to print the traceback as well.
        as_json: Whether to print the error as one JSON object on stdout as well.
    """
    if isinstance(end, click.Abort):  # click raises Abort at the end of a file.
        end = end.__cause__ or end
    if isinstance(end, click.UsageError):
        from ckpttools.cli.suggestions import explain_usage_error

        end = explain_usage_error(end)
    is_exit = isinstance(end, click.ClickException | Stopped)
    error = None if is_exit else _translate_click(end) or _describe_internal_error(end)
    with suppress(OSError):  # stderr may be closed.
        if isinstance(end, click.ClickException):
            click_error(end)
        elif isinstance(end, Stopped):
            print_error(str(end))
        elif error is not None:
            lines = map(style_label, _error_lines(error, error_width()))
            print_error(*_traceback_lines(end, traceback), *lines)
    if isinstance(end, click.ClickException | Stopped):
        code = end.exit_code
    else:
        code = error.exit_code if error and _translate_click(end) else _DEFECT
    if as_json and code != _PIPE_CLOSED:
        with suppress(OSError):  # stdout may be closed, or full.
            print_json(JsonError(_error_report(end, error, code)), event="error")
    return code


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error, as `--json` prints it.

    Attributes:
        what: What failed.
        at: Path or other location; None if there is none.
        expected: What was expected there; None if that is not known.
        got: What was found instead; None if that is not known.
        hint: What to do next, such as a command; None if there is no advice.
        exit_code: Exit code of the process.
    """

    what: str
    at: str | None
    expected: str | None
    got: str | None
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class JsonError:
    """The object on stdout if a command fails with `--json`."""

    error: ErrorReport


def _error_report(end: BaseException, error: CheckpointError | None, code: int) -> ErrorReport:
    if error is not None:
        raw = error.raw
        return ErrorReport(raw.message, raw.location, raw.expected, raw.got, raw.hint, code)
    if isinstance(end, click.ClickException):
        context = getattr(end, "ctx", None)
        hint = f"`{context.command_path} --help` describes the arguments" if context is not None else None
        return ErrorReport(end.format_message(), None, None, None, hint, code)
    what, _, hint = str(end).partition(" ")
    return ErrorReport(what, None, None, None, hint or None, code)


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


def _traceback_lines(end: BaseException, is_shown: bool) -> list[str]:
    from traceback import format_tb

    return [item.rstrip("\n") for item in format_tb(end.__traceback__)] if is_shown else []


def _error_lines(error: CheckpointError, room: int | None) -> list[str]:
    """Format an error in lines of the given width, without breaking text to copy."""
    first, *items = printable_text(with_flags(error.raw.message)).split("\n")
    lines = [*format_labeled("Error:", first, 7, room, whole_words=True), *items]
    for label, text in error.raw.details():
        sentence, *details = printable_text(with_flags(text)).split("\n")
        is_prose = label != "at" and not _COMMAND_PATTERN.search(sentence)
        lines += (
            format_labeled(f"  {label}", sentence, 11, room if is_prose else None, whole_words=True) + details
        )
    return lines


def error_lines(end: BaseException, room: int | None) -> list[str]:
    """Format the exception that ended a task in lines of the given width."""
    error = _translate_click(end) or _describe_internal_error(end)
    return [style_label(line) for line in _error_lines(error, room)]


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
