"""FP8 in MaxText's format: each quantized leaf has its scales next to it, as in `kernel` and `kernel_scale`.

The grid of scales has the axes of the kernel, with one element per block on each axis. An axis that is
shorter than a block has one scale for each coordinate. Scales of entire arrays have only the axes on which
layers and experts are stacked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import repeat_elements
from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError, ShapeError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.core.text import plural
from ckpttools.mapping.row import Row
from ckpttools.mapping.table import Table
from ckpttools.quantized.config import FIELD, declared_quantization, scheme
from ckpttools.quantized.scales import BLOCK_SCALE
from ckpttools.quantized.view import quantized_view
from ckpttools.transforms.cast import cast

if TYPE_CHECKING:
    from ckpttools.mapping.blocks import Block, Fits
    from ckpttools.mapping.build import ValueNote
    from ckpttools.quantized.scale_checks import ScaleCheck
    from ckpttools.quantized.schemes.base import Weight

Quantized = Literal["dequantize", "keep"]
"""How to handle quantized weights."""
QUANTIZED: tuple[Quantized, ...] = ("dequantize", "keep")
SCALE = "_scale"
IGNORED_SCALES_REMARK = (
    "from_pretrained of MaxText 0.2.5 (SFT, DPO, distillation, decoding) ignores the scales and computes "
    "with the unscaled values, without an error"
)
"""An observed limitation of MaxText, for messages."""
# The dtypes that MaxText accepts for quantized weights.
CODES = frozenset(("float8_e4m3fn", "float8_e5m2"))
# Modules of latent attention, which 0.2.5 creates without a block size.
_UNBLOCKED_MODULES = frozenset(("wq_a", "wq_b", "wkv_a", "wkv_b"))
# The dtypes in which MaxText multiplies by scales. Scales in other dtypes are cast to float32, which can
# represent all their values.
_SCALES = frozenset(("float32", "bfloat16"))


@dataclass(frozen=True)
class ScaleGrids:
    """The scales of a table's weights in the other format.

    Attributes:
        table: The same rows, but without value ops for quantized weights.
        scales: Target key of a weight -> its scales.
        values: Notes about changed scales.
        problems: A line for each kind of weight whose scales the other format cannot represent.
        misfits: A line for each kind of weight whose grid `fits` reports as a misfit.
        cells: For blocks of several cells, target key -> the scales of cells, and the number of cells in a
            block on the last two axes. All cells of a block must be equal.
    """

    table: Table
    scales: Mapping[str, LazyArray]
    values: tuple[ValueNote, ...] = ()
    problems: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    cells: Mapping[str, tuple[LazyArray, Block]] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptWeights:
    """Quantized weights of a Hugging Face tree that stay quantized.

    Attributes:
        tree: The tree without scales.
        scales: Name of a weight -> its scales.
        sounds: Name of a weight -> a function that checks its scales.
        aside: Name -> array that is not in `tree`.
        block: The shape of a block; None if each weight has one scale.
        notes: Notes about the values of scales.
    """

    tree: Tree
    scales: Mapping[str, LazyArray] = field(default_factory=dict)
    sounds: Mapping[str, ScaleCheck] = field(default_factory=dict)
    aside: Mapping[str, LazyArray] = field(default_factory=dict)
    block: Block | None = None
    notes: Notes = field(default_factory=Notes)


def split_quantized(tree: Tree) -> KeptWeights:
    """Separate the quantized weights of a tree from their scales, and check the scales.

    Raises:
        UsageError: No weight is quantized.
        FormatError: Weights have a scheme that MaxText does not support, or lack scales. The message lists
            them.
    """
    # Few models are quantized, and few of those stay quantized.
    from ckpttools.quantized.dequantized_tree import unreadable_error
    from ckpttools.quantized.scale_checks import scale_check_of

    view = quantized_view(tree)
    config, location = tree.metadata.config, tree.metadata.location
    if view.faults:
        raise unreadable_error(view.weights_from_headers, view.declared, location)
    weights = list(view.readable.values())
    if not weights:
        raise UsageError(
            "no weight is quantized",
            location=location or None,
            got=option("quantized", "keep"),
            hint=f"leave it out; or quantize the model first: {action('quantize', location or 'SRC', 'DST')}",
        )
    faults = [
        f"{weight.name}: {weight.scheme}, which MaxText does not support"
        for weight in weights
        if not _is_supported(weight)
    ]
    blocks = {_block(weight) for weight in weights if _is_supported(weight)}
    if len(blocks) > 1:
        faults += [
            f"{weight.name}: {weight.scheme}" for weight in weights if _block(weight) != _block(weights[0])
        ]
    if faults:
        raise refusal_error(faults, config, location)
    notes = view.check_scales()
    paths = {dotted(path): path for path in tree.arrays}
    removed = {name for weight in weights for name in weight.stored if name != weight.codes}
    scales = {weight.name: _convert_scales(tree.arrays, paths, weight) for weight in weights}
    leaves = {path: leaf for path, leaf in tree.items() if dotted(path) not in removed}
    scale_arrays = {name: tree.arrays[paths[name]] for name in removed}
    sounds = {
        weight.name: scale_check_of(
            scales[weight.name], tree.arrays[paths[weight.codes]].dtype, weight.scale_names, location
        )
        for weight in weights
    }
    return KeptWeights(Tree(leaves, tree.metadata), scales, sounds, scale_arrays, blocks.pop(), notes)


def _is_supported(weight: Weight) -> bool:
    """Return whether MaxText supports a weight: FP8 in square blocks, or with one scale."""
    scale = weight.scales[0]
    is_fp8 = weight.numbers in CODES and weight.packed == 1 and len(weight.scales) == 1
    square = len(set(scale.block[-2:])) == 1 and set(scale.block[:-2]) <= {1}
    return is_fp8 and not scale.divides and (square or scale.block == weight.shape)


def _block(weight: Weight) -> Block | None:
    """Return the block of a weight; None if it has one scale."""
    block = weight.scales[0].block
    return None if block == weight.shape and "tensor" in weight.scheme else (block[-2], block[-1])


def _convert_scales(arrays: Mapping[Path, LazyArray], paths: Mapping[str, Path], weight: Weight) -> LazyArray:
    """Return the scales in a dtype that MaxText multiplies by."""
    scales = arrays[paths[weight.scales[0].name]]
    if scales.dtype.name in _SCALES:
        return scales
    if not scales.dtype.is_float:
        raise FormatError(
            "MaxText does not support exponents that are stored as integers",
            location=weight.scales[0].name,
            got=scales.dtype,
            hint=f"leave out {option('quantized', 'keep')}: the weights are dequantized",
        )
    return cast(scales, DTYPES["float32"])


def refusal_error(lines: Sequence[str], config: Mapping[str, Any] | None, location: str) -> FormatError:
    """Return the error that lists quantized weights which cannot be kept."""
    settings = declared_quantization(config)
    return FormatError(
        "these quantized weights cannot be converted as they are:" + listing(list(lines)),
        location=location or None,
        got=f"{scheme(settings)} ({FIELD})" if settings else None,
        expected="FP8 with one scale for each weight, or for each square block within the axes of kernels",
        hint=f"dequantize them: {option('quantized', 'dequantize')}",
    )


@contextmanager
def raise_for_problems(
    problems: Sequence[str], config: Mapping[str, Any] | None, location: str
) -> Iterator[None]:
    """Raise `refusal_error` for problems, but only after everything that the table refuses is known."""
    try:
        yield
    except ShapeError as error:
        if problems:
            raise refusal_error(problems, config, location) from error
        raise
    if problems:
        raise refusal_error(problems, config, location)


def native_grids(table: Table, arrays: Mapping[str, LazyArray], kept: KeptWeights) -> ScaleGrids:
    """Return the scales for MaxText's kernels, and the table without value ops for quantized weights.

    Args:
        table: The table of the model.
        arrays: The arrays that are mapped, by name.
        kept: The quantized weights among them.
    """
    if not kept.scales:
        return ScaleGrids(table, {})
    from ckpttools.maxtext.scale_grids import scale_grids

    fits = grid_mismatch_test(kept.block[0] if kept.block else 1)
    result = scale_grids(table, arrays, kept.scales, kept.block, fits=fits, sounds=kept.sounds)
    return replace(result, problems=(*result.problems, *_padding_problems(table, result.scales)))


def _padding_problems(table: Table, scaled: Collection[str]) -> Iterator[str]:
    for row in table.rows:
        axes = [axis for axis in table.padded if (axis,) in row.left.groups]
        if axes and str(row.left.key) in scaled:
            yield f"{row.left.key}: padding {axes[0]} would need scales of its own"


def scale_pairs(arrays: Mapping[str, LazyArray]) -> dict[str, str]:
    """Map the quantized leaves of a MaxText tree to their scales.

    Args:
        arrays: Arrays by dotted names, without NNX's suffix.
    """
    return {
        name: name + SCALE
        for name, array in arrays.items()
        if array.dtype.name in CODES and name + SCALE in arrays
    }


def grid_mismatch_test(block: int) -> Fits:
    """Return a test that explains why an FP8 model of MaxText cannot use a grid of scales.

    Models that are not FP8 accept any grid, because MaxText multiplies their kernels by the scales when it
    loads them.

    Args:
        block: MaxText's `weight_block_size`.
    """

    def misfit_reason(row: Row, sizes: Mapping[str, int], grid: Shape) -> str:
        if not _UNBLOCKED_MODULES.isdisjoint(str(row.left.key).split(".")):
            return "MaxText has one scale for it, as its latent attention takes no weight_block_size"
        cut = {axis for group in row.right.groups[-2:] for axis in group}
        lengths = row.left.shape(sizes)
        for group, length, scale_count in zip(row.left.groups, lengths, grid, strict=True):
            expected = length if length < block else length // block
            if scale_count != expected and not cut.isdisjoint(group):
                axes = " ".join(group)
                return (
                    f"MaxText has {plural(expected, 'scale')} on {axes} {length} with "
                    f"weight_block_size={block}, and blocks of {block} make {scale_count}"
                )
        return ""

    return misfit_reason


def square_block_size(block: Block | None) -> int | None:
    """Return MaxText's block size; None for one scale per weight."""
    return block[0] if block and block[0] == block[1] else None


def grid_mismatch_remark(misfits: Sequence[str]) -> str:
    """Return a remark on FP8 weights that MaxText loads but cannot compute with in FP8."""
    return (
        f"MaxText can load these FP8 weights, but cannot compute in FP8 with {plural(len(misfits), 'kind')} "
        f"of them: {action('maxtext_config', 'DST')} gives the reasons"
    )


@dataclass(frozen=True)
class Native:
    """The parameters of a MaxText model, some of which may be quantized.

    Attributes:
        arrays: Arrays by dotted names, without scales.
        scales: Name of a quantized leaf -> its scales.
        sounds: Name of a quantized leaf -> a function that checks its scales.
        block: The shape of a block; None if each leaf has one scale.
        notes: Notes about the effect of dequantization on values.
    """

    arrays: Mapping[str, LazyArray]
    scales: Mapping[str, LazyArray] = field(default_factory=dict)
    sounds: Mapping[str, ScaleCheck] = field(default_factory=dict)
    block: Block | None = None
    notes: Notes = field(default_factory=Notes)


def native_parameters(
    arrays: Mapping[str, LazyArray],
    config: Mapping[str, Any] | None,
    location: str,
    dtype: DType | None = None,
) -> Native:
    """Separate the quantized leaves of a model from their scales, or dequantize them.

    Args:
        arrays: Arrays by dotted names.
        config: The model's configuration, which may state the block size; otherwise it is inferred from the
            grids of scales.
        location: The location of the model, for messages.
        dtype: The dtype of the dequantized values; None keeps the leaves quantized.

    Raises:
        FormatError: Scales do not fit or are not numeric. The message lists them.
    """
    pairs = scale_pairs(arrays)
    if not pairs:
        return Native(arrays)
    if dtype is not None:
        tree = Tree({(name,): item for name, item in arrays.items()}).with_metadata(location=location)
        result = quantized_view(tree).plain(dtype)
        return Native({str(path[0]): item for path, item in result.tree.arrays.items()}, notes=result.notes)
    from ckpttools.quantized.scale_checks import scale_check_of

    scales = {name: arrays[scale] for name, scale in pairs.items()}
    sounds = {
        name: scale_check_of(arrays[scale], arrays[name].dtype, scale, location)
        for name, scale in pairs.items()
    }
    removed = set(pairs.values())
    plain = {name: item for name, item in arrays.items() if name not in removed}
    return Native(plain, scales, sounds, block_of(plain, scales, config))


def block_of(
    arrays: Mapping[str, LazyArray], scales: Mapping[str, LazyArray], config: Mapping[str, Any] | None
) -> Block | None:
    """Return the block size from the configuration, or the largest group that shares a scale.

    Args:
        arrays: Arrays by dotted names.
        scales: Name of a quantized leaf -> its scales.
        config: The model's configuration.

    Returns:
        The block size; None if each leaf has one scale.
    """
    gridded = {name: item for name, item in scales.items() if item.ndim == arrays[name].ndim}
    if not gridded:
        return None
    settings = (declared_quantization(config) or {}).get("weight_block_size")
    if (
        isinstance(settings, list)
        and len(settings) == len(set(settings)) + 1
        and isinstance(settings[0], int)
    ):
        return settings[0], settings[0]
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
    """Return the scales of Hugging Face's weights, and the table without value ops.

    If several scales become the scale of one block, they are read, because they must be equal.

    Args:
        table: The table of the model.
        arrays: The arrays that are mapped.
        native: The quantized leaves among them.
        cut: Axes on which arrays may be longer than in the model.
    """
    result = unread_grids(table, arrays, native, cut)
    return replace(result, problems=(*result.problems, *_unequal_scales(result, native.block)))


def unread_grids(
    table: Table, arrays: Mapping[str, LazyArray], native: Native, cut: Collection[str] = ()
) -> ScaleGrids:
    """Return the result of `hugging_face_grids` without reading any scales."""
    scales = {name: item for name, item in native.scales.items() if name in arrays}
    if not scales:
        return ScaleGrids(table, {})
    size = square_block_size(native.block)
    block, fits = (None, 1) if size is None else (native.block, size)
    from ckpttools.maxtext.scale_grids import scale_grids

    return scale_grids(
        table,
        arrays,
        scales,
        block,
        inverse=True,
        cut=cut,
        fits=grid_mismatch_test(fits),
        sounds=native.sounds,
    )


def _unequal_scales(grids: ScaleGrids, block: Block | None) -> Iterator[str]:
    """Yield a line for each weight whose scales differ within a block."""
    for name, (cells, times) in grids.cells.items():
        repeated_cells = grids.scales[name]
        for axis, item in zip((cells.ndim - 2, cells.ndim - 1), times, strict=True):
            repeated_cells = repeat_elements(repeated_cells, axis, item, cells.shape[axis])
        if repeated_cells.read().tobytes() != cells.read().tobytes():
            yield f"{name}: its scales differ within blocks of {' x '.join(map(str, block or ()))}"


def with_quantization_config(
    config: Mapping[str, Any],
    arrays: Mapping[str, LazyArray],
    weights: Mapping[str, LazyArray],
    block: Block | None,
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a configuration with its quantization settings, and the changes.

    Args:
        config: The model's configuration.
        arrays: All arrays that are written with the configuration, by name.
        weights: Names of the quantized weights -> their scales.
        block: The shape of a block.
    """
    size = list(block) if block else None
    settings = declared_quantization(config) or {}
    if settings.get("quant_method") == "fp8" and settings.get("weight_block_size") == size:
        return config, ()
    from ckpttools.quantized.config import unquantized_modules

    scales = {name + BLOCK_SCALE for name in weights}
    others = {name: item for name, item in arrays.items() if name not in scales}
    result = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": size,
        "modules_to_not_convert": unquantized_modules(others, weights),
    }
    return {**config, FIELD: result}, (f"{FIELD} is {scheme(result)}, like the weights",)
