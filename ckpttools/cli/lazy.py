"""A command group that lists its commands without importing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import click

from ckpttools.cli.command import BaseCommand, HelpFormatter
from ckpttools.cli.suggestions import find_near_synonym, find_synonym, similar_commands

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Deferred(NamedTuple):
    """A command that is created on demand, and its one-line help."""

    load: Callable[[], click.Command]
    help: str


def lazy_command(module: str, name: str, help: str) -> Deferred:
    """Return a command of this package that is imported when it runs."""
    return Deferred(lambda: getattr(import_module(f"ckpttools.cli.{module}"), name), help)


_COMMAND_KEY, _DONE_KEY = "ckpttools.command", "ckpttools.done"
# Names of the parameters for the checkpoint that a command writes, or the plan that it runs.
_DESTINATION_PARAMETERS = {"destination", "plan"}


def is_writer(ctx: click.Context) -> bool:
    """Return whether the parsed command of a context writes a checkpoint."""
    command = ctx.meta.get(_COMMAND_KEY)
    return isinstance(command, click.Command) and any(
        param.name in _DESTINATION_PARAMETERS for param in command.params
    )


def mark_written() -> None:
    """Record that the checkpoint of the running command is complete."""
    click.get_current_context().meta[_DONE_KEY] = True


def has_written(ctx: click.Context) -> bool:
    """Return whether the parsed command of a context has written its checkpoint."""
    return _DONE_KEY in ctx.meta


def is_path(word: str) -> bool:
    """Return whether a word that is not a command looks like a path, or exists."""
    from ckpttools.stores.registry import parse

    return not word.startswith("-") and ("/" in word or parse(word).exists())


class LazyGroup(BaseCommand, click.Group):
    """A group that imports its commands on demand, so that `--help` imports none of them.

    Attributes:
        lazy: The built-in commands.
        more: Returns the commands of plug-ins; called for unknown names and to list all commands.
        accepts_path: Whether a path may be passed instead of a command.
    """

    command_class = BaseCommand
    accepts_path = False
    lazy: Mapping[str, Deferred]
    more: Callable[[], Mapping[str, Deferred]]

    def __init__(
        self,
        *args: object,
        lazy: Mapping[str, Deferred] | None = None,
        more: Callable[[], Mapping[str, Deferred]] = dict,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy, self.more = lazy or {}, more

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self.lazy, *self.more()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            entry = self.lazy.get(cmd_name) or self.more().get(cmd_name)
            if entry is not None:
                self.add_command(entry.load(), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click suggests only commands that are imported.
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            instead = self.suggest(ctx, args, self.list_commands(ctx))
            raise click.UsageError(f"No such command {name!r}. {instead}", ctx)
        result = super().resolve_command(ctx, args)
        ctx.meta[_COMMAND_KEY] = result[1]
        return result

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and options, or paths where these commands accept one and no name matches."""
        result = super().shell_complete(ctx, incomplete)
        if result or not self.accepts_path:
            return result
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]

    def resolve_words(self, ctx: click.Context) -> tuple[str, click.Command, list[str]]:
        """Return the name of the command in a parsed context, the command, and its words."""
        # click 8.2 renamed the attribute.
        first = getattr(ctx, "_protected_args", None) or getattr(ctx, "protected_args", [])
        name, command, words = self.resolve_command(ctx, [*first, *ctx.args])
        assert command is not None  # Unknown names raise an error.
        return name or "", command, words

    def suggest(self, ctx: click.Context, args: Sequence[str], known: Sequence[str]) -> str:
        """Suggest the command that is probably meant, here or one level below, or list all commands."""
        name = args[0]
        if synonym := find_synonym(name):
            return f"Did you mean {synonym}?"
        for group in known:
            command = self.get_command(ctx, group)
            if isinstance(command, click.Group) and name in command.list_commands(ctx):
                return f"Did you mean '{group} {name}'?"
        if near := similar_commands(name, known):
            return f"Did you mean {near[0]!r}?"
        if synonym := find_near_synonym(name):
            return f"Did you mean {synonym}?"
        commands = f"Commands: {', '.join(known)}."
        if is_path(name):
            path = f"'ckpt {quote(name)}'"
            if "tree" in known:
                return f"Did you mean '{ctx.command_path} tree {quote(name)}'? {commands}"
            return f"It is a path: {path} identifies it and suggests commands. {commands}"
        return f"No path has this name either. {commands}" if self.accepts_path else commands

    def format_details(self, ctx: click.Context, formatter: HelpFormatter) -> None:
        eager = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        entries = {**self.more(), **self.lazy}
        helps = {**eager, **{name: entry.help for name, entry in entries.items()}}
        with formatter.section("Commands"):
            formatter.write_terms(sorted(helps.items()))
