"""`ckpt inspect report`: write an HTML report about a checkpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import REPORT
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import print_json, print_lines, print_stderr, report_fields
from ckpttools.cli.progress import progress_events
from ckpttools.core.options import Option, switch
from ckpttools.core.text import format_disk, plural
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.api.sources import Scanning


@click.command(short_help="Write an HTML report: treemap, heat map, histograms, table.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@flags(
    Option(
        "name",
        str,
        "report.html",
        "Page to write; - for stdout.",
        "FILE",
        flag="--output",
        short="-o",
        complete="files",
    ),
    switch("no_stats", "Omit statistics; no array is read."),
    *REPORT,
)
@progress_option
@json_option
@resource_options
@flags(*OPENING)
def report(
    path: Location,
    name: str,
    no_stats: bool,
    overwrite: bool,
    progress: bool,
    as_json: bool,
    **scanning: Unpack[Scanning],
) -> None:
    """Write an HTML report about a checkpoint: one page that needs no network.

    The report shows where the bytes are, the norm of each layer, value distributions, and a searchable,
    sortable table of all arrays. It supports light and dark screens, and printing.

    \b
    Examples:
      $ ckpt inspect report ~/maxtext/llama3.1-8b -o llama3.1-8b.html
      $ ckpt inspect report ~/maxtext/llama3.1-70b --no-stats
    """
    from ckpttools.api.report import report as built

    output = None if name == "-" else parse(name)
    if output is None and as_json:
        raise click.UsageError(
            "stdout takes only one of the two: leave out --json, or name a file with --output"
        )
    with progress_events(progress) as scanning["observe"]:
        page = built(path, output, stats=not no_stats, overwrite=overwrite, **scanning)
    text = f"{plural(page.num_arrays, 'array')}, a page of {format_disk(page.nbytes)}"
    if output is None:
        # The page is written as bytes, because the encoding of stdout may lack characters.
        sys.stdout.buffer.write(page.html.encode())
        sys.stdout.buffer.flush()
        print_stderr(text)
    elif as_json:
        print_json({key: value for key, value in report_fields(page).items() if key != "html"})
    else:
        print_lines([f"{output}: {text}"], is_summary=True)
