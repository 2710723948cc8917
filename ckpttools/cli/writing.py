"""Arguments, options and body of commands that open a checkpoint, change its tree and write it.

@click.command("select", short_help="…", cls=WriteCommand)
@source_and_destination
@flags(*SELECT)
@target_options
@common_options
@writes
def select() -> WriteFunction:
    from ckpttools.api.transforms import select

    return select
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.convert import FORMAT, TARGET
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import (
    ANY_PATH,
    MODEL,
    CommandBody,
    Decorator,
    combine_options,
    flags,
    given_flags,
    output_options,
    resource_options,
)
from ckpttools.core.errors import UsageError

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=ANY_PATH),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST. Must be the first decorator of a command."""
model_source_and_destination = combine_options(
    click.argument("source", metavar="SRC", type=MODEL),
    click.argument("destination", metavar="DST", type=ANY_PATH),
)
"""Add SRC and DST, where SRC may be a model on the Hub."""
storage_options = given_flags(*TARGET[1:])
"""Add the options for storing Orbax output."""
target_options = combine_options(flags(FORMAT), storage_options)
"""Add the format of DST, and the options for storing Orbax output."""
common_options = combine_options(flags(*OPENING), resource_options, output_options)
"""Add reading, resource and output options."""


class WriteFunction(Protocol):
    """A function of `ckpttools` that writes a checkpoint."""

    @property
    def plan(self) -> Callable[..., Prepared]:
        """The function that only plans the work."""


def writes(find: Callable[[], WriteFunction]) -> CommandBody:
    """Create the body of a command that passes its options to a function that writes.

    Must be the last decorator.

    Args:
        find: Imports and returns the function.
    """

    @functools.wraps(find)
    def command(**options: Any) -> Prepared:
        return find().plan(**options)

    return command


def make_command(
    name: str,
    help: str,
    body: Callable[..., Any],
    *decorators: Decorator,
    cls: type[click.Command] = BaseCommand,
) -> click.Command:
    """Create a command whose help has examples after "Examples:", one line each.

    Raises:
        UsageError: Two options have the same flag.
    """
    text = help if "\nExamples:" in help else f"{help.rstrip()}\n\nExamples:\n  $ ckpt {name} SRC DST\n"
    command = combine_options(*decorators)(body)
    built = click.command(name, cls, help=text.replace("\nExamples:", "\n\b\nExamples:"))(command)
    flags = Counter(opt for param in built.params for opt in (*param.opts, *param.secondary_opts))
    if twice := sorted(item for item, count in flags.items() if count > 1):
        raise UsageError(
            f"the plug-in {name} declares options that all commands have",
            got=", ".join(twice),
            expected="other names",
        )
    return built
