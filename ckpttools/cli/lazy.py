"""A command group that knows what its commands are for, but imports one only when it is run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from ckpttools.core.errors import near_names


class Lazy(NamedTuple):
    """A command that is not imported yet: the module and the name in it, and one line of help."""

    module: str
    name: str
    help: str


class LazyGroup(click.Group):
    """A group whose `lazy` commands are imported on demand, so that `--help` imports none of them."""

    lazy: dict[str, Lazy]

    def __init__(self, *args: object, lazy: dict[str, Lazy] | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self.lazy:
            entry = self.lazy[cmd_name]
            self.add_command(getattr(import_module(entry.module), entry.name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click looks for near names among imported commands only.
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}. {self._instead(ctx, name, known)}", ctx)
        return super().resolve_command(ctx, args)

    def _instead(self, ctx: click.Context, name: str, known: Sequence[str]) -> str:
        """What may have been meant: a name like it, here or one level below, or one of all."""
        if near := near_names(name, known):
            return f"Did you mean {near[0]!r}?"
        for group in known:
            command = self.get_command(ctx, group)
            if isinstance(command, click.Group) and name in command.list_commands(ctx):
                return f"Did you mean '{group} {name}'?"
        return f"There are: {', '.join(known)}."

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        eager = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        helps = {**eager, **{name: entry.help for name, entry in self.lazy.items()}}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(helps.items()))
