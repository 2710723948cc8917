"""Open everything, as all other commands do. Failures are reported only if no other check explains them."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.registry import open_tree
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for location in inventory.checkpoints:
        yield from _open_findings(location, inventory.read)


def _open_findings(location: Location, read: ReadOptions) -> Iterator[Finding]:
    try:
        open_tree(location, read)
    except CheckpointError as error:
        result = finding_of(error, location, reason="no command can open it")
        where = "" if result.location == str(location) else f"{result.location}: "
        yield Finding(result.level, str(location), where + result.what, result.consequence, result.hint)


CHECK = Check("opens", "any other reason why a checkpoint cannot be opened", _examine)
