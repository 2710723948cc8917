"""`ckpt inspect chunks`: data files, chunk grids, codecs, and what loading would read."""

from __future__ import annotations

from typing import Any

import click

from ckpttools.cli.options import ANY_PATH, filter_option, json_option, read_options
from ckpttools.cli.output import fields_of, print_json
from ckpttools.stores.place import Place


@click.command()
@click.argument("path", type=ANY_PATH)
@json_option
@filter_option("; files are always shown")
@click.option(
    "--mesh",
    metavar="MESH",
    help="Predict what devices would read: 8, 4x2 or data=4,fsdp=2.",
)
@click.option(
    "--spec",
    metavar="SPEC",
    help="How the devices share each array: axis0, layer, replicated, axis0=0,axis1=1 or P('fsdp', None).",
)
@click.option(
    "--rules",
    metavar="RULES",
    help="The same for each array: maxtext, or a TOML or JSON file of rules. In place of --spec; where "
    "neither is given and the axes of the mesh have names, maxtext.",
)
@click.option(
    "--processes",
    type=int,
    metavar="N",
    help="Predict what N processes with these devices would read that load together.",
)
@read_options
def chunks(
    path: Place, as_json: bool, mesh: str | None, spec: str | None, rules: str | None, **options: Any
) -> None:
    """Show how a checkpoint is stored: its data files, chunk grids and codecs.

    Only indexes and metadata are read. With --mesh it predicts how many reads a device makes, and how many
    bytes it needs and fetches; with --processes what processes read that load together.

    \b
    Example:
      ckpt inspect chunks ~/maxtext/llama3.1-8b --mesh fsdp=8 --spec "P('fsdp')"
      ckpt inspect chunks ~/llama --mesh fsdp=4,tensor=2 --processes 2
    """
    from ckpttools.api.chunks_report import chunks as look

    report = look(path, mesh=mesh, spec=spec, rules=rules, **options)
    if as_json:
        found = fields_of(report)
        advice = found.pop("advice")
        print_json({"report": found, "advice": advice})
        return
    from ckpttools.cli.chunks_text import print_chunks

    print_chunks(report, report.advice)
