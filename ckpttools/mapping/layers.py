"""Layers: rows that repeat under a numbered prefix, and how scanning stacks them.

A scanned model keeps the layers of a group in one array, stacked on further axes from the scan axis on;
an unscanned one keeps each under a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.row import Row


@dataclass(frozen=True, slots=True)
class Layers:
    """A group of layers that have the same rows.

    Attributes:
        right: prefix of right keys, `model.layers.{layer}`.
        left: prefix of left keys of an unscanned model, `decoder.layers_{layer}`.
        scanned: prefix of left keys of a scanned model, `decoder.layers`; empty for layers of an incomplete
            cycle, where only complete cycles are scanned.
        stacked: axes that a scanned model has in its arrays, from the scan axis on.
        rows: what is below these prefixes.
        when, unless: flags on which the group exists, as a row's.
    """

    right: str
    left: str
    scanned: str
    stacked: tuple[str, ...]
    rows: tuple[Row, ...]
    when: str = ""
    unless: str = ""

    def all_rows(self, scan_axis: int | None) -> Iterator[Row]:
        """The rows with their prefixes, for layers stacked on `scan_axis`, or for unscanned ones."""
        if scan_axis is not None and not self.scanned:
            return
        above = parse_key(self.right)
        left = parse_key(self.left if scan_axis is None else self.scanned)
        stacked = () if scan_axis is None else self.stacked
        for row in self.rows:
            yield replace(
                row,
                left=row.left.below(left, stacked, scan_axis or 0),
                right=row.right.below(above),
                when=f"{self.when} {row.when}".strip(),
                unless=f"{self.unless} {row.unless}".strip(),
                above="",
            )
