"""`ckpt inspect`: the group of commands that look into a checkpoint."""

from __future__ import annotations

import click

from ckpttools.cli.lazy import LazyGroup, in_module

# Commands in files of their own, imported when they are run.
_COMMANDS = {
    "chunks": in_module("chunks", "chunks", "Data files, chunk grids, codecs, and what loading reads."),
    "report": in_module("report", "report", "One HTML page: treemap, heat map, histograms, table."),
    "stats": in_module("stats", "stats", "Extremes, mean, norm, zeros and NaN of every array."),
    "tree": in_module("inspect_tree", "tree", "Names, shapes, dtypes, bytes, and what kind it is."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def inspect() -> None:
    """Look into a checkpoint without loading it.

    \b
    Example:
      ckpt inspect tree ~/models/Llama-3.1-8B
    """
