"""Tables that fit the terminal. They are drawn here because importing rich takes longer than most commands.

If there is too little room, optional columns are dropped first. Then the first column gets narrower, and
longer names get their own lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ckpttools.cli.output import styled, wrap
from ckpttools.core.dataclass import dataclass

_COLUMN_GAP = 2
# Minimum width of the first column of a table.
_MIN_WIDTH = 4
# Minimum width at which names in a tree are split.
_MIN_TEXT_WIDTH = 20
# Widths that can be dropped like columns: no width, and the guides.
_NONE, _GUIDES = -1, -2

Styles = Mapping[int, Mapping[str, Any]]
"""Styles of cells: arguments of `click.style` by column index."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        head: Title of the column.
        right: Whether the texts are right-aligned.
        spare: On narrow terminals, columns with the highest value are dropped first; those with 0 are kept.
    """

    head: str
    right: bool = False
    spare: int = 0


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One row of a tree.

    Attributes:
        cells: The cells, starting with the name.
        way: For each level above the row, whether the branch there is the last of its siblings.
        styles: Styles of the cells.
    """

    cells: Sequence[str]
    way: tuple[bool, ...] = ()
    styles: Styles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Guides:
    """Guide lines before names: past a level, past a finished level, to a branch, and to the last branch."""

    past: str
    done: str
    branch: str
    last: str

    def prefix(self, continues: tuple[bool, ...]) -> str:
        """Return the guides before a name."""
        return (
            self.continuation_prefix(continues[:-1]) + (self.last if continues[-1] else self.branch)
            if continues
            else ""
        )

    def continuation_prefix(self, continues: tuple[bool, ...]) -> str:
        """Return the guides for the continuation lines below a name."""
        return "".join(self.done if last else self.past for last in continues)


_WIDE, _NARROW = _Guides("│   ", "    ", "├── ", "└── "), _Guides("│ ", "  ", "├ ", "└ ")


def draw_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None) -> Iterator[str]:
    """Draw a header line and one or two lines for each row, without empty columns.

    Args:
        columns: The columns, starting with the name of a row.
        rows: The rows, with one cell per column.
        room: Columns of the terminal; None for no limit.
    """
    if not rows:
        return
    widths, limit = _widths(columns, rows), sys.maxsize if room is None else room
    # The name column is missing if a single array has no name.
    name = min(widths)
    least = max(_MIN_WIDTH, len(columns[name].head))
    for k in (_NONE, *_shrink_columns(columns)):
        widths.pop(k, None)
        rest = _total_width(widths) - widths[name]
        if least + rest <= limit:
            break
    widths[name] = min(widths[name], max(least, limit - rest))
    stops = list(_stops(columns, widths))
    yield _titles(columns, stops)
    for row in rows:
        if len(row[name]) <= widths[name]:
            yield _text(_place_text(row, stops))
        else:
            yield row[name]
            yield _text(_place_text([*row[:name], "", *row[name + 1 :]], stops))


def draw_tree(columns: Sequence[Column], rows: Sequence[TreeRow], room: int | None) -> Iterator[str]:
    """Draw a tree. Long cells push later ones to the right if there is room.

    The guides get narrower before the last column is dropped.

    Args:
        columns: The columns, starting with name and type.
        rows: One or more rows.
        room: Columns of the terminal; None for no limit.
    """
    limit = sys.maxsize if room is None else room
    widths, guides = _widths(columns, [row.cells for row in rows]), _WIDE
    *first, last = _shrink_columns(columns)
    for k in (_NONE, *first, _GUIDES, last):
        guides = _NARROW if k == _GUIDES else guides
        widths.pop(k, None)
        widths[0] = max(len(guides.prefix(row.way)) + len(row.cells[0]) for row in rows)
        if _total_width(widths) <= limit:
            break
    for column, least in ((0, limit // 3), (1, 0), (0, 0)):
        if column in widths:
            widths[column] = min(widths[column], max(widths[column] - _total_width(widths) + limit, least))
    stops = list(_stops(columns, widths))
    yield _titles(columns, stops)
    for row in rows:
        yield from _branch_lines(row, guides, stops, limit)


def _widths(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> dict[int, int]:
    """Return the width of each column that has cells, by index."""
    widest = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return {k: max(item, len(columns[k].head)) for k, item in enumerate(widest) if item}


def _shrink_columns(columns: Sequence[Column]) -> list[int]:
    """Return the optional columns in the order in which they are dropped."""
    return sorted((k for k, item in enumerate(columns) if item.spare), key=lambda k: -columns[k].spare)


def _total_width(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _COLUMN_GAP * (len(widths) - 1)


@dataclass(frozen=True, slots=True)
class _Stop:
    """A column, with the position where its texts start or, if right-aligned, end."""

    column: int
    at: int
    right: bool


def _stops(columns: Sequence[Column], widths: Mapping[int, int]) -> Iterator[_Stop]:
    begin = 0
    for k, width in widths.items():
        yield _Stop(k, begin + width if columns[k].right else begin, columns[k].right)
        begin += width + _COLUMN_GAP


def _titles(columns: Sequence[Column], stops: Sequence[_Stop]) -> str:
    return styled(_text(_place_text([column.head for column in columns], stops)), dim=True)


def _branch_lines(row: TreeRow, guides: _Guides, stops: Sequence[_Stop], room: int) -> Iterator[str]:
    """Return one line if it fits, otherwise the name with the other cells below it."""
    guide, below = guides.prefix(row.way), guides.continuation_prefix(row.way) + " " * _COLUMN_GAP
    line = _place_text(row.cells, stops, len(guide))
    if _visible_length(line, guide) <= room:
        yield _with_guide(guide, _text(line, row.styles))
        return
    rest = _place_text(("", *row.cells[1:]), stops, len(below))
    if _visible_length(rest, below) > room:
        at_once = [replace(stop, at=0) if stop.column == 1 else stop for stop in stops]
        rest = _place_text(("", *row.cells[1:]), at_once, len(below))
    first, *more = wrap(row.cells[0], max(room - len(guide), _MIN_TEXT_WIDTH))
    yield _with_guide(guide, _style_line(first, row.styles.get(0)))
    for part in more:
        yield _with_guide(below, _style_line(part, row.styles.get(0)))
    yield _with_guide(below, _text(rest, row.styles))


def _with_guide(guide: str, line: str) -> str:
    return styled(guide, dim=True) + line if guide else line


PlacedText = Sequence[tuple[str, int, str]]
"""A nonempty cell of a line: the space before it, its column, and its text."""


def _place_text(cells: Sequence[str], stops: Iterable[_Stop], end: int = 0) -> PlacedText:
    """Place the cells of a line that begins after `end` characters."""
    result: list[tuple[str, int, str]] = []
    for stop in stops:
        text = cells[stop.column]
        if not text:
            continue
        begin = stop.at - len(text) if stop.right else stop.at
        space = max(begin - end, _COLUMN_GAP if result else 0)
        result.append((" " * space, stop.column, text))
        end += space + len(text)
    return result


def _visible_length(placed: PlacedText, guide: str) -> int:
    return len(guide) + sum(len(space) + len(text) for space, _, text in placed)


def _text(placed: PlacedText, styles: Styles | None = None) -> str:
    cell_styles = styles or {}
    return "".join(space + _style_line(text, cell_styles.get(column)) for space, column, text in placed)


def _style_line(text: str, style: Mapping[str, Any] | None) -> str:
    return styled(text, **style) if style else text
