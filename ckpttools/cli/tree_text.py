"""A tree report on a terminal: facts, then the folded tree in columns.

Drawn without rich: importing that takes longer than all the rest of `ckpt inspect tree`, and ten thousand
lines took it a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import prod

from ckpttools.cli.against import comparison_lines
from ckpttools.cli.output import show, width
from ckpttools.cli.table import Column, TreeRow, draw_tree
from ckpttools.cli.tree_facts import facts
from ckpttools.cli.units import count, disk
from ckpttools.core.text import plural, printable, type_text
from ckpttools.inspect.comparison import Comparison
from ckpttools.inspect.folding import Branch
from ckpttools.inspect.tree import ArrayReport, TreeReport

# Numbers and ranges of a folded name that are shown; the middle of more of them is left out.
_MOST_RANGES = 6
COLUMNS = (
    Column(""),
    Column("dtype[shape]"),
    Column(""),
    Column("elements", right=True, spare=2),
    Column("bytes", right=True),
    Column("share", right=True, spare=1),
)
_SUBTREE = {0: {"bold": True}, 1: {"dim": True}}
_ARRAY = {1: {"fg": "cyan"}, 2: {"fg": "magenta"}}


def print_tree(report: TreeReport, branches: Sequence[Branch]) -> None:
    """Facts, and the arrays folded into a tree."""
    show(_view(report, list(_tree_rows(branches, ()))))


def print_flat(report: TreeReport) -> None:
    """Facts, and one line for each array."""
    show(_view(report, [_flat_row(each, report.nbytes) for each in report.arrays]))


def print_comparison(report: TreeReport, comparison: Comparison, *, flat: bool) -> None:
    """Facts, and where the checkpoint is not as it should be."""
    show((*facts(report, width()), "", *comparison_lines(comparison, width(), flat=flat)))


def _view(report: TreeReport, rows: list[TreeRow]) -> Iterator[str]:
    yield from facts(report, width())
    if rows:
        yield ""
        yield from draw_tree(COLUMNS, rows, width())


def _tree_rows(branches: Sequence[Branch], above: tuple[bool, ...], *, top: bool = True) -> Iterator[TreeRow]:
    """One row for each branch, each below the one that it hangs on.

    `above` says for each level on the way whether its branch is the last of its siblings.
    """
    for branch in branches:
        way = () if top else (*above, branch is branches[-1])
        yield _row(branch, way)
        yield from _tree_rows(branch.children, way, top=False)


def _row(branch: Branch, way: tuple[bool, ...]) -> TreeRow:
    name = printable(shortened(branch.name))
    sums = amounts(branch.num_elements, branch.nbytes, branch.share)
    if branch.array is not None:
        times = f"× {branch.times:,}" if branch.times > 1 else ""
        return TreeRow((name, array_type(branch.array), times, *sums), way, _ARRAY)
    # Where what is below is not shown, at least how much it is.
    hidden = "" if branch.children else plural(branch.count, "array")
    return TreeRow((name, hidden, "", *sums), way, _SUBTREE)


def _flat_row(array: ArrayReport, total: int) -> TreeRow:
    sums = amounts(prod(array.shape), array.nbytes, array.nbytes / total if total else 0.0)
    return TreeRow((printable(array.path), array_type(array), "", *sums), styles=_ARRAY)


def amounts(num_elements: int, nbytes: int, share: float) -> tuple[str, str, str]:
    """Elements, bytes, and two digits of the share; nothing for what is next to nothing."""
    percent = f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
    return count(num_elements), disk(nbytes), percent if share >= 0.0005 else ""


def array_type(array: ArrayReport) -> str:
    """`bfloat16[4096@fsdp,14336] fp8 128x128`: as JAX writes it, with mesh axes and scheme where known."""
    spec = array.sharding.spec if array.sharding else ()
    axes = (*map(_cut, spec), *repeat("", len(array.shape) - len(spec)))
    lengths = (f"{length}{axis}" for length, axis in zip(array.shape, axes, strict=True))
    how = f" {array.quantized}" if array.quantized else ""
    return type_text(array.dtype, lengths) + how


def _cut(axes: tuple[str, ...]) -> str:
    if not axes:
        return ""
    return f"@{printable(axes[0])}" if len(axes) == 1 else f"@({printable(','.join(axes))})"


def shortened(name: str) -> str:
    """A folded name with few of its ranges: `layers_{0..4,6..10,12..16,…,60..61}`."""
    before, brace, rest = name.partition("{")
    inside, closed, after = rest.partition("}")
    parts = inside.split(",")
    if not closed or len(parts) <= _MOST_RANGES:
        return name if not closed else f"{before}{brace}{inside}{closed}{shortened(after)}"
    kept = [*parts[: _MOST_RANGES // 2], "…", parts[-1]]
    return f"{before}{{{','.join(kept)}}}{shortened(after)}"
