"""Rows in columns that fit the terminal: drawn here, since importing rich takes longer than most commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

_GAP = 2
# The first column keeps so many characters; longer names get a line to themselves.
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        head: its title.
        right: numbers end at its right edge.
        spare: where the terminal is narrow, columns go that can be spared, the highest number first; 0 stays.
    """

    head: str
    right: bool = False
    spare: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None) -> Iterator[str]:
    """A line of titles and one or two for each row. Columns without any cell are left out.

    Args:
        columns: the first is the name of a row.
        rows: as many cells each as there are columns.
        room: columns of the terminal; None for as many as are needed.
    """
    if not rows:
        return
    used = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    widths = {k: max([len(columns[k].head), *(len(row[k]) for row in rows)]) for k in used}
    if room is not None:
        used = _fitting(columns, used, widths, room)
        rest = sum(widths[k] for k in used[1:]) + _GAP * (len(used) - 1)
        widths[used[0]] = min(widths[used[0]], max(_LEAST, len(columns[used[0]].head), room - rest))
    kept = [columns[k] for k in used]
    sizes = [widths[k] for k in used]
    yield click.style(_line([column.head for column in kept], kept, sizes), dim=True)
    for row in rows:
        yield from _lines([row[k] for k in used], kept, sizes)


def _fitting(columns: Sequence[Column], used: list[int], widths: dict[int, int], room: int) -> list[int]:
    """The columns that are left when those that can be spared have gone, as far as they must."""
    kept = list(used)
    for spared in sorted(used, key=lambda k: -columns[k].spare):
        least = max(_LEAST, len(columns[used[0]].head))
        if least + sum(widths[k] + _GAP for k in kept[1:]) <= room or not columns[spared].spare:
            break
        kept.remove(spared)
    return kept


def _lines(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    if len(row[0]) <= widths[0]:
        yield _line(row, columns, widths)
        return
    yield row[0]
    yield _line(["", *row[1:]], columns, widths)


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(row, columns, widths, strict=True)
    ]
    return (" " * _GAP).join(padded).rstrip()
