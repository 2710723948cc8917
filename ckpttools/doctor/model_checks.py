"""The library of checks over each model at a path: one check of doctor for each."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.checks import base, registry
from ckpttools.doctor.base import Check, Finding
from ckpttools.doctor.inventory import Inventory


def model_checks() -> Iterator[Check]:
    """Return the checks of the library as checks of doctor."""
    return map(_check, registry.checks())


def _check(check: base.ModelCheck) -> Check:
    def look(inventory: Inventory) -> Iterator[Finding]:
        for model in inventory.models:
            yield from map(_finding, check.run(model))

    return Check(check.name, check.summary, look)


def _finding(found: base.ModelFinding) -> Finding:
    return Finding(found.level, found.location, found.what, found.why, found.hint, command=found.command)
