"""`ckpt completion`: print shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from ckpttools.cli.command import BaseCommand
from ckpttools.cli.command_line import COMPLETION_VARIABLE

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(cls=BaseCommand)
@click.argument("shell", type=click.Choice(tuple(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    Add the line for bash to ~/.bashrc, or that for zsh to ~/.zshrc, after compinit.

    \b
    Examples:
      $ ckpt completion fish > ~/.config/fish/completions/ckpt.fish
      $ eval "$(ckpt completion bash)"
      $ eval "$(ckpt completion zsh)"
    """
    complete = _SHELLS[shell](ctx.find_root().command, {}, "ckpt", COMPLETION_VARIABLE)
    # `source()` is not used because it starts a bash process to check the version.
    click.echo(complete.source_template % complete.source_vars())
