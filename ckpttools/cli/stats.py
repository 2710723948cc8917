"""`ckpt inspect stats`: show statistics of a checkpoint's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import STATS
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import exit_with_differences, print_json, print_lines, styled, width
from ckpttools.cli.progress import progress_events
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.options import switch
from ckpttools.core.text import format_disk, plural, printable
from ckpttools.inspection.distribution import Distribution
from ckpttools.inspection.stats import ArrayStats, Statistics, StatsReport
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.sources import Scanning


@click.command(short_help="Show statistics of every array: min, max, mean, norm, NaN.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@json_option
@flags(
    *STATS,
    switch("find_nan", "Only report where NaN and infinity are; exit with 1 if there are any.", flag="--nan"),
)
@progress_option
@resource_options
@flags(*OPENING)
def stats(
    path: Location,
    as_json: bool,
    filter: str,
    sort: str | None,
    per_layer: bool,
    histogram: bool,
    find_nan: bool,
    progress: bool,
    **scanning: Unpack[Scanning],
) -> None:
    """Show statistics of every array: extremes, mean, norm, zeros, NaN.

    Every element is read once, on several threads, within the memory limit. Min, max, mean, std and norm
    cover finite elements; for complex values, their magnitudes.

    \b
    Examples:
      $ ckpt inspect stats ~/maxtext/llama3.1-8b --per-layer --filter '*mlp*'
      $ ckpt inspect stats ~/maxtext/run/checkpoints --nan
    """
    from ckpttools.api.stats import stats as look

    if find_nan and not as_json and (histogram or per_layer):
        option_name = "--histogram" if histogram else "--per-layer"
        raise click.UsageError(
            f"--nan only reports where NaN and infinity are: leave it out, or {option_name}"
        )
    with progress_events(progress) as scanning["observe"]:
        report = look(path, filter=filter, sort=sort, per_layer=per_layer, histogram=histogram, **scanning)
    if as_json:
        print_json(report)
    else:
        (print_bad if find_nan else print_stats)(report)
    if find_nan and not report.finite:
        exit_with_differences()


_COLUMNS = (
    Column("array"),
    Column("dtype", spare=5),
    Column("min", right=True, spare=2),
    Column("max", right=True, spare=2),
    Column("mean", right=True, spare=4),
    Column("std", right=True, spare=1),
    Column("norm", right=True),
    Column("zeros", right=True, spare=3),
    Column("subnormal", right=True, spare=6),
    Column("NaN", right=True),
    Column("Inf", right=True),
)
# The histogram combines the smallest magnitudes up to this share of elements.
_TAIL_SHARE = 0.001
# Maximum length of a bar, and width of the text before it.
_BAR, _MARGIN = 50, 36
_SHOWN_QUANTILES = {
    0.01: "1 %",
    0.05: "5 %",
    0.25: "25 %",
    0.5: "median",
    0.75: "75 %",
    0.95: "95 %",
    0.99: "99 %",
}


def print_stats(report: StatsReport) -> None:
    """Print one line for each array, and for each of its layers in per-layer reports."""
    rows = [row for array in report.arrays for row in _rows(array)]
    print_lines(
        [
            *_head_line(report),
            *(draw_table(_COLUMNS, rows, width()) if rows else ()),
            *(line for array in report.arrays for line in _histogram_of(array)),
            "",
            _total_line(report),
        ]
    )


def print_bad(report: StatsReport) -> None:
    """Print the arrays with NaN or infinity, and the first position in each."""
    bad = [array for array in report.arrays if array.first_bad is not None]
    if not bad:
        print_lines(
            [f"No NaN or infinity in {plural(report.num_arrays, 'array')}, {format_disk(report.nbytes)}."]
        )
        return
    print_lines(
        [*_head_line(report), *(line for array in bad for line in _bad_rows(array)), "", _total_line(report)]
    )


def _bad_rows(array: ArrayStats) -> Iterator[str]:
    result = array.statistics
    location = f"[{', '.join(map(str, array.first_bad or ()))}]"
    yield f"{styled(printable(array.path) + location, bold=True)}"
    yield f"  first of {_bad_counts(result.nan, result.inf)} in {result.elements:,} elements"


def _bad_counts(nan: int, inf: int) -> str:
    return " and ".join(f"{count:,} {word}" for count, word in ((nan, "NaN"), (inf, "infinite")) if count)


def _head_line(report: StatsReport) -> Iterator[str]:
    step = None if report.step is None else f"step {report.step}"
    yield styled(printable(report.path), bold=True)
    yield ", ".join(fact for fact in (report.format, step) if fact)
    yield from map(printable, report.remarks)
    yield ""


def _total_line(report: StatsReport) -> str:
    bad = _bad_counts(report.nan, report.inf)
    arrays = plural(report.num_arrays, "array")
    return f"{arrays}, {format_disk(report.nbytes)}, {bad or 'no NaN, no infinity'}"


def _rows(array: ArrayStats) -> Iterator[tuple[str, ...]]:
    yield _row_cells(printable(array.path), array.dtype, array.statistics)
    for layer, result in array.layers.items():
        yield _row_cells(f"  layer {layer}", "", result)


def _row_cells(name: str, dtype: str, result: Statistics) -> tuple[str, ...]:
    numbers = (result.min, result.max, result.mean, result.std, result.norm)
    counts = (result.zeros, result.subnormals, result.nan, result.inf)
    return (name, dtype, *map(format_number, numbers), *(f"{count:,}" if count else "" for count in counts))


def format_number(value: float | None) -> str:
    """Format four significant digits; integers up to six digits in full."""
    if value is None:
        return "–"
    return f"{value}" if isinstance(value, int) and abs(value) < 1_000_000 else f"{value:.4g}"


def _histogram_of(array: ArrayStats) -> Iterator[str]:
    if array.distribution is not None:
        yield ""
        yield styled(printable(array.path), bold=True)
        yield from histogram_lines(array.distribution, array.statistics.zeros, width())


def histogram_lines(spread: Distribution, zeros: int, columns: int | None) -> Iterator[str]:
    """Yield bars for magnitudes, largest first, and quantiles.

    Args:
        spread: The distribution.
        zeros: Exact number of zeros.
        columns: Width of the lines; None for no limit.
    """
    room = max(8, min(_BAR, (columns or _BAR + _MARGIN) - _MARGIN))
    lines = list(_magnitude_rows(spread, zeros))
    longest = max(share for _, share in lines)
    for label, share in lines:
        bar = "█" * round(room * share / longest)
        yield f"  {label:<22}  {share:7.2%}" + (f"  {styled(bar, fg='cyan')}" if bar else "")
    quantiles = [
        f"{word} {format_number(spread.quantiles[share])}" for share, word in _SHOWN_QUANTILES.items()
    ]
    yield from _wrap_row(quantiles, columns)


def _wrap_row(words: list[str], room: int | None) -> Iterator[str]:
    """Wrap words into lines of the given width."""
    line = ""
    for word in words:
        if line and room is not None and len(line) + len(word) + 2 > room:
            yield line
            line = ""
        line += f"  {word}"
    yield line


def _magnitude_rows(spread: Distribution, zeros: int) -> Iterator[tuple[str, float]]:
    """Yield label and share of elements by power of two, then the small rest, then zeros."""
    total = spread.zeros + sum(item.negative + item.positive for item in spread.bins)
    left = total - zeros
    for item in reversed(spread.bins):
        count = item.negative + item.positive
        if left < _TAIL_SHARE * total and left > count:
            yield f"       |x| < 2^{item.exponent + 1}", left / total
            left = 0
            break
        yield f"2^{item.exponent} ≤ |x| < 2^{item.exponent + 1}", count / total
        left -= count
    if left:
        yield f"   0 < |x| < 2^{spread.min_exponent}", left / total
    if zeros:
        yield "zero", zeros / total
