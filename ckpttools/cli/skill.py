"""`ckpt skill`: print instructions for coding agents."""

from __future__ import annotations

from importlib.resources import files

import click

from ckpttools.cli.command import BaseCommand


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
