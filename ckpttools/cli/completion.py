"""`ckpt completion`: print or install a shell completion script, and complete values."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from ckpttools.cli.command import BaseCommand
from ckpttools.cli.command_line import COMPLETION_VARIABLE
from ckpttools.cli.output import print_lines
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.core.options import Option


class _Planned(ShellComplete):
    """Completion of `ckpt plan COMMAND …` as of that command."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        words = _planned_words(args)
        if words is None:
            return super().get_completions(args, incomplete)
        items = super().get_completions(words, incomplete)
        known = {item.value for item in items}
        own = super().get_completions([*args], incomplete) if incomplete.startswith("-") else []
        return items + [item for item in own if item.value not in known]


def _planned_words(args: list[str]) -> list[str] | None:
    """Return the words of the command that `plan` plans; None for other commands and the value of `-o`."""
    if args[:1] != ["plan"] or args[-1] in _PLAN_OUTPUT:
        return None
    return [word for before, word in pairwise(args) if not {before, word} & _PLAN_OUTPUT]


_PLAN_OUTPUT = {"-o", "--output"}


class _Bash(_Planned, BashComplete):
    """Completion in bash, which splits `--dtype=bf` into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        return [word for word in args if word != "="], incomplete


class _WholeWords(_Planned):
    """Completion in shells that compare completions with the complete word `--dtype=bf`."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if option.startswith("--") and equals:
            return [CompletionItem(f"{option}={item.value}", item.type, item.help) for item in items]
        return items


class _Zsh(_WholeWords, ZshComplete):
    """Completion in zsh."""


class _Fish(_WholeWords, FishComplete):
    """Completion in fish."""


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def register_shells() -> None:
    """Register these completion classes with click."""
    for name, shell in _SHELLS.items():
        add_completion_class(shell, name)


# bash and zsh read completions from a startup file, and fish reads those in a directory.
_STARTUP_LINES = {
    "bash": "[ -f {script} ] && . {script}  # completion of ckpt",
    "zsh": "(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}; "
    "[ -f {script} ] && . {script}  # completion of ckpt",
}


@click.command(short_help="Print or install a shell completion script.", cls=BaseCommand)
@click.argument("shell", type=click.Choice(tuple(_SHELLS)), required=False)
@click.option(
    "--install",
    is_flag=True,
    help="Write the script to a file that SHELL reads when it starts; for bash and zsh, also add a line to "
    "~/.bashrc or ~/.zshrc.",
)
@click.pass_context
def completion(ctx: click.Context, shell: str | None, install: bool) -> None:
    """Print or install a shell completion script.

    It completes commands, options, choices, paths, and the arrays and steps of local checkpoints. With
    --install, the default of SHELL is the shell in the environment variable SHELL.

    \b
    Examples:
      $ ckpt completion --install
      $ ckpt completion fish > ~/.config/fish/completions/ckpt.fish
      $ eval "$(ckpt completion bash)"
    """
    if shell is None:
        shell = Path(os.environ.get("SHELL", "")).name if install else ""
        if shell not in _SHELLS:
            raise click.UsageError(f"Missing argument SHELL: {', '.join(_SHELLS)}.", ctx)
    complete = _SHELLS[shell](ctx.find_root().command, {}, "ckpt", COMPLETION_VARIABLE)
    # `source()` is not used because it starts a bash process to check the version.
    script = complete.source_template % complete.source_vars()
    if install:
        print_lines([*_install(shell, script), "Open a new shell to use it."], is_summary=True)
    else:
        click.echo(script)


def _install(shell: str, script: str) -> Iterable[str]:
    """Write a script and the line that loads it. Yields descriptions of the changes."""
    home = Path.home()
    if shell == "fish":
        path = _base_directory("XDG_CONFIG_HOME", home / ".config") / "fish" / "completions" / "ckpt.fish"
    else:
        data = _base_directory("XDG_DATA_HOME", home / ".local" / "share")
        path = data / "ckpttools" / f"completion.{shell}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    yield f"wrote {path}"
    if shell not in _STARTUP_LINES:
        return
    line = _STARTUP_LINES[shell].format(script=shlex.quote(str(path)))
    startup = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    text = startup.read_text(errors="surrogateescape") if startup.exists() else ""
    if line in text.splitlines():
        yield f"{startup} loads it already"
        return
    with startup.open("a") as file:
        file.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
    yield f"added a line to {startup}"


def _base_directory(variable: str, default: Path) -> Path:
    """Return the directory in an XDG variable. Relative paths are ignored, as the specification demands."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else default


def complete_option(option: Option, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the completions for the value of an option."""
    if option.complete == "files":
        return [_path_item(incomplete)]
    if option.complete == "arrays":
        values = array_names(ctx)
    elif option.complete == "steps":
        values = _step_numbers(ctx)
    else:
        values = sorted(option.complete()) if option.complete else ()
    items = [CompletionItem(value) for value in values if value.startswith(incomplete)]
    is_file = not items and "FILE" in (option.metavar or "")
    return [_path_item(incomplete)] if is_file else items


def _path_item(incomplete: str) -> CompletionItem:
    """Return the request to the shell to complete a path."""
    return CompletionItem(incomplete, type="file")


def array_names(ctx: click.Context) -> Iterable[str]:
    """Return the names of all arrays in the local checkpoint of the command."""
    from ckpttools.array.tree import keystr
    from ckpttools.formats.base import ReadOptions
    from ckpttools.formats.registry import open_tree

    location = _checkpoint(ctx)
    if location is None:
        return ()
    return map(keystr, open_tree(location, ReadOptions(step=ctx.params.get("step"))).arrays)


def _step_numbers(ctx: click.Context) -> Iterable[str]:
    """Return the step numbers in the local run of the command, newest first."""
    from ckpttools.api.ls import ls
    from ckpttools.runs.listing import RunListing

    location = _checkpoint(ctx)
    listing = None if location is None else ls(location)
    return [str(step.step) for step in reversed(listing.steps)] if isinstance(listing, RunListing) else ()


def _checkpoint(ctx: click.Context) -> Location | None:
    """Return the first path of a command, expanded as by a shell; None if it is not local."""
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "") if isinstance(param, click.Argument) else None
        location = value[0] if isinstance(value, tuple) and value else value
        if isinstance(location, Location):
            # A network request would make the user wait.
            is_local = location.store.scheme == "file"
            return parse(Path(os.path.expandvars(str(location))).expanduser()) if is_local else None
    return None
