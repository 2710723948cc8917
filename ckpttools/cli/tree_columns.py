"""Rows of a tree in aligned columns, as wide as they need to be and as the terminal allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import click

from ckpttools.cli.output import wrapped
from ckpttools.cli.units import count, disk

_GAP = 2
# Narrower than that no part of a name is put on a line of its own.
_SHORTEST = 20
_HEADS = ("", "dtype[shape]", "", "elements", "bytes", "share")
_NAME, _TYPE, _TIMES, _ELEMENTS, _BYTES, _SHARE = range(len(_HEADS))
_TO_THE_RIGHT = frozenset((_ELEMENTS, _BYTES, _SHARE))


@dataclass(frozen=True, slots=True)
class Row:
    """One line.

    Attributes:
        way: for each level that leads to it whether the branch there is the last of its siblings.
        name, type, times: what is written in the first columns.
        num_elements, nbytes: of all that the line stands for.
        share: part of all bytes, from 0 to 1.
        is_subtree: whether it has no array of its own.
    """

    way: tuple[bool, ...]
    name: str
    type: str
    times: str
    num_elements: int
    nbytes: int
    share: float
    is_subtree: bool = False


@dataclass(frozen=True, slots=True)
class _Guides:
    """The lines that lead to names: past a level, past a finished one, to a branch, to the last one."""

    past: str
    done: str
    branch: str
    last: str

    def along(self, way: tuple[bool, ...]) -> str:
        """What stands before a name."""
        return self.past_all(way[:-1]) + (self.last if way[-1] else self.branch) if way else ""

    def past_all(self, way: tuple[bool, ...]) -> str:
        """What stands below a name, where its line goes on."""
        return "".join(self.done if last else self.past for last in way)


_WIDE, _NARROW = _Guides("│   ", "    ", "├── ", "└── "), _Guides("│ ", "  ", "├ ", "└ ")
_ALL = (_NAME, _TYPE, _TIMES, _ELEMENTS, _BYTES, _SHARE)
_MOST = (_NAME, _TYPE, _TIMES, _BYTES, _SHARE)
_LEAST = (_NAME, _TYPE, _TIMES, _BYTES)
# What is tried, best first; the last one whatever comes.
_CHOICES = ((_WIDE, _ALL), (_WIDE, _MOST), (_NARROW, _MOST), (_NARROW, _LEAST))


def table(rows: Sequence[Row], room: int | None) -> Iterator[str]:
    """The rows under their heads; a row that is too long has all but its name on a line below that.

    Args:
        rows: at least one.
        room: columns of the terminal; None for no limit.
    """
    cells, most = [_cells(row) for row in rows], sys.maxsize if room is None else room
    guides, stops = _layout(rows, cells, most)
    yield click.style(_line(_placed(_HEADS, stops), _plain), dim=True)
    for row, texts in zip(rows, cells, strict=True):
        yield from _lines(row, texts, guides, stops, most)


Texts = tuple[str, ...]
"""What is written in each of the columns."""


def _cells(row: Row) -> Texts:
    return (row.name, row.type, row.times, count(row.num_elements), disk(row.nbytes), _percent(row.share))


def _percent(share: float) -> str:
    """Two digits; nothing for what is next to nothing."""
    if share < 0.0005:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


@dataclass(frozen=True, slots=True)
class _Stop:
    """A column, and where texts in it begin; or end, where they are set to the right."""

    column: int
    at: int


def _layout(rows: Sequence[Row], cells: Sequence[Texts], room: int) -> tuple[_Guides, list[_Stop]]:
    """The best of the choices for which the room suffices."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for guides, columns in _CHOICES:
        name = max(len(guides.along(row.way)) + len(row.name) for row in rows)
        shown = {column: _width(column, widths[column]) for column in columns if widths[column]}
        shown[_NAME] = name
        total = sum(shown.values()) + _GAP * (len(shown) - 1)
        if total <= room:
            return guides, list(_stops(shown))
    # Longer names and types push the next cell along, as far as there is space.
    for column, least in ((_NAME, room // 3), (_TYPE, 0), (_NAME, 0)):
        total = sum(shown.values()) + _GAP * (len(shown) - 1)
        if column in shown:
            shown[column] = min(shown[column], max(shown[column] - total + room, least))
    return guides, list(_stops(shown))


def _width(column: int, widest: int) -> int:
    return max(widest, len(_HEADS[column]))


def _stops(widths: Mapping[int, int]) -> Iterator[_Stop]:
    begin = 0
    for column, width in widths.items():
        yield _Stop(column, begin + width if column in _TO_THE_RIGHT else begin)
        begin += width + _GAP


def _lines(row: Row, texts: Texts, guides: _Guides, stops: Sequence[_Stop], room: int) -> Iterator[str]:
    """One line where it fits, or the name and what is to say of it."""
    style = _subtree if row.is_subtree else _array
    guide, below = guides.along(row.way), guides.past_all(row.way) + " " * _GAP
    whole = _placed(texts, stops, len(guide))
    if _length(whole, guide) <= room:
        yield _guided(guide, _line(whole, style))
        return
    rest = _placed(("", *texts[1:]), stops, len(below))
    if _length(rest, below) > room:
        at_once = [replace(stop, at=0) if stop.column == _TYPE else stop for stop in stops]
        rest = _placed(("", *texts[1:]), at_once, len(below))
    first, *more = wrapped(row.name, max(room - len(guide), _SHORTEST))
    yield _guided(guide, style(_NAME, first))
    for part in more:
        yield _guided(below, style(_NAME, part))
    yield _guided(below, _line(rest, style))


def _guided(guide: str, line: str) -> str:
    return click.style(guide, dim=True) + line if guide else line


Cells = Sequence[tuple[str, int, str]]
"""Of each cell of a line that is not empty the space before it, its column, and its text."""


def _placed(texts: Texts, stops: Iterable[_Stop], end: int = 0) -> Cells:
    """The cells of a line that begins after `end` characters."""
    found: list[tuple[str, int, str]] = []
    for stop in stops:
        text = texts[stop.column]
        if not text:
            continue
        begin = stop.at - len(text) if stop.column in _TO_THE_RIGHT else stop.at
        space = max(begin - end, _GAP if found else 0)
        found.append((" " * space, stop.column, text))
        end += space + len(text)
    return found


def _length(cells: Cells, guide: str) -> int:
    return len(guide) + sum(len(space) + len(text) for space, _, text in cells)


def _line(cells: Cells, style: _Style) -> str:
    return "".join(space + style(column, text) for space, column, text in cells)


_Style = Callable[[int, str], str]


def _plain(column: int, text: str) -> str:
    return text


def _subtree(column: int, text: str) -> str:
    if column == _NAME:
        return click.style(text, bold=True)
    return click.style(text, dim=True) if column == _TYPE else text


def _array(column: int, text: str) -> str:
    if column == _TYPE:
        return click.style(text, fg="cyan")
    return click.style(text, fg="magenta") if column == _TIMES else text
