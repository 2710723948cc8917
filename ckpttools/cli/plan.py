"""`ckpt plan`: capture what a command would do in a plan file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import ANY_PATH, json_option
from ckpttools.cli.output import print_json, print_lines, print_stderr
from ckpttools.cli.units import format_disk
from ckpttools.core.errors import UsageError
from ckpttools.core.text import plural
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


_CAPTURED: ContextVar[list[Prepared] | None] = ContextVar("planned commands", default=None)


DISTRIBUTED = "distributed"
"""The option of all commands whose work can be distributed."""


def is_capturing_plan() -> bool:
    """Return whether only the plan of this command is wanted."""
    return _CAPTURED.get() is not None


def captures_plan(prepared: Prepared, *, dry_run: bool, resume: bool) -> bool:
    """Hand the prepared work to a pending `prepare_command`, and return whether there is one."""
    result = _CAPTURED.get()
    if result is None:
        return False
    if dry_run or resume:
        flag = "--dry-run" if dry_run else "--resume"
        raise UsageError(f"{flag} has no meaning for a plan in a file", hint="leave it out")
    result.append(prepared)
    return True


def prepare_command(words: Sequence[str]) -> Prepared:
    """Plan a command line without running it.

    Args:
        words: after `ckpt`.

    Raises:
        UsageError: it writes no checkpoint, or not by tasks that can be dealt out.
        CheckpointError: it cannot be planned.
    """
    from ckpttools.cli.lazy import LazyGroup
    from ckpttools.cli.main import main

    with _capture() as result, main.make_context("ckpt", list(words)) as context:
        # Any other command would run instead of being captured.
        _require_writer(main, context, words)
        LazyGroup.invoke(main, context)
    return result[0]


def _find_command(
    group: click.Group, context: click.Context, words: Sequence[str]
) -> tuple[click.Command | None, list[str]]:
    """Find the command of a command line (None if there is none) and the group names before it."""
    command: click.Command | None = group
    names = [word for word in words if not word.startswith("-")]
    depth = 0
    while isinstance(command, click.Group) and depth < len(names):
        command = command.get_command(context, names[depth])
        depth += 1
    return command, names[:depth]


def _require_writer(group: click.Group, context: click.Context, words: Sequence[str]) -> None:
    """Raise UsageError for a command that does not write by tasks."""
    command, names = _find_command(group, context, words)
    # click reports unknown commands itself.
    if isinstance(command, click.Group) or command is None:
        return
    if not any(param.name == DISTRIBUTED for param in command.params):
        raise UsageError(
            f"`ckpt {' '.join(names)}` cannot be shared among processes",
            expected="a command that writes a checkpoint, such as convert hf-to-maxtext, cast or stack",
            hint="run it by itself",
        )


@contextmanager
def _capture() -> Iterator[list[Prepared]]:
    result: list[Prepared] = []
    token = _CAPTURED.set(result)
    try:
        yield result
    finally:
        _CAPTURED.reset(token)


@click.command(
    "plan",
    short_help="Save a conversion plan to run on many workers.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="-o PLAN",
    no_args_is_help=True,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.option("-o", "--output", type=ANY_PATH, metavar="PLAN", required=True, help="File for the plan.")
@json_option
def plan(words: tuple[str, ...], output: Location, as_json: bool) -> None:
    """Save the plan of a conversion, so that many processes can each run a part.

    COMMAND is the complete command line of any command that writes a checkpoint, without `ckpt`. Only PLAN is
    written: it records the sources as they are now and every task. Run the parts with `ckpt run PLAN --part
    0/8` and so on, in any order, on any machines that can access source and destination; then publish the
    checkpoint with `ckpt run PLAN --publish`.

    \b
    Example:
      ckpt plan convert hf-to-maxtext ~/Llama-3.1-405B /shared/llama -o llama.plan
    """
    from ckpttools.api.plans import write_plan

    written = write_plan(prepare_command(words), output)
    if as_json:
        print_json(written)
        return
    if not written.has_tasks:
        print_stderr(
            "note     arrays in it are known only to the process that opens them: each part plans again"
        )
    limit = f"at most {plural(written.groups, 'part')}"
    moved = f"{format_disk(written.bytes_in)} to read, {format_disk(written.bytes_out)} to write"
    print_lines(
        [f"{output}: {plural(written.tasks, 'task')}, {moved}, {limit}; next: ckpt run {output} --part 0/N"]
    )
