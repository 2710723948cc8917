"""Read the values of all arrays, on request."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError, MemoryBudgetError
from ckpttools.core.memory_limit import limit_memory
from ckpttools.diagnosis.base import Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.registry import open_tree


def _examine(inventory: Inventory) -> Iterator[Finding]:
    if inventory.values is None:
        return
    from ckpttools.diagnosis.values import value_findings

    for location in inventory.checkpoints:
        try:
            with limit_memory(inventory.values.memory):
                tree = open_tree(location, inventory.read)
        except MemoryBudgetError:
            raise
        except CheckpointError:
            continue  # Another check reports this.
        try:
            with limit_memory(inventory.values.memory):
                yield from value_findings(tree, location, inventory.values)
        except MemoryBudgetError:
            raise
        except CheckpointError as error:
            yield finding_of(error, location, reason="its values cannot be read")


CHECK = Check(
    "values",
    "on request: NaN and infinite values, weights of nothing but zeros, repeated layers, unsound scales",
    _examine,
)
