"""A command line that is only planned: what writes hands over what it has decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import click

from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

_TAKEN: ContextVar[list[Prepared] | None] = ContextVar("planned commands", default=None)


TOGETHER = "distributed"
"""The option of all commands whose work can be dealt out."""


def is_only_planned() -> bool:
    """Whether somebody has only asked for the plan."""
    return _TAKEN.get() is not None


def is_taken_over(prepared: Prepared, *, dry_run: bool, resume: bool) -> bool:
    """Whether somebody else takes over from here, who has only asked for the plan."""
    result = _TAKEN.get()
    if result is None:
        return False
    if dry_run or resume:
        flag = "--dry-run" if dry_run else "--resume"
        raise UsageError(f"{flag} has no meaning for a plan in a file", hint="leave it out")
    result.append(prepared)
    return True


def prepared_by(words: Sequence[str]) -> Prepared:
    """What a command line decides.

    Args:
        words: after `ckpt`.

    Raises:
        UsageError: it writes no checkpoint, or not by tasks that can be dealt out.
        CheckpointError: it cannot be planned.
    """
    from ckpttools.cli.lazy import LazyGroup
    from ckpttools.cli.main import main

    with _taking() as result, main.make_context("ckpt", list(words)) as context:
        # Any other command would be carried out.
        _check_writes(main, context, words)
        LazyGroup.invoke(main, context)
    return result[0]


def _command(
    group: click.Group, context: click.Context, words: Sequence[str]
) -> tuple[click.Command | None, list[str]]:
    """The command of a command line, None where there is none; and the names that lead to it."""
    command: click.Command | None = group
    names = [word for word in words if not word.startswith("-")]
    depth = 0
    while isinstance(command, click.Group) and depth < len(names):
        command = command.get_command(context, names[depth])
        depth += 1
    return command, names[:depth]


def _check_writes(group: click.Group, context: click.Context, words: Sequence[str]) -> None:
    """Raises UsageError for a command that does not hand over what it has decided."""
    command, names = _command(group, context, words)
    # What is no command, click refuses in its own words.
    if isinstance(command, click.Group) or command is None:
        return
    if not any(param.name == TOGETHER for param in command.params):
        raise UsageError(
            f"`ckpt {' '.join(names)}` cannot be shared among processes",
            expected="a command that writes a checkpoint, such as convert hf-to-maxtext, cast or stack",
            hint="run it by itself",
        )


@contextmanager
def _taking() -> Iterator[list[Prepared]]:
    result: list[Prepared] = []
    token = _TAKEN.set(result)
    try:
        yield result
    finally:
        _TAKEN.reset(token)
