"""Where results go: stdout, as text or as one JSON value."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from textwrap import wrap

import click

from ckpttools.names import printable_text


def print_json(value: object) -> None:
    """One JSON value on stdout; frozen dataclasses become objects of the same fields, and NaN null."""
    import json

    try:
        text = json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        loose = json.dumps(value, default=_plain)
        text = json.dumps(json.loads(loose, parse_constant=lambda name: None))
    click.echo(text)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not `asdict`, which copies deeply: ten thousand arrays take it a third of a second.
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


def show(lines: Iterable[str]) -> None:
    """Lines on stdout; click takes the colours out where that is no terminal.

    Names of files and arrays may hold anything: nothing of it steers the terminal.
    """
    text = "\n".join(map(printable_text, lines))
    click.echo(text, color=False if "NO_COLOR" in os.environ else None)


def say(*texts: str) -> None:
    """A message on stderr, as safe as lines of `show`; each text begins a line."""
    click.echo("\n".join(map(printable_text, texts)), err=True)


def width() -> int | None:
    """Columns of the terminal, or those that the user sets; None for a pipe, which has no width."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def wrapped(text: str, room: int | None) -> list[str]:
    """The text in lines that fit into so many columns, broken between words only."""
    return [text] if room is None else wrap(text, room, break_long_words=False, break_on_hyphens=False)
