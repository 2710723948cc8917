"""`ckpt formats`: what is installed."""

from __future__ import annotations

import click

from ckpttools.cli.options import json_option
from ckpttools.cli.output import print_json, show


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

    written = {name: name in writable() for name in sorted(formats())}
    if as_json:
        print_json([{"name": name, "written": is_written} for name, is_written in written.items()])
    else:
        width = max(map(len, written))
        lines = [f"{name:<{width}}  {'yes' if is_written else 'no'}" for name, is_written in written.items()]
        show([f"{'format':<{width}}  written", *lines])
