"""What a checkpoint holds: its kind, and every array with its shape, dtype and role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ckpttools.ir.kinds import kind_of, role
from ckpttools.ir.tree import Tree, spelled


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """One array.

    Attributes:
        path: keys joined by "/"; in formats without a tree, such as safetensors, the name as it is.
        role: "parameter", "optimizer" or "other".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    role: str


@dataclass(frozen=True, slots=True)
class TreeReport:
    """A checkpoint without its numbers.

    Attributes:
        path: what was opened, down to the item.
        format: name of the format.
        kind, flavour, scan_axis: as `ckpttools.ir.kinds.KindOfTree`; None where they cannot be told.
        step: training step, or None.
        num_arrays, num_parameters, nbytes: of `arrays`; parameters are the elements of those of that role.
        custom_metadata: what the user stored beside the arrays.
        arrays: in the checkpoint's order.
    """

    path: str
    format: str | None
    kind: str | None
    flavour: str | None
    scan_axis: int | None
    step: int | None
    num_arrays: int
    num_parameters: int
    nbytes: int
    custom_metadata: Mapping[str, Any]
    arrays: tuple[ArrayReport, ...]


def inspect_tree(tree: Tree, pattern: str = "*") -> TreeReport:
    """Looks at a tree without reading any array.

    Args:
        tree: any checkpoint.
        pattern: shell pattern of the paths to report; the kind is told from all of them.
    """
    arrays = tuple(each for each in _reports(tree) if fnmatchcase(each.path, pattern))
    kind, metadata = kind_of(tree), tree.metadata
    return TreeReport(
        path=metadata.place,
        format=metadata.format,
        kind=kind.kind,
        flavour=kind.flavour,
        scan_axis=kind.scan_axis,
        step=metadata.step,
        num_arrays=len(arrays),
        num_parameters=sum(prod(each.shape) for each in arrays if each.role == "parameter"),
        nbytes=sum(each.nbytes for each in arrays),
        custom_metadata=dict(metadata.custom),
        arrays=arrays,
    )


def _reports(tree: Tree) -> Iterator[ArrayReport]:
    for path, array in tree.arrays.items():
        # What nothing stores, a constant, counts as it would in memory.
        nbytes = -(-array.size * (array.stored_bits or 8 * array.dtype.itemsize) // 8)
        yield ArrayReport(spelled(path), array.shape, array.dtype.name, nbytes, role(path))
