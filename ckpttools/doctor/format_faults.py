"""A check for each format that looks for faults in its own files: see `formats.base.TellsFaults`."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.doctor.base import Check, Finding, finding_of
from ckpttools.doctor.inventory import Inventory
from ckpttools.formats.base import TellsFaults
from ckpttools.formats.registry import faults_in, formats


def format_checks() -> Iterator[Check]:
    """The checks of all formats that have one."""
    for name, format in formats().items():
        if isinstance(format, TellsFaults):
            yield _check(name, format)


def _check(name: str, format: TellsFaults) -> Check:
    def look(inventory: Inventory) -> Iterator[Finding]:
        for place in inventory.places(name):
            for error in faults_in(format, place, inventory.read):
                yield finding_of(error, place, why="none of its tensors can be trusted")

    return Check(name, format.looks_for, look)
