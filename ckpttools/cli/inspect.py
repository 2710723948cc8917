"""`ckpt inspect`: the group of commands that look into a checkpoint."""

from __future__ import annotations

import click

from ckpttools.cli.lazy import LazyGroup, lazy_command

# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "chunks": lazy_command("chunks", "chunks", "Data files, chunk grids, codecs, and what loading reads."),
    "report": lazy_command("report", "report", "One HTML page: treemap, heat map, histograms, table."),
    "stats": lazy_command("stats", "stats", "Extremes, mean, norm, zeros and NaN of every array."),
    "tree": lazy_command("inspect_tree", "tree", "Names, shapes, dtypes, bytes, and what kind it is."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def inspect() -> None:
    """Look into a checkpoint without loading it.

    \b
    Example:
      ckpt inspect tree ~/models/Llama-3.1-8B
    """
