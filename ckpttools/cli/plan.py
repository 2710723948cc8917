"""`ckpt plan`: save the plan of a command in a file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import flags, json_option
from ckpttools.cli.output import print_json, print_lines, print_stderr
from ckpttools.cli.write import WriteCommand
from ckpttools.core.errors import UsageError
from ckpttools.core.options import Option
from ckpttools.core.text import format_disk, plural
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


def prepare_command(words: Sequence[str]) -> Prepared:
    """Plan a command line without running it.

    Args:
        words: Words after `ckpt`.

    Raises:
        UsageError: The command does not write a checkpoint, or not in tasks that can be distributed.
        CheckpointError: The command cannot be planned.
    """
    from ckpttools.cli.lazy import LazyGroup
    from ckpttools.cli.main import main

    with ExitStack() as contexts:
        context = contexts.enter_context(main.make_context("ckpt", list(words)))
        names: list[str] = []
        while isinstance(group := context.command, LazyGroup):
            name, command, rest = group.resolve_words(context)
            names.append(name)
            if not isinstance(command, click.Group | WriteCommand):
                raise _not_shareable_error(names)
            context = contexts.enter_context(command.make_context(name, rest, parent=context))
        assert isinstance(context.command, WriteCommand)
        prepared = context.command.prepare(context)
    if prepared is None:
        raise _not_shareable_error(names)
    return prepared


def _not_shareable_error(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"`ckpt {' '.join(names)}` cannot be shared among processes",
        expected="a command that writes a checkpoint, such as convert hf-to-maxtext, cast or stack",
        hint="run it by itself",
    )


@click.command(
    "plan",
    short_help="Save a conversion plan to run on many workers.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="-o PLAN",
    no_args_is_help=True,
    cls=BaseCommand,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@flags(Option("output", parse, None, "File for the plan.", "PLAN", is_required=True, short="-o"))
@json_option
def plan(words: tuple[str, ...], output: Location, as_json: bool) -> None:
    """Save the plan of a conversion, so that many processes can each run a part.

    COMMAND is the complete command line of any command that writes a checkpoint, without `ckpt`. Only PLAN is
    written: it records the sources as they are now and every task. Run the parts with `ckpt run PLAN --part
    0/8` and so on, in any order, on any machines that can access source and destination; then publish the
    checkpoint with `ckpt run PLAN --publish`.

    \b
    Examples:
      $ ckpt plan convert hf-to-maxtext ~/Llama-3.1-405B /shared/llama -o llama.plan
      $ ckpt plan cast ~/DeepSeek-V3 /shared/bf16 --dtype bfloat16 -o cast.plan
    """
    from ckpttools.api.plans import write_plan

    written = write_plan(prepare_command(words), output)
    if as_json:
        print_json(written)
        return
    if not written.has_tasks:
        print_stderr("note     some arrays cannot be written to the plan: each part plans again")
    limit = f"at most {plural(written.groups, 'part')}"
    moved = f"{format_disk(written.bytes_in)} to read, {format_disk(written.bytes_out)} to write"
    print_lines(
        [f"{output}: {plural(written.tasks, 'task')}, {moved}, {limit}; next: ckpt run {output} --part 0/N"],
        is_summary=True,
    )
