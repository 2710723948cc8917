"""Reports as tables: data frames for programs, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, ClassVar

from ckpttools.core.message_terms import render_all
from ckpttools.core.text import format_disk, printable

MAX_ROWS = 200
"""Maximum number of rows that a notebook shows."""


class Tabular:
    """A report with rows. Notebooks show it as a table, and `to_pandas` returns its rows.

    Attributes:
        rows_field: Name of the field with the rows, which are dataclasses.
    """

    __slots__ = ()
    rows_field: ClassVar[str] = "arrays"

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each array, step or finding of the report.

        Fields of nested dataclasses are columns such as "statistics.max".

        Raises:
            MissingPackageError: Pandas is not installed.
        """
        from ckpttools.core.extras import require_package

        require_package("pandas", "to_pandas()")
        from pandas import DataFrame

        return DataFrame([dict(_cells(row)) for row in self._rows()])

    def _rows(self) -> tuple[Any, ...]:
        return tuple(render_all(getattr(self, self.rows_field)))

    def _repr_html_(self) -> str:
        rows = self._rows()
        visible_rows = [dict(_cells(row)) for row in rows[:MAX_ROWS]]
        # A row with a nested dataclass has columns that other rows lack.
        columns = [
            name
            for name in {name: None for row in visible_rows for name in row}
            if _is_shown(name, visible_rows)
        ]
        head = repr(self).partition("\n")[0].strip("<>:")
        return _table_html(
            head, columns, [[row.get(name) for name in columns] for row in visible_rows], len(rows)
        )


def _cells(row: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a row. Fields of nested dataclasses have dotted names."""
    for field in fields(row):
        value = getattr(row, field.name)
        if is_dataclass(value) and not hasattr(value, "_repr_html_"):
            yield from _cells(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _is_shown(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a column has any values."""
    return any(row.get(column) not in (None, (), {}) for row in rows)


def _table_html(head: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], total: int) -> str:
    """Return rows as an HTML table with a text above it.

    Args:
        head: Text above the table.
        columns: Headings.
        rows: Cells of the rows to show.
        total: Number of all rows, including hidden ones.
    """
    align = 'style="text-align:left;vertical-align:top"'
    headings = "".join(f"<th {align}>{text_html(name.rpartition('.')[2])}</th>" for name in columns)
    cells = (map(_cell_html, columns, row) for row in rows)
    body = "".join(f"<tr>{''.join(f'<td {align}>{cell}</td>' for cell in row)}</tr>" for row in cells)
    more = f"<div>… {total - len(rows):,} more rows; <code>to_pandas()</code> has all</div>"
    table = f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div>{text_html(head)}</div>{table}{more if total > len(rows) else ''}"


def _cell_html(column: str, value: Any) -> str:
    if value is None:
        return ""
    if hasattr(value, "_repr_html_"):
        return str(value._repr_html_())
    if isinstance(value, int) and not isinstance(value, bool):
        return format_disk(value) if column.rpartition(".")[2] == "nbytes" else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return text_html(", ".join(f"{key}: {item}" for key, item in value.items()))
    return text_html(str([*value]) if isinstance(value, tuple) else str(value))


def text_html(text: str) -> str:
    """Escape a text for HTML; control characters are written as escapes."""
    return escape(printable(text))
