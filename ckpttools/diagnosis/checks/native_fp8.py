"""Report weights in FP8 in MaxText's own layout, which need no configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ckpttools.checks.quantization import first_of_lines, value_findings
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import call
from ckpttools.diagnosis.base import ERROR, INFO, Check, Finding, as_finding
from ckpttools.diagnosis.inventory import Inventory, ListedItem
from ckpttools.formats.registry import open_tree
from ckpttools.quantized.scales import is_narrow
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for item in inventory.items:
        if not (item.is_unfinished or item.is_part_of_a_host) and _may_be_quantized(item):
            # Other checks report why an item cannot be opened.
            with suppress(CheckpointError):
                yield from _check_item(item, inventory)


def _may_be_quantized(item: ListedItem) -> bool:
    """Return whether an item has matrices of few bits, and is therefore worth opening."""
    arrays = [table.array for table in item.tables.tables.values()] if item.tables else []
    return any(len(array.shape) > 1 and is_narrow(array.dtype) for array in arrays)


def _check_item(item: ListedItem, inventory: Inventory) -> Iterator[Finding]:
    view = quantized_view(open_tree(item.path, inventory.read))
    if not any(weight.scales for weight in view.weights.values()):
        return
    if view.faults:
        problem = f"quantized weights and scales do not match: {first_of_lines(view.faults)}"
        reason = "without matching scales, the values of the weights are unknown"
        hint = "fetch the checkpoint again, or restore it from another copy"
        yield Finding(ERROR, str(item.path), problem, reason, hint)
        return
    yield _supported_finding(item.path, len(view.readable))
    yield from map(as_finding, value_findings(view, str(item.path)))


def _supported_finding(location: Location, count: int) -> Finding:
    problem = f"{count} weight{'s' * (count != 1)} in FP8, each with its scales"
    reason = (
        "MaxText's training multiplies them when it loads them (load_parameters_path); from_pretrained of "
        "0.2.5 (SFT, DPO, distillation, decoding) ignores the scales, without an error"
    )
    command = call("cast", location, "DST", dtype="bfloat16")
    return Finding(INFO, str(location), problem, reason, f"`{command}` dequantizes them", command=command)


CHECK = Check("native-fp8", "weights in FP8 in MaxText's own layout, and their scales", _examine)
