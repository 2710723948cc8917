"""Run a check for each format that can find faults in its own files; see `formats.base.SupportsFaults`."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.diagnosis.base import Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import SupportsFaults
from ckpttools.formats.known_formats import formats
from ckpttools.formats.registry import faults_in


def format_checks() -> Iterator[Check]:
    """Yield the checks of all formats that have one."""
    for name, format in formats().items():
        if isinstance(format, SupportsFaults):
            yield _check(name, format)


def _check(name: str, format: SupportsFaults) -> Check:
    def look(inventory: Inventory) -> Iterator[Finding]:
        for location in inventory.locations(name):
            for error in faults_in(format, location, inventory.read):
                yield finding_of(error, location, why="none of its tensors can be trusted")

    return Check(name, format.looks_for, look)
