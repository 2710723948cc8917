"""`ckpt families` and `ckpt formats`: what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from ckpttools.cli.options import json_option
from ckpttools.cli.output import print_json


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """A model family as `ckpt families` shows it."""

    name: str
    model_types: tuple[str, ...]
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A format as `ckpt formats` shows it."""

    name: str


@click.command()
@json_option
def families(as_json: bool) -> None:
    """List the model families that can be converted.

    `model_type` is what a model's config.json calls itself. Packages add families under the entry point
    ckpttools.families.

    \b
    Example:
      ckpt families
    """
    from ckpttools.families.registry import families

    entries = [FamilyEntry(each.name, each.model_types, each.models) for each in families().values()]
    if as_json:
        print_json(entries)
    else:
        _print_columns(
            ("family", "model_type", "models"),
            [(each.name, ", ".join(each.model_types), ", ".join(each.models)) for each in entries],
        )


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
        _print_columns(("format",), [(each.name,) for each in entries])


def _print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A header and rows, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
