"""Scales of quantised weights by their values, and MaxText's own FP8: for the check of quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import ERROR, INFO, WARNING, Finding, pasted
from ckpttools.diagnosis.inventory import Inventory, ListedItem
from ckpttools.formats.registry import open_tree
from ckpttools.quantized.dequantizable import shaped_weights_in, weights_in
from ckpttools.quantized.scales import is_narrow
from ckpttools.quantized.stored_values import value_faults
from ckpttools.quantized.tree import quantized_in
from ckpttools.stores.location import Location

_FETCH = "fetch the checkpoint again, or restore it from another copy"


def value_findings(tree: Tree, location: str) -> Iterator[Finding]:
    """Shapes of weights that can be read, and the values of scales that lie on this machine.

    Raises:
        CheckpointError: they cannot be read.
    """
    weights = shaped_weights_in(tree)
    result = value_faults(tree, weights.readable.values())
    # What needs no reading is said already.
    shapes = [fault for fault in weights.faults if fault not in weights_in(tree).faults]
    damaged = (*shapes, *result.damaged)
    if damaged:
        why = "no numbers can be made of the weights; a program that multiplies anyway computes nonsense"
        yield Finding(ERROR, location, f"quantised weights are damaged: {_some(damaged)}", why, _FETCH)
    if result.not_positive:
        what = f"scales are zero or negative: {_some(result.not_positive)}"
        why = "the numbers of their blocks vanish, or change their signs; quantisers write positive ones"
        yield Finding(WARNING, location, what, why, _FETCH)


def native_findings(inventory: Inventory) -> Iterator[Finding]:
    """FP8 in MaxText's own layout, which no configuration need speak of."""
    for item in inventory.items:
        if not (item.is_unfinished or item.is_part_of_a_host) and _may_be_quantised(item):
            # Other checks say why an item cannot be opened.
            with suppress(CheckpointError):
                yield from _native(item, inventory)


def _may_be_quantised(item: ListedItem) -> bool:
    """Whether an item is worth opening: it has matrices of few bits."""
    arrays = [table.array for table in item.tables.tables.values()] if item.tables else []
    return any(len(array.shape) > 1 and is_narrow(array.dtype) for array in arrays)


def _native(item: ListedItem, inventory: Inventory) -> Iterator[Finding]:
    tree = open_tree(item.path, inventory.read)
    weights = quantized_in(tree).weights
    if not any(weight.scales for weight in weights.values()):
        return
    read = weights_in(tree)
    if read.faults:
        what = f"quantised weights and scales do not fit: {_some(read.faults)}"
        why = "the numbers mean nothing without scales that fit"
        yield Finding(ERROR, str(item.path), what, why, _FETCH)
        return
    yield _kept(item.path, len(read.readable))
    yield from value_findings(tree, str(item.path))


def _kept(location: Location, count: int) -> Finding:
    what = f"{count} weight{'s' * (count != 1)} in FP8, each with its scales"
    why = (
        "MaxText's training multiplies them when it loads them (load_parameters_path); from_pretrained of "
        "0.2.5 (SFT, DPO, distillation, decoding) ignores the scales, without an error"
    )
    command = f"ckpt cast {pasted(location)} DST --dtype bfloat16"
    return Finding(INFO, str(location), what, why, f"`{command}` dequantises them", command=command)


def _some(lines: Sequence[str]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")
