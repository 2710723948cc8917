"""`ckpt inspect`: the group of commands that show a checkpoint."""

from __future__ import annotations

import click

from ckpttools.cli.lazy import LazyGroup, lazy_command

# Commands that are imported only when they run.
_COMMANDS = {
    "chunks": lazy_command("chunks", "chunks", "Show files, chunk grids and codecs; predict load I/O."),
    "report": lazy_command("report", "report", "Write an HTML report: treemap, heat map, histograms, table."),
    "stats": lazy_command("stats", "stats", "Show statistics of every array: min, max, mean, norm, NaN."),
    "tree": lazy_command("inspect_tree", "tree", "Show names, shapes, dtypes, sizes and the kind."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def inspect() -> None:
    """Show a checkpoint's tree, statistics, chunks or report.

    \b
    Examples:
      $ ckpt inspect tree ~/models/Llama-3.1-8B
      $ ckpt inspect stats ~/maxtext/run/checkpoints --nan
      $ ckpt inspect report ~/models/Llama-3.1-8B -o report.html
    """
