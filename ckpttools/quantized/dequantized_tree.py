"""Trees in which quantized weights are replaced by their dequantized values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import distinct_arrays
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import Like, scheme, without_quantization
from ckpttools.quantized.decoding import array_of, result_of
from ckpttools.quantized.dequantizable import unreadable_error
from ckpttools.quantized.scales import last_key
from ckpttools.quantized.schemes.base import Weight
from ckpttools.quantized.view import DequantizedTree, quantized_view
from ckpttools.quantized.weights import Weights


def dequantize_tree(
    tree: Tree,
    weights: Weights,
    declared: Mapping[str, Any] | None,
    dtype: DType | None = None,
    like: Like = "float32",
) -> DequantizedTree:
    """Replace quantized weights by their dequantized values; arguments and errors as for `QuantizedView`."""
    if weights.faults:
        raise unreadable_error(weights, declared, tree.metadata.location)
    result = result_of(dtype)
    arrays = by_name(tree.arrays)
    away = {name for item in weights.readable.values() for name in item.stored} | {*weights.left_out}
    leaves: dict[Path, Leaf] = {}
    built: dict[Path, Weight] = {}
    for path, leaf in tree.items():
        name = dotted(path)
        weight = weights.readable.get(name) if path in tree.arrays else None
        if weight is not None:
            named = _path(path, weight)
            leaves[named] = array_of(weight, arrays, result, like, tree.metadata.location)
            built[named] = weight
        elif name not in away:
            leaves[path] = leaf
    metadata = replace(tree.metadata, config=without_quantization(tree.metadata.config or {}))
    notes = value_notes(built.values(), result, like) + Notes(remarks=tuple(_remarks(weights)))
    return DequantizedTree(Tree(leaves, metadata), notes, built, scheme(declared), result, like)


def _path(path: Path, weight: Weight) -> Path:
    """Return the path of a dequantized array, whose last key may lose its suffix."""
    if weight.name == weight.codes:
        return path
    last = str(path[-1])
    ending = weight.codes.removeprefix(weight.name)
    return (*path[:-1], last.removesuffix(ending))


def value_notes(result: Iterable[Weight], dtype: DType, like: Like) -> Notes:
    """Describe the effects of dequantization on values, with one note per scheme."""
    count = Counter((item.scheme, _is_exact(item, dtype)) for item in result)
    exact, inexact = [], []
    for (named, is_exact), number in count.items():
        text = f"dequantized from {named} to {dtype}: "
        if is_exact:
            exact.append(Note.of_arrays(number, f"{text}exact"))
        else:
            how = "rounded as MaxText does: scales to bfloat16 first" if like == "maxtext" else "rounded once"
            inexact.append(Note.of_arrays(number, f"{text}products in float32, {how}"))
    return Notes(tuple(inexact), tuple(exact))


def _remarks(weights: Weights) -> Iterator[str]:
    left = [
        *(name for item in weights.readable.values() for name in item.activation_scales),
        *weights.left_out,
    ]
    if left:
        keys = ", ".join(dict.fromkeys(map(last_key, left)))
        yield f"left out: {array_count(left)} ({keys}), for activations or caches, not for weights"


def _is_exact(weight: Weight, dtype: DType) -> bool:
    """Return whether every product is exact in the dtype: few digits times powers of two.

    The smallest float8 numbers times the smallest scales would be below bfloat16's minimum, 2**-133.
    """
    powers = all(scale.dtype.name == "float8_e8m0fnu" for scale in weight.scales)
    least = weight.numbers == "float4_e2m1fn"
    return powers and (dtype.name == "float32" or (dtype.name == "bfloat16" and least))


def weights_of_arrays(tree: Tree, differing: Collection[LazyArray]) -> set[str]:
    """Return the quantized weights that own these arrays; empty if any array has no owner."""
    arrays = by_name(tree.arrays)
    owners = {
        id(arrays[stored]): name
        for name, item in quantized_view(tree).shaped.readable.items()
        for stored in item.stored
    }
    result: set[str] = set()
    for array in differing if owners else ():
        theirs = {owners[id(item)] for item in distinct_arrays([array]) if id(item) in owners}
        if not theirs:
            return set()
        result |= theirs
    return result


def dequantize_weights(tree: Tree, names: Collection[str]) -> dict[str, LazyArray]:
    """Dequantize the named weights to float32, skipping those that cannot be dequantized."""
    arrays, location = by_name(tree.arrays), tree.metadata.location
    readable = quantized_view(tree).shaped.readable
    return {
        name: array_of(readable[name], arrays, DTYPES["float32"], location=location)
        for name in names
        if name in readable
    }
