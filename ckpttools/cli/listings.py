"""`ckpt formats`: what is installed."""

from __future__ import annotations

from dataclasses import dataclass

import click

from ckpttools.cli.options import json_option
from ckpttools.cli.output import print_json


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A format as `ckpt formats` shows it.

    Attributes:
        name: of the format.
        written: whether it can be written as well: `ckpt convert to-NAME`.
    """

    name: str
    written: bool


@click.command()
@json_option
def formats(as_json: bool) -> None:
    """List the formats that can be read and written.

    Packages add formats under the entry point ckpttools.formats.

    \b
    Example:
      ckpt formats
    """
    from ckpttools.formats.registry import formats, writable

    entries = [FormatEntry(name, name in writable()) for name in sorted(formats())]
    if as_json:
        print_json(entries)
    else:
        width = max(len(each.name) for each in entries)
        lines = [f"{each.name:<{width}}  {'yes' if each.written else 'no'}" for each in entries]
        click.echo("\n".join([f"{'format':<{width}}  written", *lines]))
