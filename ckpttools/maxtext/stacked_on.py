"""The axis on which the layers of parameters are stacked, by their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.families.family import Family
from ckpttools.maxtext.layout import SCAN_AXIS
from ckpttools.maxtext.view import view_of


def stored_scan_axis(family: Family, arrays: Mapping[str, LazyArray], asked: int | None) -> int | None:
    """The axis on which layers are stacked, None where each has arrays of its own."""
    stacked, single = (
        sum(key.first() in arrays for key in {row.left.key for row in family.all_rows(axis)})
        for axis in (SCAN_AXIS, None)
    )
    if stacked <= single:
        return None
    if asked is not None:
        return asked
    found = view_of(Tree({tuple(key.split(".")): array for key, array in arrays.items()})).scan_axis
    return SCAN_AXIS if found is None else found
