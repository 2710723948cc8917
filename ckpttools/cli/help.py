"""`ckpt help`: show the help of a command with all its options, or of a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import click

from ckpttools.cli.command import GLOBAL_PANEL, MAX_WIDTH, BaseCommand, HelpFormatter, PanelOption
from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.options import ParamType
from ckpttools.core.errors import EXIT_CODES
from ckpttools.core.options import PANELS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpttools.core.options import Panel


def commands_below(ctx: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and of all commands below it, parents first."""
    yield ctx
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield from commands_below(click.Context(command, info_name=name, parent=ctx))


def shared_options(root: click.Context) -> Mapping[Panel, list[tuple[str, str]]]:
    """Return the flags and help of shared options, by panel."""
    flags: dict[str, tuple[Panel, tuple[str, str]]] = {}
    for ctx in commands_below(root):
        for param in ctx.command.get_params(ctx):
            record = param.get_help_record(ctx)
            if not record or not isinstance(param, PanelOption) or param.panel == GLOBAL_PANEL:
                continue
            if param.is_shared:
                flags.setdefault(param.opts[-1], (param.panel, record))
    panels = {panel: [row for at, row in flags.values() if at == panel] for panel in PANELS}
    panels[GLOBAL_PANEL] = [
        record
        for param in root.command.get_params(root)
        if isinstance(param, PanelOption) and (record := param.get_help_record(root))
    ]
    return {panel: rows for panel, rows in panels.items() if rows}


def _write_options(root: click.Context, formatter: HelpFormatter) -> None:
    for panel, rows in shared_options(root).items():
        with formatter.section(panel):
            formatter.write_terms(rows)


def _write_exit_codes(root: click.Context, formatter: HelpFormatter) -> None:
    with formatter.section("Exit codes"):
        formatter.write_terms(
            (str(code), f"{meaning}{_CODE_DETAILS.get(code, '')}") for code, meaning in EXIT_CODES.items()
        )


_CODE_DETAILS = {
    1: ": diff, verify, doctor, inspect tree --against, inspect stats --nan, maxtext-config --check",
    2: ": an invalid command, option or value, or a path in the command that does not exist",
    3: ": a checkpoint, configuration or rules file that is damaged or does not fit",
    5: ": files, buckets or servers that cannot be read or written",
    70: ", in ckpttools or a plug-in: please report it",
    141: ": the program that reads the output has ended, as in ckpt … | head",
}


def _write_environment(root: click.Context, formatter: HelpFormatter) -> None:
    names = {
        param.envvar
        for ctx in commands_below(root)
        for param in ctx.command.get_params(ctx)
        if isinstance(param, PanelOption) and isinstance(param.envvar, str)
    }
    with formatter.section("Default of the option with the same name; for a switch, 1 or 0"):
        formatter.write_text(", ".join(sorted(names)))
    with formatter.section("Output"):
        formatter.write_terms(_COLOR_VARIABLES.items())
    with formatter.section("Access"):
        formatter.write_terms(_ACCESS_VARIABLES.items())


_COLOR_VARIABLES = {
    "NO_COLOR": "no colors",
    "FORCE_COLOR, CLICOLOR_FORCE": "colors even if the output is not a terminal",
    "COLUMNS": "width of the output, if it is not a terminal",
}
_ACCESS_VARIABLES = {
    "HF_TOKEN, HF_HOME, HF_ENDPOINT": "access to hf://, and the cache for --download",
    "GOOGLE_…, AWS_…, AZURE_…": "credentials for gs://, s3:// and az://, as their own tools read them",
    "SSL_CERT_FILE, REQUESTS_CA_BUNDLE": "certificate authorities of servers",
}


class _Topic(NamedTuple):
    summary: str
    write: Callable[[click.Context, HelpFormatter], None]


TOPICS: Mapping[str, _Topic] = {
    "options": _Topic("Options that many commands share.", _write_options),
    "exit-codes": _Topic("Meaning of the exit codes.", _write_exit_codes),
    "environment": _Topic("Environment variables.", _write_environment),
}


def topic_text(root: click.Context, name: str) -> str:
    """Return the text of a topic."""
    formatter = HelpFormatter(width=root.terminal_width, max_width=root.max_content_width or MAX_WIDTH)
    TOPICS[name].write(root, formatter)
    return formatter.getvalue().strip("\n")


class _HelpCommand(BaseCommand):
    """The help command with its topics."""

    def format_details(self, ctx: click.Context, formatter: HelpFormatter) -> None:
        with formatter.section("Topics"):
            formatter.write_terms((name, topic.summary) for name, topic in TOPICS.items())


class _HelpWord(ParamType):
    """A topic, or a word of a command."""

    name = "word"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        below = _find(ctx.find_root(), ctx.params.get("words") or ())
        names = below.command.list_commands(below) if isinstance(below.command, click.Group) else []
        topics = () if below.parent else TOPICS
        return [CompletionItem(name) for name in (*names, *topics) if name.startswith(incomplete)]


@click.command("help", short_help="Show the help of a command, or of a topic.", cls=_HelpCommand)
@click.argument("words", nargs=-1, metavar="[COMMAND | TOPIC]", type=_HelpWord())
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command with all its options, or of a topic.

    `ckpt COMMAND --help` is shorter: it only lists the options that many commands share.

    \b
    Examples:
      $ ckpt help convert hf-to-maxtext
      $ ckpt help options
      $ ckpt help exit-codes
    """
    root = ctx.find_root()
    if len(words) == 1 and words[0] in TOPICS:
        text = topic_text(root, words[0])
    else:
        found = _find(root, words)
        if isinstance(found.command, BaseCommand):
            text = found.command.help_text(found, is_full=True)
        else:
            text = found.get_help()
    click.echo(text, color=ctx.color)


def _find(root: click.Context, words: tuple[str, ...]) -> click.Context:
    """Return the context of a command.

    Raises:
        click.UsageError: The command does not exist. The message suggests another one.
    """
    found = root
    for number, word in enumerate(words):
        group = found.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"`{found.command_path}` has no command {word!r}.", root)
        command = group.get_command(found, word)
        if command is None:
            known = [*group.list_commands(found), *(() if number else TOPICS)]
            instead = group.suggest(found, [word], known) if isinstance(group, LazyGroup) else ""
            raise click.UsageError(f"No such command {word!r}. {instead}".rstrip(), found)
        found = click.Context(command, info_name=word, parent=found)
    return found


@click.command(short_help="Print a SKILL.md for coding agents.", cls=BaseCommand)
def skill() -> None:
    """Print a SKILL.md that tells coding agents how to use ckpt.

    Agents that support skills read it from their directory of skills. Other agents take it as part of their
    instructions, such as AGENTS.md.

    \b
    Examples:
      $ ckpt skill > ~/.claude/skills/ckpttools/SKILL.md
      $ ckpt skill > AGENTS.md
    """
    click.echo(files("ckpttools.cli").joinpath("SKILL.md").read_text(), nl=False)
