"""Compute statistics of a checkpoint's values."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ckpttools.api.options import SCANNING
from ckpttools.api.options.inspect import SORTS, STATS
from ckpttools.api.sources import (
    Scanning,
    Source,
    opened,
    scanning,
)
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import UsageError
from ckpttools.core.options import declare
from ckpttools.inspection.stats import ArrayStats, StatsReport, inspect_stats, matching
from ckpttools.quantized.view import quantized_view


@validate_arguments
@declare(*STATS, *SCANNING)
def stats(
    source: Source,
    *,
    filter: str = "*",
    sort: str | None = None,
    per_layer: bool = False,
    histogram: bool = False,
    **common: Unpack[Scanning],
) -> StatsReport:
    """Compute extremes, mean, norm, zeros and NaN of every array, reading each element once.

    Quantized weights are dequantized to bfloat16. If some cannot be dequantized, the statistics are those of
    the stored values and scales, and `remarks` states this.

    Args:
        source: A file, item, step or run directory, or a tree.

    Raises:
        CheckpointError: An array cannot be read, the memory is too small, or no array matches.
    """
    if sort is not None and sort not in SORTS:
        raise UsageError(f"cannot sort by {sort!r}", expected="one of " + ", ".join(SORTS))
    with scanning(common) as scan:
        view = quantized_view(opened(source, scan.read))
        tree, remark = view.plain_where_possible(is_read=filter == "*")
        scan.fetch(tree)
        total = sum(array.nbytes for array in matching(tree, filter).values())
        report = inspect_stats(
            tree,
            filter,
            memory=scan.memory,
            jobs=scan.jobs,
            per_layer=per_layer,
            histograms=histogram,
            observe=scan.observer(total),
        )
    report = replace(report, remarks=(remark,) if remark else ())
    if sort is None:
        return report
    return replace(report, arrays=tuple(sorted(report.arrays, key=lambda item: _sort_key(item, sort))))


def _sort_key(array: ArrayStats, by: str) -> tuple[bool, float]:
    """Return a sort key for descending order, with missing values last."""
    value = array.nbytes if by == "size" else getattr(array.statistics, by.replace("-", "_"))
    return value is None, -(value or 0)
