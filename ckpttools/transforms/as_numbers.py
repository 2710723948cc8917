"""Quantised checkpoints as the numbers that they stand for, where they are looked at or compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.text import array_count
from ckpttools.quantized.logical import RESULTS, logical
from ckpttools.quantized.readable import shaped_weights_in, weights_in
from ckpttools.quantized.schemes.base import Weight
from ckpttools.quantized.tree import quantized_in


class Numbers(NamedTuple):
    """A tree of plain numbers, and what was done to get it; empty where nothing was."""

    tree: Tree
    remark: str = ""


def as_numbers(tree: Tree, dtype: DType | None = None) -> Numbers:
    """The numbers of a tree; the tree as it is where not all of its quantised weights can be dequantised.

    Args:
        tree: any checkpoint.
        dtype: of the numbers; None for bfloat16.
    """
    found = shaped_weights_in(tree)
    if found.faults or not found.readable:
        return Numbers(tree)
    made = logical(tree, dtype, weights=found)
    count, schemes = array_count(made.weights), _schemes(made.weights.values())
    to = next(made.tree.arrays[path].dtype for path in made.weights)
    return Numbers(made.tree, f"{count} dequantised from {schemes} to {to}")


def side_by_side(a: Tree, b: Tree) -> tuple[Numbers, Numbers]:
    """Two trees that can be compared: as they are where both store their weights alike, else as numbers.

    Those of one are in the dtype that the other has most of. Where one has codes of which no numbers can be
    made, because nothing says how, codes of both are compared.
    """
    if _stored_alike(a, b) or _has_only_codes(a) or _has_only_codes(b):
        return Numbers(a), Numbers(b)
    return as_numbers(a, _main_dtype(b)), as_numbers(b, _main_dtype(a))


def _stored_alike(a: Tree, b: Tree) -> bool:
    """Whether the same weights are quantised in the same way, if any are."""
    return _ways(weights_in(a).readable.values()) == _ways(weights_in(b).readable.values())


def _has_only_codes(tree: Tree) -> bool:
    """Whether it has quantised weights of which no numbers can be made."""
    return bool(weights_in(tree).faults and quantized_in(tree).weights)


def _ways(weights: Collection[Weight]) -> set[tuple[str, str, str]]:
    return {(each.name, each.codes, each.scheme) for each in weights}


def _main_dtype(tree: Tree) -> DType | None:
    """The dtype of most elements of those that products are made in; None where there is none."""
    count: Counter[str] = Counter()
    for array in tree.arrays.values():
        count[array.dtype.name] += array.size
    found = [name for name, _ in count.most_common() if name in RESULTS]
    return DTYPES[found[0]] if found and not weights_in(tree).readable else None


def _schemes(weights: Collection[Weight]) -> str:
    return ", ".join(dict.fromkeys(each.scheme for each in weights))
