"""A tree with quantised weights as the tree of the numbers that they stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout
from ckpttools.array.reshaped import reshaped
from ckpttools.array.tree import Leaf, Path, Tree, dotted
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import FIELD, exempt_modules, says_quantized, scheme, without_quantization
from ckpttools.quantized.decoding import Decode, Like
from ckpttools.quantized.scales import Described, last_key
from ckpttools.quantized.schemes.base import Module, UnreadableError, Weight
from ckpttools.quantized.schemes.groups import online_rotations
from ckpttools.quantized.schemes.registry import READ_METHODS, scheme_of
from ckpttools.quantized.tree import quantized_in
from ckpttools.quantized.weights import Quantized, is_scale, remedy

DEFAULT_DTYPE = DTYPES["bfloat16"]
RESULTS = ("bfloat16", "float16", "float32")
"""The dtypes in which products are made."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The quantised weights of a checkpoint as logical arrays.

    Attributes:
        readable: by the names of their arrays of codes.
        faults: for each other one, and each scale without a weight, a line that says what is wrong.
    """

    readable: Mapping[str, Weight]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Logical:
    """A tree of plain numbers.

    Attributes:
        tree: without scales; its configuration says nothing of quantisation.
        notes: what dequantising does to values.
        weights: what was dequantised, by the paths that it has in `tree`.
        said: what the configuration said of quantisation, in words; empty where nothing was dequantised.
    """

    tree: Tree
    notes: Notes
    weights: Mapping[Path, Weight]
    said: str = ""


def weights_in(tree: Tree) -> Weights:
    """The quantised weights of a tree; worked out once, and nothing is read."""
    return tree.once(_weights_in)


def _weights_in(tree: Tree) -> Weights:
    config, found = tree.metadata.config, quantized_in(tree).weights
    if not (found or says_quantized(config)):
        return Weights({}, ())
    arrays = {dotted(path): array for path, array in tree.arrays.items()}
    return weights_of(arrays, found, config)


def weights_of(
    arrays: Mapping[str, Described], found: Mapping[str, Quantized], config: Mapping[str, Any] | None
) -> Weights:
    """What schemes make of quantised weights.

    Args:
        arrays: all, by name.
        found: the weights among them.
        config: the `config.json`, which says how they are quantised.
    """
    said = says_quantized(config) or {}
    readable: dict[str, Weight] = {}
    faults: list[str] = []
    for name, each in found.items():
        module = Module(name, each.sides, arrays, said)
        known = scheme_of(module)
        if known is None:
            faults += [] if _is_plain_table(each) else [str(each)]
            continue
        try:
            readable[name] = known.read(module)
        except UnreadableError as error:
            faults.append(str(error))
    used = {name for each in readable.values() for name in each.stored}
    known_names = used | {name for each in found.values() for name in (each.name, *each.sides)}
    exempt = exempt_modules(said)
    alone = (name for name in arrays if name not in known_names and is_scale(name) and not exempt.has(name))
    faults += [f"{name}: {arrays[name].dtype}, a scale without a weight" for name in alone]
    faults += _clashes(readable.values(), arrays, used)
    faults += [rotated] if readable and (rotated := online_rotations(said)) else []
    return Weights(readable, tuple(faults))


def _is_plain_table(each: Quantized) -> bool:
    """Whether whole numbers are no codes of a scheme: nothing scales them, and none has so many bits."""
    return each.dtype.kind in ("int", "uint") and each.dtype.bits > 32 and not each.scales


def _clashes(weights: Iterable[Weight], arrays: Mapping[str, Described], used: set[str]) -> Iterator[str]:
    """A line for each logical name that another array has, or another weight."""
    count = Counter(each.name for each in weights)
    for name, times in count.items():
        if times > 1 or (name in arrays and name not in used):
            yield f"{name}: there is a plain array and a quantised one of this name"


def logical(
    tree: Tree, dtype: DType | None = None, *, like: Like = "float32", weights: Weights | None = None
) -> Logical:
    """A tree with the numbers that quantised weights stand for in place of them; nothing is read.

    Args:
        tree: any checkpoint; one without quantised weights stays as it is.
        dtype: of the numbers: float32, bfloat16 or float16; others are of float32. None for bfloat16.
        like: how products are rounded.
        weights: as of `weights_in`; None to work them out.

    Raises:
        FormatError: weights of a scheme that is not read, without scales, or whose scales do not fit; scales
            without a weight; lists all.
    """
    weights = weights_in(tree) if weights is None else weights
    if weights.faults:
        raise not_readable(weights.faults, tree.metadata.config, tree.metadata.place)
    if not weights.readable:
        return Logical(tree, Notes(), {})
    result = result_of(dtype)
    paths = {dotted(path): path for path in tree.arrays}
    away = {name for each in weights.readable.values() for name in each.stored}
    leaves: dict[Path, Leaf] = {}
    made: dict[Path, Weight] = {}
    for path, leaf in tree.items():
        name = dotted(path)
        weight = weights.readable.get(name) if path in tree.arrays else None
        if weight is not None:
            named = _path(path, weight)
            leaves[named] = array_of(weight, {n: tree.arrays[paths[n]] for n in weight.stored}, result, like)
            made[named] = weight
        elif name not in away:
            leaves[path] = leaf
    config = dict(tree.metadata.config or {})
    config |= (
        {"text_config": dict(config["text_config"])} if isinstance(config.get("text_config"), dict) else {}
    )
    said = says_quantized(config)
    without_quantization(config)
    metadata = replace(tree.metadata, config=config)
    return Logical(Tree(leaves, metadata), _notes(made.values(), result, like), made, scheme(said))


def _path(path: Path, weight: Weight) -> Path:
    """The path of a logical array: of another last key where the name has one."""
    if weight.name == weight.codes:
        return path
    last = str(path[-1])
    ending = weight.codes.removeprefix(weight.name)
    return (*path[:-1], last.removesuffix(ending))


def array_of(
    weight: Weight, arrays: Mapping[str, LazyArray], dtype: DType = DEFAULT_DTYPE, like: Like = "float32"
) -> LazyArray:
    """The numbers of a weight.

    Args:
        weight: it.
        arrays: by name, at least those that it is made of.
        dtype: of the numbers: float32, bfloat16 or float16.
        like: how products are rounded.
    """
    made = Dequantized(
        weight.shape,
        dtype,
        reshaped(arrays[weight.codes], weight.layout),
        tuple(reshaped(arrays[each.name], each.shape) for each in weight.scales),
        tuple(each.block for each in weight.scales),
        weight.packed,
        decode_of(weight, dtype, like),
    )
    if not weight.is_swapped:
        return made
    *rest, last = range(len(weight.shape))
    order = (*rest[:-1], last, rest[-1])
    return relayout(made, [(length,) for length in weight.shape], order, [1] * len(order))


def decode_of(weight: Weight, dtype: DType | None = None, like: Like = "float32") -> Decode:
    """What makes numbers of a weight; arguments as of `logical`."""
    dtypes = tuple(each.dtype for each in weight.scales)
    divides = tuple(each.divides for each in weight.scales)
    return Decode(weight.numbers, dtypes, divides, result_of(dtype), weight.codes, like)


def result_of(dtype: DType | None) -> DType:
    """The dtype in which products are made, of which the one that is wanted can be made without loss."""
    if dtype is None:
        return DEFAULT_DTYPE
    return dtype if dtype.name in RESULTS else DTYPES["float32"]


def not_readable(faults: Collection[str], config: Mapping[str, Any] | None, place: str) -> FormatError:
    """The error that lists what cannot be dequantised, and why."""
    said = says_quantized(config)
    is_read = (said or {}).get("quant_method") in READ_METHODS
    return FormatError(
        "these quantised weights cannot be dequantised, and their numbers mean nothing without their scales:"
        + listing(list(faults)),
        place=place or None,
        got=f"{scheme(said)} ({FIELD})",
        wanted="each weight with the scales that config.json says"
        if is_read
        else f"{FIELD} of {', '.join(READ_METHODS)}",
        hint="get the checkpoint again with all of its files, config.json among them"
        if is_read
        else remedy(said),
    )


def _notes(weights: Collection[Weight], dtype: DType, like: Like) -> Notes:
    count = Counter((each.scheme, _is_exact(each, dtype)) for each in weights)
    exact, inexact = [], []
    for (named, is_exact), number in count.items():
        subject = f"{number} array{'s' * (number > 1)}"
        if is_exact:
            exact.append(Note(subject, f"dequantised from {named} to {dtype}: exact"))
        else:
            how = "rounded as MaxText does: scales to bfloat16 first" if like == "maxtext" else "rounded once"
            inexact.append(Note(subject, f"dequantised from {named} to {dtype}: products in float32, {how}"))
    left = [name for each in weights for name in each.of_activations]
    keys = ", ".join(dict.fromkeys(map(last_key, left)))
    remarks = [f"left out, as it scales no weight: {array_count(left)} ({keys})"] if left else []
    return Notes(tuple(inexact), tuple(exact), (), tuple(remarks))


def _is_exact(weight: Weight, dtype: DType) -> bool:
    """Whether every product is a number of the dtype: of few digits times powers of two.

    The least float8 numbers times the least scales lie below bfloat16's, at 2**-133.
    """
    powers = all(each.dtype.name == "float8_e8m0fnu" for each in weight.scales)
    least = weight.numbers == "float4_e2m1fn"
    return powers and (dtype.name == "float32" or (dtype.name == "bfloat16" and least))
