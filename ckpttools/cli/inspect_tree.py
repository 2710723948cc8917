"""`ckpt inspect tree`: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    SOME_TEXT,
    filter_option,
    json_option,
    read_options,
    requests_option,
    together,
)
from ckpttools.cli.output import end_as_different, fields_of, print_json
from ckpttools.stores.place import Place

if TYPE_CHECKING:
    from ckpttools.inspect.folding import Branch
    from ckpttools.inspect.tree import TreeReport


_view_options = together(
    click.option(
        "--depth",
        type=click.IntRange(min=1),
        metavar="N",
        help="Show at most N levels; totals include everything.",
    ),
    filter_option("; counts and bytes are of those"),
    click.option("--flat", is_flag=True, help="One line for each array, nothing folded."),
    click.option(
        "--sort",
        type=click.Choice(("size", "name")),
        help="Largest first, or by name. By default the tree is in the order of names, and --flat and "
        "--json keep the checkpoint's order.",
    ),
    click.option(
        "--sharding",
        is_flag=True,
        help="Show how arrays were laid out on devices when they were saved: bfloat16[4096@fsdp,14336].",
    ),
    click.option(
        "--against",
        type=SOME_TEXT,
        metavar="WHAT",
        help="Compare with a family (`ckpt families`), a config.json, or another checkpoint: report what is "
        "missing, unexpected, or of another shape. Exits with 1 if anything is.",
    ),
)


@click.command(short_help="Names, shapes, dtypes, bytes, and what kind it is.")
@click.argument("path", type=ANY_PATH)
@_view_options
@json_option
@read_options
@requests_option
def tree(path: Place, depth: int | None, flat: bool, as_json: bool, **options: Any) -> None:
    """Show the arrays of a checkpoint (names, shapes, dtypes, bytes) and what kind it is.

    PATH is a checkpoint in any format that `ckpt formats` lists, at any level: run directory, step, item or
    file. Only headers and indexes are read. Repeated layers are folded into one: layers_{0..31}.

    \b
    Example:
      ckpt inspect tree ~/maxtext/llama3.1-8b --filter '*self_attention*'
    """
    if flat and depth:
        raise click.UsageError("--flat has no levels: leave out --flat or --depth")
    if options["against"] and depth and not as_json:
        raise click.UsageError("--against shows lists, which have no levels: leave out --depth")
    if options["against"] and options["sharding"] and not as_json:
        raise click.UsageError("--against compares names, shapes and dtypes: leave out --sharding")
    from ckpttools.api.tree_report import inspect
    from ckpttools.inspect.folding import fold

    report = inspect(path, **options)
    folded = partial(fold, report.arrays, largest_first=options["sort"] == "size", depth=depth)
    if as_json:
        _print_json(report, folded)
    else:
        _print(report, flat, folded)
    if report.comparison and not report.comparison.is_same:
        end_as_different()


def _print_json(report: TreeReport, folded: Callable[[], Sequence[Branch]]) -> None:
    found = fields_of(report)
    comparison = found.pop("comparison")
    found["subtrees"] = folded()
    print_json(found | {"comparison": comparison} if comparison else found)


def _print(report: TreeReport, flat: bool, folded: Callable[[], Sequence[Branch]]) -> None:
    from ckpttools.cli.tree_text import print_comparison, print_flat, print_tree

    if report.comparison:
        print_comparison(report, report.comparison, flat=flat)
    elif flat:
        print_flat(report)
    else:
        print_tree(report, folded())
