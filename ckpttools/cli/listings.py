"""`ckpt formats`: what is installed."""

from __future__ import annotations

from dataclasses import dataclass

import click

from ckpttools.cli.options import json_option
from ckpttools.cli.output import print_json


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A format as `ckpt formats` shows it."""

    name: str


@click.command()
@json_option
def formats(as_json: bool) -> None:
    """List the formats that can be read.

    Packages add formats under the entry point ckpttools.formats.

    \b
    Example:
      ckpt formats
    """
    from ckpttools.formats.registry import formats

    entries = [FormatEntry(name) for name in sorted(formats())]
    if as_json:
        print_json(entries)
    else:
        click.echo("\n".join(["format", *(each.name for each in entries)]))
