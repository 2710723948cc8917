"""`ckpt inspect tree`: show the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING, REQUESTS, count
from ckpttools.api.options.inspect import TREE
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option
from ckpttools.cli.output import (
    exit_with_differences,
    print_json,
    print_lines,
    print_report,
    report_fields,
    styled,
    width,
    wrap,
)
from ckpttools.cli.table import Column, TreeRow, draw_tree
from ckpttools.cli.tree_facts import fact_lines
from ckpttools.core.errors import SeveralCheckpointsError
from ckpttools.core.options import switch
from ckpttools.core.text import format_count, format_disk, format_type, plural, printable
from ckpttools.inspection.comparison import Comparison
from ckpttools.inspection.folding import RNG_STATE, Branch
from ckpttools.inspection.tree import ArrayReport, TreeReport
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.sources import Opening
    from ckpttools.inspection.comparison import ArraySpec, Comparison, Different
    from ckpttools.inspection.folding import Branch
    from ckpttools.inspection.tree import TreeReport


@click.command(short_help="Show names, shapes, dtypes, sizes and the kind.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@flags(
    count("depth", "Show at most N levels; totals include everything."),
    *TREE[:1],
    switch("flat", "Print one line per array, without folding."),
    *TREE[1:],
)
@json_option
@flags(*OPENING, REQUESTS)
def tree(
    path: Location,
    depth: int | None,
    filter: str,
    flat: bool,
    sort: str | None,
    sharding: bool,
    against: str | None,
    as_json: bool,
    requests: int | None,
    **reading: Unpack[Opening],
) -> None:
    """Show the arrays of a checkpoint (names, shapes, dtypes, bytes) and its kind.

    PATH is a checkpoint in any format that `ckpt formats` lists, at any level: run directory, step, item or
    file. Only headers and indexes are read. Repeated layers are folded into one: layers_{0..31}.

    \b
    Examples:
      $ ckpt inspect tree ~/maxtext/llama3.1-8b --filter '*self_attention*'
      $ ckpt inspect tree ~/models/Llama-3.1-8B --against llama
    """
    if flat and depth:
        raise click.UsageError("--flat has no levels: leave out --flat or --depth")
    if against and depth and not as_json:
        raise click.UsageError("--against shows lists, which have no levels: leave out --depth")
    if against and sharding and not as_json:
        raise click.UsageError("--against compares names, shapes and dtypes: leave out --sharding")
    from ckpttools.api.inspect import inspect
    from ckpttools.inspection.folding import fold

    try:
        report = inspect(
            path, filter=filter, sort=sort, sharding=sharding, against=against, requests=requests, **reading
        )
    except SeveralCheckpointsError as error:
        if against or reading.get("step") is not None:
            raise
        _print_members(error, as_json, requests)
        return
    folded = partial(fold, report.arrays, sort=sort, depth=depth)
    if as_json:
        _print_json(report, folded)
    else:
        _print(report, flat, folded)
    if report.comparison and not report.comparison.is_same:
        exit_with_differences()


def _print_members(error: SeveralCheckpointsError, as_json: bool, requests: int | None) -> None:
    """List the checkpoints and runs in a directory of several."""
    from ckpttools.api.ls import list_members
    from ckpttools.cli.ls import listing_lines

    listing = list_members(error, requests)
    print_report(listing, listing_lines(listing), as_json=as_json)


def _print_json(report: TreeReport, folded: Callable[..., Sequence[Branch]]) -> None:
    result = report_fields(report)
    comparison = result.pop("comparison")
    # Programs get every array; people get one line for the random states.
    result["subtrees"] = folded()
    print_json(result | {"comparison": comparison} if comparison else result)


def _print(report: TreeReport, flat: bool, folded: Callable[..., Sequence[Branch]]) -> None:

    if report.comparison:
        print_comparison(report, report.comparison, flat=flat)
    elif flat:
        print_flat(report)
    else:
        print_tree(report, folded(collapse_random=True))


# A tree report on a terminal: facts, then the folded tree in columns.
#
# It is drawn without rich, because importing rich takes longer than the rest of `ckpt inspect tree`, and
# drawing ten thousand lines with it took a second.
#
# Maximum number of numbers and ranges shown in a folded name; those in the middle are left out.
_MAX_RANGES = 6
COLUMNS = (
    Column(""),
    Column("dtype[shape]"),
    Column(""),
    Column("elements", right=True, spare=2),
    Column("bytes", right=True),
    Column("share", right=True, spare=1),
)
_SUBTREE_STYLES = {0: {"bold": True}, 1: {"dim": True}}
_ARRAY = {1: {"fg": "cyan"}, 2: {"fg": "magenta"}}


def print_tree(report: TreeReport, branches: Sequence[Branch]) -> None:
    """Print the facts, then the arrays folded into a tree."""
    print_lines(_tree_report_lines(report, list(_tree_rows(branches, ()))))


def print_flat(report: TreeReport) -> None:
    """Print the facts, then one line for each array."""
    print_lines(_tree_report_lines(report, [_flat_row(array, report.nbytes) for array in report.arrays]))


def print_comparison(report: TreeReport, comparison: Comparison, *, flat: bool) -> None:
    """Print the facts, then the differences from the reference."""
    print_lines((*fact_lines(report, width()), "", *comparison_lines(comparison, width(), flat=flat)))


def _tree_report_lines(report: TreeReport, rows: list[TreeRow]) -> Iterator[str]:
    yield from fact_lines(report, width())
    if rows:
        yield ""
        yield from draw_tree(COLUMNS, rows, width())


def _tree_rows(branches: Sequence[Branch], above: tuple[bool, ...], *, top: bool = True) -> Iterator[TreeRow]:
    """Yield one row for each branch below its parent.

    For each ancestor, `above` tells whether it is the last of its siblings.
    """
    for branch in branches:
        guides = () if top else (*above, branch is branches[-1])
        yield _row(branch, guides)
        yield from _tree_rows(branch.children, guides, top=False)


def _row(branch: Branch, guides: tuple[bool, ...]) -> TreeRow:
    name = printable(shorten(branch.name))
    sums = format_amounts(branch.num_elements, branch.nbytes, branch.fraction)
    if branch.array is not None:
        times = f"× {branch.num_subtrees:,}" if branch.num_subtrees > 1 else ""
        return TreeRow((name, format_array_type(branch.array), times, *sums), guides, _ARRAY)
    # The line of hidden children at least shows their number.
    hidden = "" if branch.children else plural(branch.num_arrays, "array")
    if branch.name == RNG_STATE and hidden:
        hidden += " (--flat lists them)"
    return TreeRow((name, hidden, "", *sums), guides, _SUBTREE_STYLES)


def _flat_row(array: ArrayReport, total: int) -> TreeRow:
    sums = format_amounts(prod(array.shape), array.nbytes, array.nbytes / total if total else 0.0)
    return TreeRow((printable(array.path), format_array_type(array), "", *sums), styles=_ARRAY)


def format_amounts(num_elements: int, nbytes: int, share: float) -> tuple[str, str, str]:
    """Format element count, bytes and share with two digits; omit negligible shares."""
    percent = f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
    return format_count(num_elements), format_disk(nbytes), percent if share >= 0.0005 else ""


def format_array_type(array: ArrayReport) -> str:
    """Format `bfloat16[4096@fsdp,14336] fp8 128x128` like JAX, with known mesh axes and scheme."""
    spec = array.sharding.spec if array.sharding else ()
    axes = (*map(_truncate, spec), *repeat("", len(array.shape) - len(spec)))
    lengths = (f"{length}{axis}" for length, axis in zip(array.shape, axes, strict=True))
    suffix = f" {array.quantized}" if array.quantized else ""
    return format_type(array.dtype, lengths) + suffix


def _truncate(axes: tuple[str, ...]) -> str:
    if not axes:
        return ""
    return f"@{printable(axes[0])}" if len(axes) == 1 else f"@({printable(','.join(axes))})"


def shorten(name: str) -> str:
    """Shorten a folded name to a few ranges: `layers_{0..4,6..10,12..16,…,60..61}`."""
    before, brace, rest = name.partition("{")
    inside, closed, after = rest.partition("}")
    parts = inside.split(",")
    if not closed or len(parts) <= _MAX_RANGES:
        return name if not closed else f"{before}{brace}{inside}{closed}{shorten(after)}"
    visible = [*parts[: _MAX_RANGES // 2], "…", parts[-1]]
    return f"{before}{{{','.join(visible)}}}{shorten(after)}"


# Longer lists end with the number of remaining lines.
_MAX_LINES = 100


def comparison_lines(comparison: Comparison, room: int | None, *, flat: bool) -> Iterator[str]:
    """Yield the verdict, then all lists that are not empty.

    Args:
        comparison: The result to print.
        room: Columns of the terminal; None for no limit.
        flat: Whether names that differ only in numbers get separate lines.
    """
    against = printable(comparison.against)
    if comparison.is_same:
        number = plural(comparison.num_compared, "array")
        shapes = ", all shapes as expected" if comparison.shapes_compared else ""
        yield from wrap(f"Against {against}: {number}, none missing, none unexpected{shapes}.", room)
    else:
        yield from wrap(f"Against {against}:", room)
    lists = {
        "missing": [(item.path, _type_text(item)) for item in comparison.missing],
        "not expected": [(item.path, _type_text(item)) for item in comparison.extra],
        "of another shape or dtype": [(item.path, _difference_text(item)) for item in comparison.different],
    }
    for title, entries in lists.items():
        if entries:
            yield ""
            # A name without a known shape may represent all layers.
            noun = "array" if all(text for _, text in entries) else "name"
            are = "is" if len(entries) == 1 else "are"
            yield styled(f"{plural(len(entries), noun)} {are} {title}", bold=True)
            yield from _list_items(_comparison_text(entries) if flat else _fold_differences(entries), room)
    if comparison.reasons:
        yield ""
        for reason in comparison.reasons:
            yield from wrap(printable(reason), room)


def _list_items(lines: Sequence[tuple[str, str]], room: int | None) -> Iterator[str]:
    """List names with remarks, next to the names or, if a line is too short, below them."""
    visible = lines[:_MAX_LINES]
    width = max(len(name) for name, _ in visible)
    if room is not None:
        width = min(width, max(room // 3, room - 4 - max(len(text) for _, text in visible)))
    for name, text in visible:
        line = f"  {name:{width}}  {styled(text, fg='cyan')}" if text else f"  {name}"
        if room is not None and 4 + max(width, len(name)) + len(text) > room:
            yield from _break_line(name, text, room)
        else:
            yield line
    if len(lines) > _MAX_LINES:
        yield f"  … and {len(lines) - _MAX_LINES:,} more lines; --json has all of them"


def _break_line(name: str, text: str, room: int) -> Iterator[str]:
    """Format a name and its remark below it, each wrapped as needed."""
    first, *more = wrap(name, room - 6)
    yield f"  {first}"
    yield from (f"    {part}" for part in more)
    yield from (styled(f"      {part}", fg="cyan") for part in wrap(text, room - 6) if text)


def _comparison_text(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(printable(name), printable(text)) for name, text in entries]


def _fold_differences(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join names with the same remark that differ only in numbers."""
    from ckpttools.core.text import fold_lines

    names: dict[str, list[str]] = {}
    for name, text in entries:
        names.setdefault(text, []).append(name)
    return _comparison_text(
        (name, text) for text, same_text in names.items() for name in fold_lines(same_text)
    )


def _difference_text(difference: Different) -> str:
    reason = f" ({difference.reason})" if difference.reason else ""
    got = difference.got if difference.expected.dtype else replace(difference.got, dtype=None)
    return f"{_type_text(got)}, should be {_type_text(difference.expected)}{reason}"


def _type_text(spec: ArraySpec) -> str:
    """Format `bfloat16[64,128]`, or `[64,128]` if any dtype is accepted."""
    return (spec.dtype or "") if spec.shape is None else format_type(spec.dtype or "", spec.shape)
