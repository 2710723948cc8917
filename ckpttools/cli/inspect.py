"""`ckpt inspect`: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import ANY_PATH, json_option, read_options
from ckpttools.cli.output import print_json

if TYPE_CHECKING:
    from ckpttools.formats.base import ReadOptions


@click.group()
def inspect() -> None:
    """Look into a checkpoint without loading it.

    \b
    Example:
      ckpt inspect tree ~/models/Llama-3.1-8B
    """


@inspect.command(short_help="Names, shapes, dtypes, bytes, and what kind it is.")
@click.argument("path", type=ANY_PATH)
@json_option
@click.option(
    "--depth", type=click.IntRange(min=1), metavar="N", help="Show so many levels; totals stay whole."
)
@click.option(
    "--filter",
    "pattern",
    metavar="GLOB",
    default="*",
    help="Only arrays whose whole path matches, such as '*/mlp/*'; counts and bytes are of those.",
)
@click.option("--flat", is_flag=True, help="One line for each array, nothing folded.")
@read_options
def tree(path: Path, as_json: bool, depth: int | None, pattern: str, flat: bool, read: ReadOptions) -> None:
    """Show the arrays of a checkpoint: names, shapes, dtypes, bytes, and what kind it is.

    PATH is a safetensors file or directory, or an Orbax checkpoint at any level: run directory, step or
    item. Only headers and indexes are read. Repeated layers are folded into one: layers_{0..31}.

    \b
    Example:
      ckpt inspect tree ~/maxtext/llama3.1-8b --filter '*self_attention*'
    """
    from ckpttools.formats.registry import open_tree
    from ckpttools.inspect.tree import inspect_tree

    report = inspect_tree(open_tree(path, read), pattern)
    if as_json:
        print_json(report)
        return
    from ckpttools.cli.tree_text import print_flat, print_tree

    if flat:
        print_flat(report)
    else:
        print_tree(report, depth)
