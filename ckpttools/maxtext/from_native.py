"""MaxText's FP8 weights on the way to Hugging Face: with their scales, or as numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import repeated
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.notes import Notes
from ckpttools.mapping.blocks import Block
from ckpttools.mapping.scale_grids import ScaleGrids, scale_grids
from ckpttools.mapping.table import Table
from ckpttools.maxtext.native import fits_maxtext, scale_pairs, square
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.modules import left_modules
from ckpttools.quantized.scales import BLOCK_SCALE
from ckpttools.quantized.sound_scales import Sound, sound_of
from ckpttools.transforms.dequantize import dequantized


@dataclass(frozen=True)
class Native:
    """A MaxText model's parameters, of which some may be quantised.

    Attributes:
        arrays: by dotted names, without scales.
        scales: name of a quantised leaf -> its scales.
        sounds: name of a quantised leaf -> what looks at its scales.
        block: elements of a block; None where each leaf has one scale.
        notes: what dequantising does to values.
    """

    arrays: Mapping[str, LazyArray]
    scales: Mapping[str, LazyArray] = field(default_factory=dict)
    sounds: Mapping[str, Sound] = field(default_factory=dict)
    block: Block | None = None
    notes: Notes = field(default_factory=Notes)


def native_of(
    arrays: Mapping[str, LazyArray],
    config: Mapping[str, Any] | None,
    location: str,
    dtype: DType | None = None,
) -> Native:
    """A model's parameters with quantised leaves and their scales told apart, or dequantised.

    Args:
        arrays: by dotted names.
        config: the model's, which may say how large blocks are; else the grids of scales do.
        location: for messages.
        dtype: of the numbers that are made of quantised leaves; None to keep these.

    Raises:
        FormatError: scales do not fit, or are no numbers; lists all.
    """
    pairs = scale_pairs(arrays)
    if not pairs:
        return Native(arrays)
    if dtype is not None:
        tree = Tree({(name,): item for name, item in arrays.items()}).with_metadata(location=location)
        built = dequantized(tree, dtype)
        return Native({str(path[0]): item for path, item in built.tree.arrays.items()}, notes=built.notes)
    scales = {name: arrays[scale] for name, scale in pairs.items()}
    sounds = {
        name: sound_of(arrays[scale], arrays[name].dtype, scale, location) for name, scale in pairs.items()
    }
    away = set(pairs.values())
    plain = {name: item for name, item in arrays.items() if name not in away}
    return Native(plain, scales, sounds, block_of(plain, scales, config))


def block_of(
    arrays: Mapping[str, LazyArray], scales: Mapping[str, LazyArray], config: Mapping[str, Any] | None
) -> Block | None:
    """The size of blocks: what the configuration says, else the most neighbours that share a scale.

    Args:
        arrays: by dotted names.
        scales: name of a quantised leaf -> its scales.
        config: the model's.

    Returns:
        None where each leaf has one scale.
    """
    gridded = {name: item for name, item in scales.items() if item.ndim == arrays[name].ndim}
    if not gridded:
        return None
    declared = (says_quantized(config) or {}).get("weight_block_size")
    if (
        isinstance(declared, list)
        and len(declared) == len(set(declared)) + 1
        and isinstance(declared[0], int)
    ):
        return declared[0], declared[0]
    sizes = (
        length // max(1, count)
        for name, item in gridded.items()
        for length, count in zip(arrays[name].shape, item.shape, strict=True)
    )
    size = max(sizes)
    return size, size


def hugging_face_grids(
    table: Table, arrays: Mapping[str, LazyArray], native: Native, cut: Collection[str] = ()
) -> ScaleGrids:
    """The scales of Hugging Face's weights, and the table without what their values would be changed by.

    Where several scales become that of one block, they are read: they must be equal.

    Args:
        table: of the model.
        arrays: what is mapped.
        native: what of it is quantised.
        cut: axes on which arrays may be longer than the model says.
    """
    result = unread_grids(table, arrays, native, cut)
    return replace(result, problems=(*result.problems, *_unequal(result, native.block)))


def unread_grids(
    table: Table, arrays: Mapping[str, LazyArray], native: Native, cut: Collection[str] = ()
) -> ScaleGrids:
    """As `hugging_face_grids`, before any scale is read."""
    scales = {name: item for name, item in native.scales.items() if name in arrays}
    if not scales:
        return ScaleGrids(table, {})
    size = square(native.block)
    block, fits = (None, 1) if size is None else (native.block, size)
    return scale_grids(
        table,
        arrays,
        scales,
        block,
        inverse=True,
        cut=cut,
        fits=fits_maxtext(fits),
        sounds=native.sounds,
    )


def _unequal(grids: ScaleGrids, block: Block | None) -> Iterator[str]:
    """A line for each weight with cells of one block that have other scales; they are read."""
    for name, (cells, times) in grids.cells.items():
        again = grids.scales[name]
        for axis, item in zip((cells.ndim - 2, cells.ndim - 1), times, strict=True):
            again = repeated(again, axis, item, cells.shape[axis])
        if again.read().tobytes() != cells.read().tobytes():
            yield f"{name}: its scales differ within blocks of {' x '.join(map(str, block or ()))}"


def with_scheme(
    config: Mapping[str, Any],
    arrays: Mapping[str, LazyArray],
    weights: Mapping[str, LazyArray],
    block: Block | None,
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A configuration that says how weights are quantised, and what of it was changed.

    Args:
        config: the model's.
        arrays: all that is written beside it, by name.
        weights: names of those that are quantised -> their scales.
        block: elements of a block.
    """
    size = list(block) if block else None
    declared = says_quantized(config) or {}
    if declared.get("quant_method") == "fp8" and declared.get("weight_block_size") == size:
        return config, ()
    scales = {name + BLOCK_SCALE for name in weights}
    others = {name: item for name, item in arrays.items() if name not in scales}
    built = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": size,
        "modules_to_not_convert": left_modules(others, weights),
    }
    return {**config, FIELD: built}, (f"{FIELD} says {scheme(built)}, as weights are",)
