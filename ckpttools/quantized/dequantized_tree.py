"""Trees whose quantized weights are replaced by their dequantized values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import distinct_arrays
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import declared_quantization, scheme, without_quantization
from ckpttools.quantized.decoding import DEFAULT_DTYPE, RESULTS, Like, array_of, result_of
from ckpttools.quantized.dequantizable import Weights, shaped_weights_in, unreadable_error, weights_in
from ckpttools.quantized.scale_checks import check_values, value_faults
from ckpttools.quantized.scales import last_key
from ckpttools.quantized.schemes.base import Weight
from ckpttools.quantized.weights import quantized_in


@dataclass(frozen=True, slots=True)
class DequantizedTree:
    """A tree with dequantized weights.

    Attributes:
        tree: without scales; its configuration does not mention quantization.
        notes: the effects of dequantization on values.
        weights: the dequantized weights by their paths in `tree`.
        declared: description of the former quantization settings; empty if nothing was dequantized.
        dtype, like: of the values, and the rounding of products.
        of_scales: the remarks about the values of scales.
    """

    tree: Tree
    notes: Notes
    weights: Mapping[Path, Weight]
    declared: str = ""
    dtype: DType = DEFAULT_DTYPE
    like: Like = "float32"
    of_scales: tuple[str, ...] = ()

    def notes_without(self, names: Collection[str]) -> Notes:
        """Return the notes without those about arrays that are left out later."""
        result = [item for path, item in self.weights.items() if dotted(path) not in names]
        return _value_notes(result, self.dtype, self.like) + Notes(remarks=self.notes.remarks)


def dequantize_tree(
    tree: Tree, dtype: DType | None = None, *, like: Like = "float32", weights: Weights | None = None
) -> DequantizedTree:
    """Replace quantized weights by their dequantized values; only stored shapes are read.

    Args:
        tree: any checkpoint; without quantized weights it is returned unchanged.
        dtype: of the values: float32, bfloat16 or float16; others are of float32. None for bfloat16.
        like: rounding of the products.
        weights: as for `weights_in`; None to find them, with their stored shapes.

    Raises:
        FormatError: weights use an unsupported scheme, are without scales, or have scales that do not fit; or
            scales have no weight; lists all.
    """
    weights = shaped_weights_in(tree) if weights is None else weights
    if weights.faults:
        raise unreadable_error(weights, tree.metadata.config, tree.metadata.location)
    if not (weights.readable or weights.left_out):
        return DequantizedTree(tree, Notes(), {})
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
    declared = declared_quantization(tree.metadata.config)
    metadata = replace(tree.metadata, config=without_quantization(tree.metadata.config or {}))
    notes = _value_notes(built.values(), result, like) + Notes(remarks=tuple(_remarks(weights)))
    return DequantizedTree(Tree(leaves, metadata), notes, built, scheme(declared), result, like)


def _path(path: Path, weight: Weight) -> Path:
    """Return the path of a dequantized array, whose last key may lose its ending."""
    if weight.name == weight.codes:
        return path
    last = str(path[-1])
    ending = weight.codes.removeprefix(weight.name)
    return (*path[:-1], last.removesuffix(ending))


def _value_notes(result: Iterable[Weight], dtype: DType, like: Like) -> Notes:
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

    The smallest float8 numbers times the smallest scales are below bfloat16's minimum, 2**-133.
    """
    powers = all(scale.dtype.name == "float8_e8m0fnu" for scale in weight.scales)
    least = weight.numbers == "float4_e2m1fn"
    return powers and (dtype.name == "float32" or (dtype.name == "bfloat16" and least))


class NumericTree(NamedTuple):
    """A tree, and a remark on its dequantization that is empty if nothing was dequantized."""

    tree: Tree
    remark: str = ""


def dequantize_where_possible(
    tree: Tree, dtype: DType | None = None, *, is_read: bool = False
) -> NumericTree:
    """Dequantize a tree, or return it unchanged if some quantized weights cannot be dequantized.

    Args:
        tree: any checkpoint.
        dtype: of the values; None for bfloat16.
        is_read: whether all values will be read: scales are checked first, and the remark mentions
            weights that are left unchanged.

    Raises:
        FormatError: a checked scale gives a value that is not finite; lists all.
    """
    result = shaped_weights_in(tree)
    if result.faults or not result.readable:
        return NumericTree(tree, _damage(result.faults) if is_read else "")
    if is_read:
        check_values(tree, result.readable.values(), dtype)
    built = dequantize_tree(tree, dtype, weights=result)
    count, schemes = array_count(built.weights), _schemes(built.weights.values())
    to = next(built.tree.arrays[path].dtype for path in built.weights)
    return NumericTree(built.tree, f"{count} dequantized from {schemes} to {to}")


def make_comparable(a: Tree, b: Tree, *, is_read: bool = False) -> tuple[NumericTree, NumericTree]:
    """Make two trees comparable: unchanged if both store their weights in the same way, else dequantized.

    If one is quantized, its values use the main dtype of the other; if both are, float32, because rounding
    could
    make different products equal. If the quantization of one is not described, the stored values of both are
    compared. `is_read` and errors as for `dequantize_where_possible`.
    """
    if _stored_alike(a, b) or _has_only_codes(a) or _has_only_codes(b):
        return _keep_stored(a, is_read), _keep_stored(b, is_read)
    return dequantize_where_possible(a, _main_dtype(b), is_read=is_read), dequantize_where_possible(
        b, _main_dtype(a), is_read=is_read
    )


def _keep_stored(tree: Tree, is_read: bool) -> NumericTree:
    """Return the tree unchanged, with a remark on weights that cannot be dequantized."""
    if not is_read:
        return NumericTree(tree)
    result = weights_in(tree)
    return NumericTree(
        tree, _damage((*result.faults, *value_faults(tree, result.readable.values(), signs=False).damaged))
    )


def _damage(faults: Sequence[str]) -> str:
    """Return the remark on quantized weights that are left as stored."""
    if not faults:
        return ""
    more = f", and {len(faults) - 1:,} more" if len(faults) > 1 else ""
    return f"codes and scales as they are stored, of which no numbers can be made: {faults[0]}{more}"


def _stored_alike(a: Tree, b: Tree) -> bool:
    """Return whether both trees quantize the same weights in the same way."""
    return _weight_schemes(weights_in(a).readable.values()) == _weight_schemes(
        weights_in(b).readable.values()
    )


def _has_only_codes(tree: Tree) -> bool:
    """Return whether the tree has quantized weights that cannot be dequantized."""
    return bool(weights_in(tree).faults and quantized_in(tree).weights)


def _weight_schemes(weights: Collection[Weight]) -> set[tuple[str, str, str]]:
    return {(weight.name, weight.codes, weight.scheme) for weight in weights}


def _main_dtype(tree: Tree) -> DType | None:
    """Return the dtype of most elements among the dtypes of products; None without any.

    If they are products themselves, return the dtype that represents all of them.
    """
    if weights_in(tree).readable:
        return DTYPES["float32"]
    count: Counter[str] = Counter()
    for array in tree.arrays.values():
        count[array.dtype.name] += array.size
    result = [name for name, _ in count.most_common() if name in RESULTS]
    return DTYPES[result[0]] if result else None


def _schemes(weights: Collection[Weight]) -> str:
    return ", ".join(dict.fromkeys(weight.scheme for weight in weights))


def weights_of_arrays(tree: Tree, differing: Collection[LazyArray]) -> set[str]:
    """Return the quantized weights that own these arrays; empty if one array belongs to none."""
    arrays = by_name(tree.arrays)
    owners = {
        id(arrays[stored]): name
        for name, item in shaped_weights_in(tree).readable.items()
        for stored in item.stored
    }
    result: set[str] = set()
    for array in differing if owners else ():
        theirs = {owners[id(item)] for item in distinct_arrays([array]) if id(item) in owners}
        if not theirs:
            return set()
        result |= theirs
    return result


def is_dequantized(array: LazyArray) -> bool:
    """Return whether an array contains dequantized values."""
    return any(isinstance(part, Dequantized) for part in distinct_arrays([array]))


def dequantize_weights(tree: Tree, names: Collection[str]) -> dict[str, LazyArray]:
    """Dequantize the named weights to float32; skip those that cannot be dequantized."""
    arrays, readable, location = (
        by_name(tree.arrays),
        shaped_weights_in(tree).readable,
        tree.metadata.location,
    )
    return {
        name: array_of(readable[name], arrays, DTYPES["float32"], location=location)
        for name in names
        if name in readable
    }
