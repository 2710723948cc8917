"""Counters that can be merged in any order: sums and maxima."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# Prefix of counters that are merged by maximum instead of sum.
LARGEST = "largest_"


def add_counts(tally: MutableMapping[str, float], counts: Mapping[str, float]) -> None:
    """Add the counters of a part to a tally, in place."""
    for name, number in counts.items():
        if name not in tally:
            tally[name] = number
        elif name.startswith(LARGEST):
            tally[name] = max(tally[name], number)
        else:
            tally[name] += number
