"""Steps with several trees, of which tools need one named."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.doctor.base import INFO, Check, Finding, pasted
from ckpttools.doctor.inventory import Inventory


def _look(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        items = [item for item in inventory.items if item.step == step.path]
        if len(items) > 1:
            what = f"{len(items)} items: {', '.join(item.path.name for item in items)}"
            why = "commands that open one tree cannot choose"
            command = f"ckpt inspect tree {pasted(items[0].path)}"
            yield Finding(INFO, str(step.path), what, why, f"name one: {command}", command=command)


CHECK = Check("items", "several items in a step, where one must be named", _look)
