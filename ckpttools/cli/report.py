"""`ckpt inspect report`: write an HTML report about a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckpttools.cli.options import ANY_PATH, NON_EMPTY_TEXT, json_option, read_options, resource_options
from ckpttools.cli.output import print_json, print_lines, print_stderr, report_fields
from ckpttools.cli.progress import progress_events, progress_option
from ckpttools.cli.units import format_disk
from ckpttools.core.text import plural
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse


@click.command(short_help="Write an HTML report: treemap, heat map, histograms, table.")
@click.argument("path", type=ANY_PATH)
@click.option(
    "--output",
    "-o",
    "name",
    type=NON_EMPTY_TEXT,
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="Page to write; - for stdout.",
)
@click.option("--no-stats", is_flag=True, help="Omit statistics; no array is read.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@progress_option
@json_option
@resource_options
@read_options
def report(path: Location, name: str, no_stats: bool, progress: bool, as_json: bool, **options: Any) -> None:
    """Write an HTML report about a checkpoint: one page that needs no network.

    It shows where the bytes are, norms by layer, value distributions, and a searchable, sortable table of all
    arrays. It supports light and dark screens, and print.

    \b
    Example:
      ckpt inspect report ~/maxtext/llama3.1-8b -o llama3.1-8b.html
    """
    from ckpttools.api.report import report as built

    output = None if name == "-" else parse(name)
    if output is None and as_json:
        raise click.UsageError(
            "stdout takes only one of the two: leave out --json, or name a file with --output"
        )
    with progress_events(progress) as observe:
        page = built(path, output, stats=not no_stats, observe=observe, **options)
    text = f"{plural(page.num_arrays, 'array')}, a page of {format_disk(page.nbytes)}"
    if output is None:
        # As bytes: the encoding of stdout may lack characters.
        sys.stdout.buffer.write(page.html.encode())
        sys.stdout.buffer.flush()
        print_stderr(text)
    elif as_json:
        print_json({key: value for key, value in report_fields(page).items() if key != "html"})
    else:
        print_lines([f"{output}: {text}"])
