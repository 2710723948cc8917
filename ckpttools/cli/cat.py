"""`ckpt cat`: print values of an array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING, REQUESTS
from ckpttools.api.options.inspect import CAT
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, ParamType, flags, json_option, memory_option
from ckpttools.cli.output import print_json, print_lines, print_stderr, styled, width
from ckpttools.cli.stats import format_number
from ckpttools.core.text import printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpttools.api.cat import ArrayValues
    from ckpttools.api.sources import Opening
    from ckpttools.inspection.stats import Statistics


class _ArrayName(ParamType):
    """The name of an array, completed from the checkpoint in PATH."""

    name = "name"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from ckpttools.cli.completion import array_names

        return [CompletionItem(name) for name in array_names(ctx) if name.startswith(incomplete)]


@click.command("cat", short_help="Print the values of an array or a region of it.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@click.argument("name", metavar="NAME[INDEX]", type=_ArrayName())
@json_option
@flags(*CAT)
@memory_option
@flags(REQUESTS, *OPENING)
def cat(
    path: Location,
    name: str,
    as_json: bool,
    full: bool,
    stats: bool,
    raw: bool,
    output: Location | None,
    memory: int,
    requests: int | None,
    **reading: Unpack[Opening],
) -> None:
    """Print the values of an array, or of a region of it.

    The index selects a region as in numpy, and only that region is read. Quote it for the shell. If there are
    more than 1,000 values, only the first and last of each axis are read and printed.

    \b
    Examples:
      $ ckpt cat ~/models/Llama-3.2-1B model.norm.weight
      $ ckpt cat ~/models/Llama-3.2-1B 'model.embed_tokens.weight[3, 10:20]'
      $ ckpt cat ~/models/Llama-3.2-1B model.norm.weight --stats
    """
    from ckpttools.api.cat import cat

    report = cat(
        path,
        name,
        full=full or as_json,
        stats=stats,
        raw=raw,
        output=output,
        memory=memory,
        requests=requests,
        **reading,
    )
    if as_json:
        print_json(replace(report, values=_to_json(report.values)))
        return
    if report.remarks:
        print_stderr(*report.remarks)
    print_lines(_lines(report))


def _lines(report: ArrayValues) -> Iterator[str]:
    selected = f"[{report.index}]" if report.index else ""
    yield styled(printable(report.name) + selected, bold=True)
    if report.dtype is not None and (report.shape or report.values is None or report.dtype != "text"):
        shape = f" {list(report.shape)}"
        yield f"{report.dtype}{shape}{f' -> {list(report.selected_shape)}' if selected else ''}"
    if report.output is not None:
        yield f"wrote {report.output}"
    if report.statistics is not None:
        yield from statistics_lines(report.statistics)
    if report.values is not None:
        yield ""
        yield from format_values(report, width() or 80).splitlines()


def statistics_lines(statistics: Statistics) -> Iterator[str]:
    """Yield a line for each statistic, leaving out counts of zero."""
    for name in ("min", "max", "mean", "std", "norm"):
        yield f"  {name:<10}{format_number(getattr(statistics, name))}"
    for name, label in (("zeros", "zeros"), ("subnormals", "subnormal"), ("nan", "NaN"), ("inf", "Inf")):
        if count := getattr(statistics, name):
            yield f"  {label:<10}{count:,} of {statistics.elements:,}"


# Number of decimals that distinguish the values of each dtype.
_PRECISION = {"float64": 8, "float32": 8, "float16": 5}


def format_values(report: ArrayValues, room: int) -> str:
    """Format values as numpy does, in lines of at most `room` columns."""
    if isinstance(report.values, str):
        return report.values
    import numpy as np

    from ckpttools.api.cat import EDGE_ITEMS

    is_float = (report.dtype or "").startswith(("bfloat", "float"))
    values = np.asarray(report.values, "float32" if is_float and report.dtype != "float64" else None)
    shape = report.selected_shape
    if report.excerpt:
        shape = tuple(min(length, 2 * EDGE_ITEMS + 1) for length in shape)
    if not shape:
        return str(values.reshape(())[()])
    return np.array2string(
        values.reshape(shape),
        max_line_width=room,
        precision=_PRECISION.get(report.dtype or "", 4 if is_float else 8),
        threshold=0 if report.excerpt else max(values.size, 1),
        edgeitems=EDGE_ITEMS,
    )


def _to_json(value: object) -> object:
    """Return nested lists whose numbers are all valid JSON; NaN and infinity become texts."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return str(value) if isinstance(value, complex) else value
