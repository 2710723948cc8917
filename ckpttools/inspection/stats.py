"""Statistics of every array of a checkpoint, read once, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby
from math import isfinite

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import filter_items
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing
from ckpttools.core.memory_limit import estimate_names_bytes
from ckpttools.core.region import Region, Shape
from ckpttools.core.tabular import Tabular
from ckpttools.inspection import distribution as distributions
from ckpttools.inspection import moment_statistics
from ckpttools.inspection.distribution import Counts, Distribution, count_patterns, sum_counts
from ckpttools.inspection.layer_rows import LayerRow, layer_rows
from ckpttools.inspection.moment_statistics import Moments
from ckpttools.plan.pieces import Tiles
from ckpttools.roles.of_tree import ROLES, Role, roles
from ckpttools.run.scanning import scan


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of elements; for complex numbers, of their magnitudes.

    Attributes:
        elements: Number of elements.
        min, max, mean, std, norm, max_abs: Statistics of the finite elements; None if there are none, or if
            float64 cannot represent the value. `std` is for the complete population, and `norm` is L2.
            Extremes are exact; for the others see docs/stats-and-report.md.
        zeros, subnormals, nan, inf: Exact number of such elements.
    """

    elements: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    max_abs: float | None
    zeros: int
    subnormals: int
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class ArrayStats:
    """Statistics of an array.

    Attributes:
        path, shape, dtype, role: See `ckpttools.inspection.tree.ArrayReport`; `nbytes` is the size in memory.
        statistics: Statistics of all elements.
        first_bad: Index of the first NaN or infinite element in C order.
        layers: Statistics by layer, for arrays of stacked layers, if requested.
        distribution: Distribution of the elements; None if not requested, if no element is finite, or if
            float64 cannot represent one.
    """

    path: str
    shape: Shape
    dtype: str
    nbytes: int
    role: Role
    statistics: Statistics
    first_bad: Shape | None
    layers: Mapping[int, Statistics]
    distribution: Distribution | None


@dataclass(frozen=True, slots=True, repr=False)
class StatsReport(Tabular):
    """Statistics of all arrays.

    Attributes:
        path, format, step: Path, format and step of the checkpoint.
        num_arrays, nbytes: Totals of `arrays`.
        nan, inf: Number of such elements in all arrays.
        arrays: Parameters, then optimizer state, then others; each in the order of the checkpoint.
        remarks: For quantized weights, whether the statistics are of dequantized or stored values.
    """

    path: str
    format: str | None
    step: int | None
    num_arrays: int
    nbytes: int
    nan: int
    inf: int
    arrays: tuple[ArrayStats, ...]
    remarks: tuple[str, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether all elements are finite."""
        return not (self.nan or self.inf)

    def __repr__(self) -> str:
        """Return what was read, and the arrays with elements that are not finite, as text."""
        text = f"{self.num_arrays:,} arrays, {self.nbytes:,} bytes, {self.nan:,} NaN, {self.inf:,} infinite"
        lines = [array.path for array in self.arrays if array.statistics.nan or array.statistics.inf]
        return f"<StatsReport of {self.path}: {text}{listing(lines)}>"


def inspect_stats(
    tree: Tree,
    pattern: str | Collection[Path] = "*",
    *,
    memory: int,
    jobs: int | None,
    per_layer: bool = False,
    histograms: bool = False,
    most_histograms: int | None = None,
    observe: Callable[[int], None] = lambda nbytes: None,
) -> StatsReport:
    """Compute the statistics of a tree by reading every element.

    Args:
        tree: Any checkpoint.
        pattern: Shell pattern of the paths to read, or the paths themselves.
        memory: Maximum resident bytes.
        jobs: Maximum number of workers; fewer if they do not fit into the memory.
        per_layer: Whether to compute statistics for every layer stacked in an array, too.
        histograms: Whether to compute the distributions of the elements, too.
        most_histograms: Maximum number of arrays with distributions, starting with the largest; None for all.
        observe: Called with the bytes of every piece that was read.

    Raises:
        CheckpointError: An array cannot be read, the memory is too small, or no array matches.
    """
    selected = matching(tree, pattern)
    counted = _largest(selected.values(), most_histograms) if histograms else frozenset[int]()
    examination = _Examination(
        tuple(selected.values()), _stacked_layers(tree, selected) if per_layer else {}, counted
    )
    items = [(array,) for array in selected.values()]
    cut = Tiles(_PIECE_BYTES)
    names = list(map(keystr, selected))
    reserved = estimate_names_bytes(names) + len(selected) * _BYTES_PER_ARRAY
    reserved += sum(distributions.max_bytes_of(examination.arrays[index]) for index in counted)
    results = scan(
        items,
        examination,
        memory=memory,
        jobs=jobs,
        cut=cut,
        scratch=_SCRATCH_BYTES,
        reserved=reserved,
        observe=observe,
        name=names.__getitem__,
    )
    pieces = groupby(results, key=lambda item: item.index)
    result = {index: examination.joined(index, (item.result for item in group)) for index, group in pieces}
    known = roles(tree)
    arrays = [
        _stats(path, array, known.of(path), result.get(index, _ArraySummary({}, None)))
        for index, (path, array) in enumerate(selected.items())
    ]
    return StatsReport(
        path=tree.metadata.location,
        format=tree.metadata.format,
        step=tree.metadata.step,
        num_arrays=len(arrays),
        nbytes=sum(item.nbytes for item in arrays),
        nan=sum(item.statistics.nan for item in arrays),
        inf=sum(item.statistics.inf for item in arrays),
        arrays=tuple(sorted(arrays, key=lambda item: ROLES.index(item.role))),
    )


def _largest(arrays: Iterable[LazyArray], limit: int | None) -> frozenset[int]:
    """Return the indices of the largest arrays, at most `limit`."""
    sizes = [array.nbytes for array in arrays]
    return frozenset(sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:limit])


def matching(tree: Tree, pattern: str | Collection[Path]) -> dict[Path, LazyArray]:
    """Return the arrays whose paths match a shell pattern, or those at the given paths.

    Raises:
        UsageError: No array matches the pattern.
    """
    if not isinstance(pattern, str):
        return {path: tree.arrays[path] for path in pattern}
    return dict(filter_items(tree.arrays.items(), lambda item: keystr(item[0]), pattern))


@dataclass(frozen=True, slots=True)
class _PieceSummary:
    """The results of a piece: moments by layer (all under None if layers are not separate), and counts."""

    layers: Mapping[int | None, Moments]
    counts: Counts | None


@dataclass(frozen=True, slots=True)
class _ArraySummary:
    """Statistics of an array, for each layer and as a distribution."""

    layers: Mapping[int | None, Moments]
    distribution: Distribution | None


# The numbers must fit the cache, too: bfloat16 ran at 9.1 GB/s (two cores), and at 8.5 in pieces of 8 MiB;
# stacked layers ran at 8.4 instead of 5.6.
_PIECE_BYTES = 4 << 20
# Memory for the text about an array: 100,000 small ones took 2.0 KiB each in total.
_BYTES_PER_ARRAY = 768
_SCRATCH_BYTES = max(moment_statistics.SCRATCH_BYTES, distributions.SCRATCH_BYTES)


@dataclass(frozen=True, slots=True)
class _Examination:
    """Computes the statistics of pieces, and combines the results of an array.

    Attributes:
        arrays: Arrays by index.
        rows: Layers of each array whose layers are separate.
        counted: Arrays whose bit patterns are counted.
    """

    arrays: tuple[LazyArray, ...]
    rows: Mapping[int, LayerRow]
    counted: frozenset[int]

    def __call__(
        self, index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch
    ) -> _PieceSummary:
        array, (data,) = self.arrays[index], values
        row = self.rows.get(index)
        parts: Iterable[tuple[int | None, Region]] = [(None, region)]
        if row is not None:
            parts = row.parts(region, array.shape).items()
        # Count first, because `moment_statistics.moments` overwrites the elements.
        counts = count_patterns(data, array.dtype, scratch) if index in self.counted else None
        layers = {
            layer: moment_statistics.moments(data, region, part, array.dtype, scratch)
            for layer, part in parts
        }
        return _PieceSummary(layers, counts)

    def joined(self, index: int, pieces: Iterable[_PieceSummary]) -> _ArraySummary:
        """Combine the results of all pieces of one array."""
        layers: dict[int | None, Moments] = {}

        def counts() -> Iterator[Counts]:
            for piece in pieces:
                for layer, result in piece.layers.items():
                    layers[layer] = layers[layer] + result if layer in layers else result
                if piece.counts is not None:
                    yield piece.counts

        # The pieces can be iterated only once, so their counts are added immediately.
        total = sum_counts(counts())
        result = sum(layers.values(), Moments())
        dtype = self.arrays[index].dtype
        return _ArraySummary(layers, distributions.distribution(total, result, dtype) if total else None)


def _stacked_layers(tree: Tree, selected: Mapping[Path, LazyArray]) -> dict[int, LayerRow]:
    """Return the stacked layers of the selected arrays, by index."""
    rows = layer_rows(tree)
    return {index: rows[path] for index, path in enumerate(selected) if path in rows and rows[path].axes}


def _stats(path: Path, array: LazyArray, role: Role, summary: _ArraySummary) -> ArrayStats:
    total = sum(summary.layers.values(), Moments())
    layers = {layer: statistics_of(result) for layer, result in summary.layers.items() if layer is not None}
    return ArrayStats(
        path=keystr(path),
        shape=array.shape,
        dtype=array.dtype.name,
        nbytes=array.nbytes,
        role=role,
        statistics=statistics_of(total),
        first_bad=total.first,
        layers=dict(sorted(layers.items())),
        distribution=summary.distribution,
    )


def statistics_of(result: Moments) -> Statistics:
    """Convert moments to statistics."""
    extremes = [abs(item) for item in (result.min, result.max) if item is not None]
    return Statistics(
        elements=result.elements,
        min=_finite_or_none(result.min),
        max=_finite_or_none(result.max),
        mean=_finite_or_none(result.mean if result.finite else None),
        std=_finite_or_none(result.deviation),
        norm=_finite_or_none(result.norm),
        max_abs=_finite_or_none(max(extremes, default=None)),
        zeros=result.zeros,
        subnormals=result.subnormals,
        nan=result.nan,
        inf=result.inf,
    )


def _finite_or_none(number: float | None) -> float | None:
    """Return the number, or None if float64 could not represent an intermediate result."""
    # Adding zero turns -0 into 0.
    return number + 0 if number is not None and isfinite(number) else None
