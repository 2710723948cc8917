"""What quantising has lost, as a table of the worst arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.cli.output import width
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.text import plural, printable
from ckpttools.quantized.errors import QuantizationError, total

_WORST = 5
_COLUMNS = (
    Column("worst arrays"),
    Column("rms / rms of values", right=True),
    Column("max error", right=True),
)


def error_lines(errors: Mapping[str, QuantizationError]) -> Iterator[str]:
    """The worst arrays, and all together.

    Args:
        errors: by the names of arrays, the worst first.
    """
    if not errors:
        return
    together = total(errors)
    if not together.largest:
        yield f"{plural(len(errors), 'array')} quantised without any error: each value is kept"
        return
    worst = [(printable(name), *_numbers(errors[name])) for name in list(errors)[:_WORST]]
    both = (f"all {plural(len(errors), 'array')}", *_numbers(together))
    yield from draw_table(_COLUMNS, [*worst, both], width())


def _numbers(error: QuantizationError) -> tuple[str, str]:
    return f"{error.relative:.4f}", f"{error.largest:.3g}"
