"""A tree with quantised weights as the tree of the numbers that they stand for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, swapped
from ckpttools.array.reshaped import reshaped
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import says_quantized, scheme, without_quantization
from ckpttools.quantized.decoding import ZERO_POINT_DTYPE, Decode, Like
from ckpttools.quantized.dequantizable import Weights, not_readable, shaped_weights_in
from ckpttools.quantized.scales import last_key
from ckpttools.quantized.schemes.base import Weight

DEFAULT_DTYPE = DTYPES["bfloat16"]
RESULTS = ("bfloat16", "float16", "float32")
"""The dtypes in which products are made."""


@dataclass(frozen=True, slots=True)
class Logical:
    """A tree of plain numbers.

    Attributes:
        tree: without scales; its configuration says nothing of quantisation.
        notes: what dequantising does to values.
        weights: what was dequantised, by the paths that it has in `tree`.
        declared: what the configuration said of quantisation, in words; empty where nothing was dequantised.
        dtype, like: of the numbers, and how products are rounded.
        of_scales: those of the remarks that are about the values of scales.
    """

    tree: Tree
    notes: Notes
    weights: Mapping[Path, Weight]
    declared: str = ""
    dtype: DType = DEFAULT_DTYPE
    like: Like = "float32"
    of_scales: tuple[str, ...] = ()

    def notes_without(self, names: Collection[str]) -> Notes:
        """The notes where arrays of the tree are left out later: of the others."""
        result = [item for path, item in self.weights.items() if dotted(path) not in names]
        return _value_notes(result, self.dtype, self.like) + Notes(remarks=self.notes.remarks)


def logical(
    tree: Tree, dtype: DType | None = None, *, like: Like = "float32", weights: Weights | None = None
) -> Logical:
    """A tree with the numbers that quantised weights stand for in place of them; only stored shapes are read.

    Args:
        tree: any checkpoint; one without quantised weights stays as it is.
        dtype: of the numbers: float32, bfloat16 or float16; others are of float32. None for bfloat16.
        like: how products are rounded.
        weights: as of `weights_in`; None to work them out, with the shapes that are stored.

    Raises:
        FormatError: weights of a scheme that is not read, without scales, or whose scales do not fit; scales
            without a weight; lists all.
    """
    weights = shaped_weights_in(tree) if weights is None else weights
    if weights.faults:
        raise not_readable(weights, tree.metadata.config, tree.metadata.location)
    if not (weights.readable or weights.left_out):
        return Logical(tree, Notes(), {})
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
    declared = says_quantized(tree.metadata.config)
    metadata = replace(tree.metadata, config=without_quantization(tree.metadata.config or {}))
    notes = _value_notes(built.values(), result, like) + Notes(remarks=tuple(_remarks(weights)))
    return Logical(Tree(leaves, metadata), notes, built, scheme(declared), result, like)


def _path(path: Path, weight: Weight) -> Path:
    """The path of a logical array: of another last key where the name has one."""
    if weight.name == weight.codes:
        return path
    last = str(path[-1])
    ending = weight.codes.removeprefix(weight.name)
    return (*path[:-1], last.removesuffix(ending))


def array_of(
    weight: Weight,
    arrays: Mapping[str, LazyArray],
    dtype: DType = DEFAULT_DTYPE,
    like: Like = "float32",
    location: str = "",
) -> LazyArray:
    """The numbers of a weight.

    Args:
        weight: one that is stored quantised.
        arrays: by name, at least those that it is made of.
        dtype: of the numbers: float32, bfloat16 or float16.
        like: how products are rounded.
        location: of the checkpoint, for messages.
    """
    shifts = [] if weight.zero_points is None else [_zero_points(weight, arrays[weight.zero_points])]
    built = Dequantized(
        weight.shape,
        dtype,
        reshaped(arrays[weight.codes], weight.layout),
        (*(reshaped(arrays[scale.name], scale.shape) for scale in weight.scales), *shifts),
        (*(scale.block for scale in weight.scales), *(weight.scales[0].block for _ in shifts)),
        weight.packed,
        replace(decode_of(weight, dtype, like), location=location),
    )
    return swapped(built) if weight.is_swapped else built


def unscaled(weight: Weight, arrays: Mapping[str, LazyArray]) -> LazyArray:
    """What the codes of a weight stand for before they are multiplied, in the order in which they have them.

    Arguments as of `array_of`.
    """
    float32, scale = DTYPES["float32"], weight.scales[0]
    ones = Constant(scale.shape, float32, array("f", [1.0]).tobytes())
    names = filter(None, (weight.codes, weight.zero_points))
    alone = replace(weight, scales=(replace(scale, dtype=float32, divides=False),), is_swapped=False)
    return array_of(alone, {scale.name: ones, **{name: arrays[name] for name in names}}, float32)


def _zero_points(weight: Weight, words: LazyArray) -> LazyArray:
    """One for each scale, of words with eight of a column each: by columns int4 with the scale 1."""
    float32, (rows, groups) = DTYPES["float32"], weight.scales[0].shape
    one, turned = Constant((1, 1), float32, array("f", [1.0]).tobytes()), (groups, rows)
    decode = Decode(weight.numbers, (float32,), (False,), ZERO_POINT_DTYPE, weight.scaled_by)
    packed = Dequantized(turned, ZERO_POINT_DTYPE, swapped(words), (one,), (turned,), weight.packed, decode)
    return swapped(packed)


def decode_of(weight: Weight, dtype: DType | None = None, like: Like = "float32") -> Decode:
    """What makes numbers of a weight; arguments as of `logical`."""
    dtypes = tuple(scale.dtype for scale in weight.scales)
    divides = tuple(scale.divides for scale in weight.scales)
    has_zero_points = weight.zero_points is not None
    return Decode(weight.numbers, dtypes, divides, result_of(dtype), weight.scaled_by, like, has_zero_points)


def result_of(dtype: DType | None) -> DType:
    """The dtype in which products are made, of which the one that is expected can be made without loss."""
    if dtype is None:
        return DEFAULT_DTYPE
    return dtype if dtype.name in RESULTS else DTYPES["float32"]


def _value_notes(result: Iterable[Weight], dtype: DType, like: Like) -> Notes:
    count = Counter((item.scheme, _is_exact(item, dtype)) for item in result)
    exact, inexact = [], []
    for (named, is_exact), number in count.items():
        text = f"dequantised from {named} to {dtype}: "
        if is_exact:
            exact.append(Note.of_arrays(number, f"{text}exact"))
        else:
            how = "rounded as MaxText does: scales to bfloat16 first" if like == "maxtext" else "rounded once"
            inexact.append(Note.of_arrays(number, f"{text}products in float32, {how}"))
    return Notes(tuple(inexact), tuple(exact))


def _remarks(weights: Weights) -> Iterator[str]:
    left = [*(name for item in weights.readable.values() for name in item.of_activations), *weights.left_out]
    if left:
        keys = ", ".join(dict.fromkeys(map(last_key, left)))
        yield f"left out: {array_count(left)} ({keys}), for activations or caches, not for weights"


def _is_exact(weight: Weight, dtype: DType) -> bool:
    """Whether every product is a number of the dtype: of few digits times powers of two.

    The least float8 numbers times the least scales lie below bfloat16's, at 2**-133.
    """
    powers = all(scale.dtype.name == "float8_e8m0fnu" for scale in weight.scales)
    least = weight.numbers == "float4_e2m1fn"
    return powers and (dtype.name == "float32" or (dtype.name == "bfloat16" and least))
