"""Convert block scales along with weights: each grid follows the conversion of its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import elementwise, repeat_elements, take
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError
from ckpttools.core.region import Shape, ceil_div
from ckpttools.mapping.axes import Side
from ckpttools.mapping.blocks import (
    Block,
    Fits,
    block_counts,
    block_scales,
    cells_of_grid,
    fitting_cells,
    grid_of,
    merge_counts,
    times_of,
)
from ckpttools.mapping.build import ValueNote
from ckpttools.mapping.row import Row
from ckpttools.mapping.row_conversion import RowConversion, join_parts, part_of
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Multiply
from ckpttools.maxtext.native_fp8 import ScaleGrids

if TYPE_CHECKING:
    from ckpttools.quantized.scale_checks import ScaleCheck


@dataclass(frozen=True)
class _Scaled:
    """A row of quantized weights, read in one direction.

    Attributes:
        row: The row as defined by its family.
        source, target: The two sides of the row.
        indices: The coordinates of target keys whose sources are quantized weights.
        counts: The number of cells on each axis that is cut into blocks; empty if a weight has one scale.
        times: Number of cells in a block of a right array on its last two axes.
        misfit: The reason that `fits` returns.
    """

    row: Row
    source: Side
    target: Side
    indices: tuple[Mapping[str, int], ...]
    counts: Mapping[str, int]
    times: Block = (1, 1)
    misfit: str = ""


def scale_grids(
    table: Table,
    arrays: Mapping[str, LazyArray],
    scales: Mapping[str, LazyArray],
    block: Block | None,
    *,
    inverse: bool = False,
    cut: Collection[str] = (),
    fits: Fits = lambda row, sizes, grid: "",
    sounds: Mapping[str, ScaleCheck] | None = None,
) -> ScaleGrids:
    """Return the scales of a table's quantized weights, computed from the source's scales.

    Args:
        table: The rows, bound to a model.
        arrays: Source key -> array, including the values of quantized weights but not their scales.
        scales: Source key of a quantized weight -> its scales, which are a grid of blocks or a single scale.
        block: The shape of a block on the last two axes of right arrays; None if a weight has one scale.
        inverse: Whether left arrays are the source.
        cut: Axes on which left arrays may be longer than in the model.
        fits: Checks the grids of left arrays. The first grid that fits is used, or else the coarsest.
        sounds: Source key of a quantized weight -> a check of its scales and the converted scales, which runs
            when they are read.
    """
    sizes, flags = table.infer_known(arrays, left=inverse, cut=cut)
    known = {name for name, value in flags.items() if value}
    problems: dict[str, None] = {}
    quantized_rows: list[_Scaled] = []
    context = _Way(sizes, scales, block, fits, sounds or {}, inverse=inverse)
    for row in (row for row in table.rows if row.applies(known) and _has_known_lengths(row, sizes)):
        try:
            scaled = _scaled_row(row, context)
        except MappingError as error:
            problems[_line(row, error)] = None
        else:
            quantized_rows += [] if scaled is None else [scaled]
    builder = _ScaleBuilder(quantized_rows, context)
    values: list[ValueNote] = []
    for scaled in quantized_rows:
        try:
            values += builder.add(scaled)
        except MappingError as error:
            problems[_line(scaled.row, error)] = None
    plain = {id(item.row): replace(item.row, op=None) for item in quantized_rows}
    without = replace(table, rows=tuple(plain.get(id(row), row) for row in table.rows))
    misfits = dict.fromkeys(f"{item.row.left.key}: {item.misfit}" for item in quantized_rows if item.misfit)
    return ScaleGrids(without, builder.arrays, tuple(values), tuple(problems), tuple(misfits), builder.cells)


@dataclass(frozen=True)
class _Way:
    """Converts scales from one side to the other; attributes as the arguments of `scale_grids`."""

    sizes: Mapping[str, int]
    scales: Mapping[str, LazyArray]
    block: Block | None
    fits: Fits
    sounds: Mapping[str, ScaleCheck]
    inverse: bool


def _has_known_lengths(row: Row, sizes: Mapping[str, int]) -> bool:
    """Return whether a row has arrays and known axis lengths; otherwise the table refuses it."""
    needed = {*row.left.axes, *row.right.axes, *row.left.key.needs, *row.right.key.needs}
    return needed <= sizes.keys() and all(sizes[axis] for axis in needed)


def _scaled_row(row: Row, context: _Way) -> _Scaled | None:
    """Return the row with its scale layout if its weights are quantized.

    Raises:
        MappingError: Only some of the weights of a target array are quantized, or as for `_split_into_cells`.
    """
    sizes, scales = context.sizes, context.scales
    source, target = (row.left, row.right) if context.inverse else (row.right, row.left)
    keys = RowConversion(source, target, sizes).source_keys
    indices: list[Mapping[str, int]] = []
    count = 0
    for index in target.indices(sizes):
        have_scales = [key in scales for key in keys(index)]
        if any(have_scales) and not all(have_scales):
            raise MappingError(
                "only some of the parts of an array are quantized",
                got=f"{sum(have_scales)} of {len(have_scales)}",
            )
        indices += [index] if any(have_scales) else []
        count += 1
    if not indices:
        return None
    if len(indices) < count and row.op is not None:
        raise MappingError(
            "only some of the weights of an array are quantized", got=f"{len(indices)} of {count}"
        )
    if context.block is not None:
        return _split_into_cells(_Scaled(row, source, target, tuple(indices), {}), context, context.block)
    if source.join is not None or target.join is not None:
        raise MappingError("the parts of an array would need separate scales, but share one")
    return _Scaled(row, _one_scale(source, target), _one_scale(target, source), tuple(indices), {})


def _split_into_cells(scaled: _Scaled, context: _Way, block: Block) -> _Scaled:
    """Return the row with its axes cut into cells.

    Raises:
        MappingError: No cells are inside blocks on both sides, or the source's grid does not fit.
    """
    row, sizes = scaled.row, context.sizes
    if row.left.join is not None or row.right.join is not None:
        counts = block_counts(row.right, sizes, block)
        grid = grid_of(row.left, sizes, {**sizes, **counts})
        return replace(scaled, counts=counts, misfit=context.fits(row, sizes, grid))
    if context.inverse:
        first = next(RowConversion(row.left, row.right, sizes).source_keys(scaled.indices[0]))
        counts = cells_of_grid(row.left, sizes, context.scales[first].shape)
        misfit = context.fits(row, sizes, context.scales[first].shape)
        return replace(scaled, counts=counts, times=times_of(row.right, sizes, counts, block), misfit=misfit)
    counts, misfit = fitting_cells(row, sizes, block, context.fits)
    return replace(scaled, counts=counts, times=times_of(row.right, sizes, counts, block), misfit=misfit)


def _one_scale(side: Side, other: Side) -> Side:
    """Check that arrays with a single scale map to single arrays on the other side."""
    own = tuple((axis,) for axis in side.array_axes if axis in other.key.axes)
    return Side(side.key, own)


class _ScaleBuilder:
    """Builds target scales from rows; scales of several parts are built once all parts are present."""

    def __init__(self, rows: Iterable[_Scaled], context: _Way) -> None:
        self.arrays: dict[str, LazyArray] = {}
        self.cells: dict[str, tuple[LazyArray, Block]] = {}
        self._sizes, self._scales, self._inverse = context.sizes, context.scales, context.inverse
        self._sounds = context.sounds
        self._parts: defaultdict[str, list[tuple[Side, LazyArray]]] = defaultdict(list)
        self._counts: defaultdict[object, list[Mapping[str, int]]] = defaultdict(list)
        for row in rows:
            for side in (row.source, row.target):
                self._counts[side is row.source, side.key].append(row.counts)

    def add(self, scaled: _Scaled) -> list[ValueNote]:
        """Add the scales of a row's weights; return notes about changes to them.

        Raises:
            MappingError: The scales cannot follow the conversion of the weights.
        """
        cut = {**self._sizes, **self._blocks(scaled)}
        for side in (scaled.source, scaled.target) if scaled.counts else ():
            grid_of(side, self._sizes, cut)
        conversion = RowConversion(scaled.source, scaled.target, cut)
        keys = [key for index in scaled.indices for key in conversion.source_keys(index)]
        op = self._op(scaled)
        sources = {key: self._source(key, scaled, cut, op) for key in keys}
        dtype = sources[keys[0]].dtype
        sources = {key: part_of(scaled.source, item, cut) for key, item in sources.items()}
        conversion = replace(conversion, op=op)
        for index in scaled.indices:
            self._add(scaled, scaled.target.key.format(index, cut), conversion.at(index, sources), cut)
        if op is None:
            return []
        exactness = op.exactness(dtype)
        reason = f"its scales are {exactness.reason}"
        return [ValueNote(str(scaled.target.key), exactness.exact, reason, dtype)]

    def _source(self, key: str, scaled: _Scaled, cut: Mapping[str, int], op: Multiply | None) -> LazyArray:
        """Return the scales of a weight, one per cell, which are checked before and after `op`.

        Raises:
            MappingError: The scales have another shape.
        """
        expected, times = scaled.source.shape(cut), (1, 1) if self._inverse else scaled.times
        blocks = (*expected[:-2], *map(ceil_div, expected[-2:], times)) if scaled.counts else expected
        scales = _with_shape(key, self._scales[key], blocks, single=not scaled.counts)
        if key in self._sounds:
            scales = elementwise(scales, replace(self._sounds[key], then=op))
        for axis, item in zip((-2, -1), times, strict=True):
            if item > 1:
                scales = repeat_elements(scales, len(expected) + axis, item, expected[axis])
        return scales

    def _blocks(self, scaled: _Scaled) -> Mapping[str, int]:
        """Return the block lengths of a row's axes, and of the other parts of its arrays."""
        sides = [(True, scaled.source), (False, scaled.target)]
        other_counts = (
            count for is_source, side in sides if side.join for count in self._counts[is_source, side.key]
        )
        return merge_counts((scaled.counts, *other_counts))

    def _op(self, scaled: _Scaled) -> Multiply | None:
        """Return the value op of the weights, which is applied to their scales."""
        if scaled.row.op is None:
            return None
        op = scaled.row.op.bound(self._sizes)
        if not isinstance(op, Multiply):
            raise MappingError("the conversion does more than multiply the values", got=repr(op))
        return op if scaled.source.key == scaled.row.right.key else op.inverse()

    def _add(self, scaled: _Scaled, key: str, scales: LazyArray, cut: Mapping[str, int]) -> None:
        target = scaled.target
        if self._inverse and scaled.times != (1, 1):
            self.cells[key] = scales, scaled.times
            scales = block_scales(scales, scaled.times)
        if target.join is None:
            self.arrays[key] = scales
            return
        self._parts[key].append((target, scales))
        if len(self._parts[key]) == len(target.parts):
            self.arrays[key] = join_parts(self._parts[key], cut)


def _with_shape(key: str, scales: LazyArray, expected: Shape, *, single: bool) -> LazyArray:
    """Return the scales of a weight after checking their shape.

    Raises:
        MappingError: The scales have another shape.
    """
    if single and not expected and scales.size == 1:
        for _ in scales.shape:
            scales = take(scales, 0, 0)
    if scales.shape != expected:
        raise MappingError(
            f"{key} has scales of an unexpected shape", got=list(scales.shape), expected=list(expected)
        )
    return scales


def _line(row: Row, error: MappingError) -> str:
    """Format the problem of a row as one line."""
    got = f": {error.raw.got}" if error.raw.got else ""
    expected = f", expected {error.raw.expected}" if error.raw.expected else ""
    return f"{row.left.key}: {error.raw.message}{got}{expected}"
