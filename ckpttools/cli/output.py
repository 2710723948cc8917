"""Output of results: text or one JSON value on stdout."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from ckpttools.core.details import LOGGER
from ckpttools.core.text import TERM_START, mark_style, printable_text, unmark_styles

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Version of the JSON output, incremented for changes that programs must adapt to.
SCHEMA = 1

# Global options of the running command by name, without defaults; "completion" for requests of a shell.
_chosen: dict[str, object] = {}


def choose(name: str, value: object) -> None:
    """Set a global option for all output of the process."""
    _chosen[name] = value


def chosen(name: str) -> object:
    """Return the value of a global option; None unless it was given."""
    return _chosen.get(name)


def reset_choices() -> None:
    """Forget the global options of an earlier command in this process."""
    if _chosen.pop("verbose", False):
        import logging

        logging.getLogger(LOGGER).handlers.clear()
    _chosen.clear()


def show_details() -> None:
    """Print the library's log on stderr, with the seconds since this call."""
    import logging
    import time

    start = time.monotonic()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_error(styled(f"{time.monotonic() - start:8.3f} s  {record.getMessage()}", dim=True))

    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [Handler()]
    logger.setLevel(logging.DEBUG)


def has_color() -> bool | None:
    """Return whether output has colors; None if this depends on the stream."""
    if _chosen.get("color"):
        return _chosen["color"] == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return False if os.environ.get("TERM") == "dumb" else None


def print_json(value: object, *, event: str = "result") -> None:
    """Print one JSON value on stdout. An object begins with the version of its schema.

    Dataclasses become objects, and NaN becomes null. With `--jsonl`, every object begins with its `event`.
    """
    import json

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = report_fields(value)
    if isinstance(value, Mapping):
        value = {"schema": SCHEMA, **value}
    if chosen("jsonl"):
        value = {"event": event, **(value if isinstance(value, Mapping) else {"items": value})}
    try:
        text = json.dumps(value, default=_to_plain, allow_nan=False)
    except ValueError:
        loose = json.dumps(value, default=_to_plain)
        text = json.dumps(json.loads(loose, parse_constant=lambda name: None))
    if json.dumps(TERM_START)[1:-1] in text:
        from ckpttools.cli.message_terms import FlagTerms
        from ckpttools.core.message_terms import render_all

        text = json.dumps(render_all(json.loads(text), FlagTerms()))
    click.echo(text)


def with_flags(text: str) -> str:
    """Return a text whose terms are written as flags and commands; all output functions do this."""
    if TERM_START not in text:
        return text
    from ckpttools.cli.message_terms import FlagTerms
    from ckpttools.core.message_terms import render

    return render(text, FlagTerms())


def print_report(report: object, lines: Iterable[str], *, as_json: bool, is_summary: bool = False) -> None:
    """Print a report as JSON or as text lines; see `print_lines` for `is_summary`."""
    if as_json:
        print_json(report)
    else:
        print_lines(lines, is_summary=is_summary)


def exit_with_differences() -> None:
    """End the command with exit code 1: a comparison or check found differences."""
    click.get_current_context().exit(1)


def report_fields(value: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    # `asdict` copies deeply, which takes 0.3 s for 10,000 arrays.
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _to_plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return report_fields(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def styled(text: str, **style: Any) -> str:
    """Style text for `print_lines` and `print_stderr`; takes the arguments of `click.style`.

    All styles of the program are created here. Other escape sequences are data, and are escaped.
    """
    codes = re.findall(r"\x1b\[([0-9;]*)m", click.style("", **style, reset=False))
    return f"{''.join(map(mark_style, codes))}{text}{mark_style('0')}"


def print_lines(lines: Iterable[str], *, is_summary: bool = False) -> None:
    """Print lines on stdout. click removes colors if stdout is not a terminal.

    All text for users goes through this function, `print_stderr` or `print_error`, so that names of files and
    arrays cannot control the terminal.

    Args:
        lines: Lines of text.
        is_summary: Whether the lines only summarize the run or repeat the exit code; --quiet omits such
            lines.
    """
    if is_summary and chosen("quiet"):
        return
    text = unmark_styles("\n".join(printable_text(with_flags(line)) for line in lines))
    click.echo(text, color=has_color())


def print_stderr(*texts: str) -> None:
    """Print remarks on stderr, escaped as by `print_lines`; each text starts a line. --quiet omits them."""
    if not chosen("quiet"):
        print_error(*texts)


def print_error(*texts: str) -> None:
    """Print texts on stderr even with --quiet."""
    text = unmark_styles("\n".join(printable_text(with_flags(text)) for text in texts))
    click.echo(text, err=True, color=has_color())


def click_error(error: click.ClickException) -> None:
    """Print an error of click, which quotes user input, escaped as by `print_error`."""
    output = io.StringIO()
    error.show(output)
    print_error(*map(style_label, output.getvalue().rstrip("\n").split("\n")))


def style_label(line: str) -> str:
    """Color the label at the start of an error line."""
    found = _LABELS.match(line)
    if found is None:
        return line
    return styled(found[0], fg="red" if line.startswith("Error") else None, bold=True) + line[found.end() :]


_LABELS = re.compile("Error:|Usage:|  (?:at|got|expected|hint) ")


def width() -> int | None:
    """Return the columns of the terminal or of COLUMNS; None for a pipe, which has no width."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


# Width of prose in a pipe or a file, where table rows and names are not wrapped.
_PROSE_WIDTH = 80


def prose_width() -> int:
    """Return the width of sentences: that of the terminal, or 80 without a terminal."""
    return width() or _PROSE_WIDTH


def error_width() -> int | None:
    """Return the width of sentences on stderr; None without a terminal, so that lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def wrap(text: str, room: int | None, *, whole_words: bool = False) -> list[str]:
    """Wrap a text between words, and paths after `/` or `.`.

    Longer components of a path are not broken, nor are commands in backticks; with `whole_words`, no path is
    broken.
    """
    text = with_flags(text)
    if room is None or len(text) <= room:
        return [text]
    lines = [""]
    for word in _WORD_PATTERN.findall(text):
        if len(lines[-1]) + 1 + len(word) <= room and lines[-1]:
            lines[-1] += f" {word}"
            continue
        is_whole = whole_words or len(word) <= room or "`" in word
        parts = [word] if is_whole else _AFTER_KEY.split(word)
        lines.append("")
        for part in parts:
            if lines[-1] and len(lines[-1]) + len(part) > room:
                lines.append("")
            lines[-1] += part
    return [line for line in lines if line] or [""]


_WORD_PATTERN = re.compile(r"\S*`[^`]+`\S*|\S+")
_AFTER_KEY = re.compile(r"(?<=[/.])(?=[^/.])")


def format_labeled(
    label: str,
    text: str,
    column: int,
    room: int | None,
    *,
    command: str | None = None,
    whole_words: bool = False,
    **style: Any,
) -> list[str]:
    """Format a label and a text that wraps at a column. A command gets its own lines.

    Args:
        label: Label, which is padded to `column`.
        text: Sentences of the text.
        column: Column where the text begins.
        room: Columns of a line; None for no limit.
        command: Part of the text that users copy; it is never broken.
        whole_words: Whether paths are not broken.
        style: Style of the label; see `click.style`.
    """
    width = None if room is None else max(room - column, 20)
    text, command = with_flags(text), command and with_flags(command)
    before, result, after = text.partition(command) if command else (text, "", "")
    if not result or width is None or len(text) <= width:
        lines = [text] if result else wrap(text, width, whole_words=whole_words)
    else:
        if before.endswith("`") and after.startswith("`"):
            before, after = before[:-1], after[1:]
        lines = [*_wrap_prose(before, width), result, *_wrap_prose(after, width)]
    head = f"{label:<{column}}"
    heads = (styled(head, **style) if style else head, *repeat(" " * column, len(lines) - 1))
    return [head + line for head, line in zip(heads, lines, strict=True)]


def _wrap_prose(text: str, room: int) -> list[str]:
    """Wrap the text before or after a command."""
    stripped = text.strip().lstrip(";,").strip()
    return wrap(stripped, room) if stripped else []
