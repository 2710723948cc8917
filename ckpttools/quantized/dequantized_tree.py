"""Trees whose quantized weights are replaced by their dequantized values, or the reasons why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import distinct_arrays
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.notes import Note, Notes
from ckpttools.core.region import Region, Shape
from ckpttools.core.text import array_count
from ckpttools.quantized.config import FIELD, Like, exempt_modules, scheme, without_quantization
from ckpttools.quantized.decoding import array_of, result_of
from ckpttools.quantized.scales import ArrayLike, last_key, scales_no_weight
from ckpttools.quantized.schemes.base import Module, UnreadableError, UnsupportedError, Weight
from ckpttools.quantized.schemes.registry import read_formats, read_methods, scheme_of
from ckpttools.quantized.unsupported_errors import remedy
from ckpttools.quantized.view import DequantizedTree, quantized_view
from ckpttools.quantized.weights import QuantizedWeight, Weights, is_scale


def dequantize_tree(
    tree: Tree,
    weights: Weights,
    settings: Mapping[str, Any] | None,
    dtype: DType | None = None,
    like: Like = "float32",
) -> DequantizedTree:
    """Replace quantized weights by their dequantized values; arguments and errors as for `QuantizedView`."""
    if weights.faults:
        raise unreadable_error(weights, settings, tree.metadata.location)
    result = result_of(dtype)
    arrays = by_name(tree.arrays)
    replaced = {name for item in weights.readable.values() for name in item.stored} | {*weights.left_out}
    leaves: dict[Path, Leaf] = {}
    built: dict[Path, Weight] = {}
    for path, leaf in tree.items():
        name = dotted(path)
        weight = weights.readable.get(name) if path in tree.arrays else None
        if weight is not None:
            named = _path(path, weight)
            leaves[named] = array_of(weight, arrays, result, like, tree.metadata.location)
            built[named] = weight
        elif name not in replaced:
            leaves[path] = leaf
    metadata = replace(tree.metadata, config=without_quantization(tree.metadata.config or {}))
    notes = value_notes(built.values(), result, like) + Notes(remarks=tuple(_remarks(weights)))
    return DequantizedTree(Tree(leaves, metadata), notes, built, scheme(settings), result, like)


def _path(path: Path, weight: Weight) -> Path:
    """Return the path of a dequantized array, whose last key may lose its suffix."""
    if weight.name == weight.codes:
        return path
    last = str(path[-1])
    ending = weight.codes.removeprefix(weight.name)
    return (*path[:-1], last.removesuffix(ending))


def value_notes(weights: Iterable[Weight], dtype: DType, like: Like) -> Notes:
    """Describe the effects of dequantization on values, with one note per scheme."""
    count = Counter((item.scheme, _is_exact(item, dtype)) for item in weights)
    exact, inexact = [], []
    for (named, is_exact), number in count.items():
        text = f"dequantized from {named} to {dtype}: "
        if is_exact:
            exact.append(Note.of_arrays(number, f"{text}exact"))
        else:
            rounding = (
                "rounded as MaxText does: scales to bfloat16 first" if like == "maxtext" else "rounded once"
            )
            inexact.append(Note.of_arrays(number, f"{text}products in float32, {rounding}"))
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
        owned = {owners[id(item)] for item in distinct_arrays([array]) if id(item) in owners}
        if not owned:
            return set()
        result |= owned
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


def read_shapes(weights: Iterable[Weight], arrays: Mapping[str, LazyArray]) -> Mapping[str, Shape] | None:
    """Read the stored shapes of weights, by array name; return None if they agree with the headers."""
    declared = {item.stored_shape: item for item in weights}
    named = [name for name in declared if name is not None]
    # Read in file order, where shapes are adjacent: one request to a remote store reads thousands of them.
    named.sort(key=lambda name: arrays[name].first_byte(Region.whole(arrays[name].shape)))
    shapes = {name: tuple(int(length) for length in arrays[name].read().reshape(-1)) for name in named}
    return None if all(declared[name].shape == shape for name, shape in shapes.items()) else shapes


def has_doubtful_shapes(weights: Weights) -> bool:
    """Return whether stored shapes must be read, because the last code of a row may be partly empty.

    A row of several groups of complete codes has the length stated in the headers.
    """
    declared = (item for item in weights.readable.values() if item.stored_shape is not None)
    widths = ((item.scales[0].block[-1], item) for item in declared)
    return any(width % item.packed or width >= item.shape[-1] for width, item in widths)


def interpret_weights(
    arrays: Mapping[str, ArrayLike],
    quantized: Mapping[str, QuantizedWeight],
    settings: Mapping[str, Any] | None,
    shapes: Mapping[str, Shape] | None = None,
) -> Weights:
    """Interpret quantized weights with the supported schemes.

    Args:
        arrays: All arrays by name.
        quantized: The quantized weights among the arrays.
        settings: The `quantization_config` that describes the weights.
        shapes: As for `ckpttools.quantized.schemes.base.Module`.
    """
    settings = settings or {}
    readable: dict[str, Weight] = {}
    unknown: list[str] = []
    faults: list[str] = []
    for name, item in quantized.items():
        module = Module(name, item.sides, arrays, settings, shapes or {})
        known = scheme_of(module)
        if known is None:
            (faults if item.is_bare else unknown).extend([] if _is_plain_table(item) else [str(item)])
            continue
        try:
            readable[name] = known.read(module)
        except UnsupportedError as error:
            unknown.append(str(error))
        except UnreadableError as error:
            faults.append(str(error))
    used = {name for item in readable.values() for name in item.stored}
    known_names = used | {name for item in quantized.values() for name in (item.name, *item.sides)}
    exempt = exempt_modules(settings)
    others = [name for name in arrays if name not in known_names]
    left_out = tuple(name for name in others if scales_no_weight(name))
    orphan_scales = (
        name for name in others if is_scale(name) and not exempt.has(name) and name not in left_out
    )
    faults += [f"{name}: {arrays[name].dtype}, a scale without a weight" for name in orphan_scales]
    faults += _clashes(readable.values(), arrays, used)
    named = unsupported_reason(settings) if quantized else ()
    lines = (*named, *unknown, *faults)
    return Weights(readable, lines, left_out, is_whole=bool(lines) and (bool(named) or not faults))


def _is_plain_table(weight: QuantizedWeight) -> bool:
    """Return whether integers have no scales and too many bits for any scheme."""
    return weight.dtype.kind in ("int", "uint") and weight.dtype.bits > 32 and not weight.scales


def _clashes(weights: Iterable[Weight], arrays: Mapping[str, ArrayLike], used: set[str]) -> Iterator[str]:
    """Yield each logical name that another array or weight also has, one line each."""
    count = Counter(weight.name for weight in weights)
    for name, times in count.items():
        if times > 1 or (name in arrays and name not in used):
            yield f"{name}: a plain array and a quantized one have this name"


def unreadable_error(weights: Weights, settings: Mapping[str, Any] | None, location: str) -> FormatError:
    """Return the error that lists the weights which cannot be dequantized, with reasons."""
    is_read = (settings or {}).get("quant_method") in read_methods()
    is_damaged = is_read and not weights.is_whole
    return FormatError(
        "these quantized weights cannot be dequantized, and their values are meaningless without their "
        "scales:" + listing(list(weights.faults)),
        location=location or None,
        got=f"{scheme(settings)} ({FIELD})",
        expected=_expected(is_read, is_damaged),
        hint="download the checkpoint again with all of its files, including config.json"
        if is_damaged
        else remedy(settings, is_read=False),
    )


def _expected(is_read: bool, is_damaged: bool) -> str:
    if is_damaged:
        return "each weight with the scales that config.json declares"
    return "a supported scheme" if is_read else f"{FIELD} of {', '.join(read_methods())}"


_COMPRESSED = "compressed-tensors"
_DENSE = "dense"
# Formats that leave the details to each group, or declare that nothing is quantized.
_GENERAL = frozenset((_DENSE, "mixed-precision"))


def unsupported_reason(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the unsupported settings of a `quantization_config`, one line each.

    Weights with such settings may have the names and dtypes of supported weights but a different meaning.
    """
    return tuple(dict.fromkeys((*_formats(settings), *_sparsity(settings), *_rotations(settings))))


def _formats(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("quant_method") != _COMPRESSED:
        return
    for location in (settings, *_mappings(settings.get("config_groups"))):
        name = location.get("format")
        if isinstance(name, str) and name not in _GENERAL | read_formats():
            yield f"format: {name}, which is not supported"


def _sparsity(settings: Mapping[str, Any]) -> Iterator[str]:
    sparsity = settings.get("sparsity_config")
    name = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if name not in (None, _DENSE):
        yield f"sparsity_config: weights are stored as {name}, which is not supported"


def _rotations(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the activations that are rotated at run time to undo rotations of weights.

    Rotations of queries and cached keys cancel out, and weight-only rotations are stored in the weights.
    """
    transforms = settings.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    result = [
        location
        for mapping in _mappings(groups)
        for location in _locations(mapping)
        if location in ("input", "output")
    ]
    if result:
        yield (
            f"transform_config: activations are rotated at run time ({', '.join(dict.fromkeys(result))}), "
            "without which the weights have another meaning"
        )


def _locations(transform: Mapping[str, Any]) -> Iterator[Any]:
    applied = transform.get("apply")
    for item in applied if isinstance(applied, list) else ():
        yield item.get("location") if isinstance(item, Mapping) else None


def _mappings(groups: object) -> Iterator[Mapping[str, Any]]:
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group
