"""What to do with what was written, on stderr, below the closing line."""

from __future__ import annotations

from ckpttools.cli.output import labelled, prose_width, say
from ckpttools.stores.location import Location

_COLUMN = 9


def print_next(destination: Location) -> None:
    """One line of what loads it, one of what may surprise; nothing for what is no model."""
    from ckpttools.api.next_steps import next_steps

    result = next_steps(destination)
    if result is None:
        return
    lines = [f"{'next' if not number else '':<{_COLUMN}}{use}" for number, use in enumerate(result.uses)]
    for surprise in result.surprises:
        lines += labelled("note", surprise, _COLUMN, prose_width())
    say(*lines)
