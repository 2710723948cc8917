"""The command line as the user typed it, for messages about how to resume."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

COMPLETION_VARIABLE = "_CKPT_COMPLETE"
"""The environment variable with which shells request completions; click derives it from `ckpt`."""

COMMAND_LINE_KEY = "ckpttools.command_line"
"""Key of the typed command line in `Context.meta`."""
_NEUTRAL = frozenset(("--resume", "--progress", "--no-progress"))


def remember_command(context: click.Context, words: Sequence[str]) -> None:
    """Record the words after `ckpt` in the context."""
    context.meta[COMMAND_LINE_KEY] = shlex.join(["ckpt", *words])


def resumable_command() -> str:
    """Return the command line without flags that do not change what the command writes."""
    return shlex.join(word for word in shlex.split(command_line()) if word not in _NEUTRAL)


def command_with(path: str, other: str) -> str:
    """Return the typed command with one path replaced by another; "" if it does not contain the path."""
    words = shlex.split(command_line())
    replaced = [other if word.rstrip("/") == path.rstrip("/") else word for word in words]
    return "" if replaced == words else shlex.join(replaced)


def command_line() -> str:
    """Return the typed command, ready to paste into a shell; "" outside of a command."""
    context = click.get_current_context(silent=True)
    return "" if context is None else str(context.meta.get(COMMAND_LINE_KEY, ""))
