"""A tree report on a terminal: facts, the folded tree in columns, totals.

Drawn without rich: importing that takes longer than all the rest of `ckpt inspect tree`, and ten thousand
lines took it a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import click

from ckpttools.cli.output import printable, show, width
from ckpttools.cli.units import count, counted, disk
from ckpttools.inspect.folding import Branch, fold
from ckpttools.inspect.tree import ArrayReport, TreeReport

_GAP = 2


def print_tree(report: TreeReport, depth: int | None) -> None:
    """Facts, tree and totals; `depth` levels of the tree, all where it is None."""
    rows = list(_tree_rows(fold(report.arrays), depth, "", top=True))
    show(_view(report, rows))


def print_flat(report: TreeReport) -> None:
    """Facts, one line for each array, totals."""
    rows = [_Row("", printable(each.path), _type(each), "", disk(each.nbytes)) for each in report.arrays]
    show(_view(report, rows))


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of one line; `guide` are the lines that lead to the name."""

    guide: str
    name: str
    type: str
    times: str
    nbytes: str


def _tree_rows(branches: Iterable[Branch], depth: int | None, guide: str, *, top: bool) -> Iterator[_Row]:
    """One row for each branch down to `depth` levels, each below the one that it hangs on."""
    listed = list(branches)
    for branch in listed:
        last = branch is listed[-1]
        own, below = ("", "") if top else ("└── ", "    ") if last else ("├── ", "│   ")
        yield _row(branch, guide + own)
        if depth is None or depth > 1:
            deeper = None if depth is None else depth - 1
            yield from _tree_rows(branch.children, deeper, guide + below, top=False)


def _row(branch: Branch, guide: str) -> _Row:
    name, nbytes = printable(branch.name), disk(branch.nbytes)
    if branch.array is None:
        return _Row(guide, name, "", "", nbytes)
    times = f"× {branch.count:,}" if branch.count > 1 else ""
    return _Row(guide, name, _type(branch.array), times, nbytes)


def _type(array: ArrayReport) -> str:
    """`bfloat16[4096,14336]`, as JAX writes it."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _view(report: TreeReport, rows: list[_Row]) -> Iterator[str]:
    yield from _facts(report)
    yield ""
    if rows:
        stops = _Stops.fitting(rows, width())
        yield from map(stops.line, rows)
        yield ""
    yield _totals(report)


@dataclass(frozen=True, slots=True)
class _Stops:
    """Columns at which cells begin; the last is where lines end.

    A line too long for its stops pushes the next cell along, and the space before the bytes gives way.
    """

    type: int
    times: int
    end: int

    @classmethod
    def fitting(cls, rows: Iterable[_Row], room: int | None) -> _Stops:
        cells = [(r.guide + r.name, r.type, r.times, r.nbytes) for r in rows]
        name, kind, times, nbytes = (max(map(len, column)) for column in zip(*cells, strict=True))
        rest = kind + times + nbytes + _GAP * (3 if times else 2)
        if room is not None:
            name = min(name, max(room - rest, room // 3))
        return cls(name + _GAP, name + kind + 2 * _GAP, name + rest)

    def line(self, row: _Row) -> str:
        name, kind = row.name if row.type else click.style(row.name, bold=True), row.type
        used = len(row.guide) + len(row.name)
        line, at = click.style(row.guide, dim=True) + name, used
        for stop, text, colour in ((self.type, kind, "cyan"), (self.times, row.times, "magenta")):
            if text:
                space = max(stop - at, _GAP)
                line, at = line + " " * space + click.style(text, fg=colour), at + space + len(text)
        return line + " " * max(self.end - at - len(row.nbytes), _GAP) + row.nbytes


def _facts(report: TreeReport) -> Iterator[str]:
    """Where it is, then what it is, as far as it can be told."""
    axis = None if report.scan_axis is None else f"scan axis {report.scan_axis}"
    step = None if report.step is None else f"step {report.step}"
    facts = (report.format, report.kind, report.flavour, axis, step)
    yield click.style(printable(report.path), bold=True)
    yield ", ".join(fact for fact in facts if fact)
    if report.custom_metadata:
        yield f"custom metadata {json.dumps(report.custom_metadata, default=str)}"


def _totals(report: TreeReport) -> str:
    number = report.num_parameters
    parameters = f"{count(number)} parameters ({number:,})" if number >= 1000 else f"{number} parameters"
    return f"{counted(report.num_arrays, 'array')}, {parameters}, {disk(report.nbytes)}"
