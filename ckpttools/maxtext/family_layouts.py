"""Convert the rows of a family to the layout of a MaxText version; they are written for the newest one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.row import Layers
from ckpttools.maxtext.versions import GLOBAL, LAYER, LOCAL, NEWEST, VERSIONS, Version
from ckpttools.model_families.family import Family


def family_in(family: Family, version: Version) -> Family:
    """Return a family in the layout of a MaxText version."""
    newest = VERSIONS[NEWEST]
    if family.name not in newest.stacked_by_kind or family.name in version.stacked_by_kind:
        return family
    return replace(family, layers=tuple(map(_stack_by_position, family.layers)))


def _stack_by_position(group: Layers) -> Layers:
    """Replace stacks by kind with one stack for each position in the cycle."""
    above, _, kind = group.scanned.rpartition(".")
    if kind == LOCAL:
        (cycle, position) = group.stacked
        return replace(group, scanned=f"{above}.{LAYER}_{{{position}}}", stacked=(cycle,))
    if kind == GLOBAL:
        (number,) = parse_key(group.left).fields
        return replace(group, scanned=f"{above}.{LAYER}_{number.offset}")
    return group


def family_as_stored(family: Family, names: Collection[str]) -> Family:
    """Return a family in the layout that matches most names of a tree; by default, the newest.

    Args:
        family: A family in the layout of the newest version.
        names: The names of parameters, with keys joined by dots.
    """

    def fit(base: Family) -> int:
        return sum(row.left.key.first() in names for row in base.all_rows(0))

    known = layouts_of(family)
    return family if len(known) == 1 else max(known, key=fit)


def layouts_of(family: Family) -> list[Family]:
    """Return a family in each distinct layout of all versions, the newest first."""
    known: list[Family] = []
    for version in VERSIONS.values():
        known += [candidate] if (candidate := family_in(family, version)) not in known else []
    return known
