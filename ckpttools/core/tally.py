"""Numbers that are gathered from parts of work, in any order: sums, and largest values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# What names of numbers begin with of which the largest counts, not the sum.
LARGEST = "largest_"


def add_counts(tally: MutableMapping[str, float], told: Mapping[str, float]) -> None:
    """Adds what a part tells to a tally, in place."""
    for name, number in told.items():
        if name not in tally:
            tally[name] = number
        elif name.startswith(LARGEST):
            tally[name] = max(tally[name], number)
        else:
            tally[name] += number
