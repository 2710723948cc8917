"""Find faults in the values of a tree: NaN, infinity, zeros, repeated layers and unsound scales.

Every element is read once, and elements of repeated layers are read a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import take
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DamagedScalesError
from ckpttools.core.message_terms import call
from ckpttools.core.region import Region
from ckpttools.core.text import first_names, plural
from ckpttools.diagnosis.base import ERROR, WARNING, Finding, finding_of
from ckpttools.diagnosis.inventory import ValueReading
from ckpttools.inspection.layer_rows import LayerRow, layer_rows
from ckpttools.inspection.stats import ArrayStats, Statistics, StatsReport, inspect_stats
from ckpttools.quantized.view import quantized_view
from ckpttools.run.scanning import scan
from ckpttools.stores.location import Location

_MAX_NAMED = 5
_AGAIN = "fetch the checkpoint again, or restore it from another copy or an earlier step"
# Names of low-rank factors whose product is zero before training.
_STARTS_AT_ZERO = ("lora_b", "lora_up")


def value_findings(tree: Tree, location: Location, reading: ValueReading) -> Iterator[Finding]:
    """Read all values of a tree, and yield the faults.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    view, damage = quantized_view(tree), None
    try:
        tree = view.plain_where_possible(is_read=True).tree
    except DamagedScalesError as error:
        damage = error  # The stored scales are read instead, to name the elements.
    rows = {keystr(path): row for path, row in layer_rows(tree).items()}
    report = inspect_stats(
        tree, memory=reading.memory, jobs=reading.jobs, per_layer=True, observe=reading.observer(tree)
    )
    yield from _not_finite(report, location)
    if damage is not None and report.finite:
        yield finding_of(damage, location, reason="the weights have no values")
    yield from _all_zero(report, rows, location)
    yield from _repeated(tree, report, rows, location, reading)


def _not_finite(report: StatsReport, location: Location) -> Iterator[Finding]:
    bad = [array for array in report.arrays if array.first_bad is not None]
    if not bad:
        return
    lines = [f"{_element(array)} (first of {_bad_counts(array.statistics)})" for array in bad]
    problem = f"{plural(len(bad), 'array')} with values that are not finite: {first_names(lines, _MAX_NAMED)}"
    reason = "whatever is computed with them is not finite either, so the model returns NaN"
    command = call("stats", str(location))
    do = f"{_AGAIN}; {command} shows the counts of each array"
    yield Finding(ERROR, str(location), problem, reason, do, command=command)


def _element(array: ArrayStats) -> str:
    index = "" if not array.first_bad else f"[{', '.join(map(str, array.first_bad))}]"
    return f"{array.path}{index}"


def _bad_counts(statistics: Statistics) -> str:
    counts = [
        f"{count:,} {name}" for count, name in ((statistics.nan, "NaN"), (statistics.inf, "Inf")) if count
    ]
    return f"{' and '.join(counts)} in {plural(statistics.elements, 'element')}"


def _matrices(
    report: StatsReport, rows: Mapping[str, LayerRow]
) -> Iterator[tuple[ArrayStats, int | None, Statistics]]:
    """Yield the matrices among the parameters: array, layer and statistics, by layer for stacked arrays.

    In a sound model, biases and norms may be zero or equal; after training, matrices may not.
    """
    for array in report.arrays:
        row = rows.get(array.path)
        stacked = len(row.axes) if row is not None else 0
        name = array.path.lower()
        if array.role != "parameter" or len(array.shape) - stacked < 2 or "bias" in name.rpartition("/")[2]:
            continue
        if stacked and array.layers:
            yield from ((array, layer, result) for layer, result in array.layers.items())
        else:
            yield array, row.numbers[0] if row is not None and row.numbers else None, array.statistics


def _all_zero(report: StatsReport, rows: Mapping[str, LayerRow], location: Location) -> Iterator[Finding]:
    layers: dict[str, list[int | None]] = defaultdict(list)
    for array, layer, result in _matrices(report, rows):
        is_factor = any(part in array.path.lower() for part in _STARTS_AT_ZERO)
        if result.elements and result.zeros == result.elements and not is_factor:
            is_stacked = bool(array.layers)
            layers[array.path].append(layer if is_stacked else None)
    if not layers:
        return
    lines = [f"{path}{_in_layers(numbers)}" for path, numbers in layers.items()]
    problem = f"{plural(len(layers), 'array')} with nothing but zeros: {first_names(lines, _MAX_NAMED)}"
    reason = "these weights have no effect: they were probably never trained, loaded or saved"
    yield Finding(WARNING, str(location), problem, reason, f"compare it with its source; {_AGAIN}")


def _in_layers(numbers: Sequence[int | None]) -> str:
    known = [str(number) for number in numbers if number is not None]
    return f" (layer{'s' * (len(known) != 1)} {first_names(known, _MAX_NAMED)})" if known else ""


@dataclass(frozen=True, slots=True)
class _LayerMatrix:
    """A matrix of a single layer."""

    layer: int
    array: LazyArray


def _repeated(
    tree: Tree,
    report: StatsReport,
    rows: Mapping[str, LayerRow],
    location: Location,
    reading: ValueReading,
) -> Iterator[Finding]:
    """Report layers that have the same matrices. Layers with equal statistics are compared bit by bit."""
    arrays = {keystr(path): array for path, array in tree.arrays.items()}
    groups: dict[tuple[str, Statistics], list[_LayerMatrix]] = defaultdict(list)
    total: dict[int, int] = defaultdict(int)
    for stats, layer, result in _matrices(report, rows):
        row = rows.get(stats.path)
        if row is None or layer is None:
            continue
        total[layer] += 1
        if result.std:
            array = _layer_of(arrays[stats.path], row, layer)
            groups[row.name, result].append(_LayerMatrix(layer, array))
    pairs = [
        (name, first, other)
        for (name, _), (first, *others) in groups.items()
        for other in others
        if other.layer != first.layer
    ]
    equal = _are_equal([(first.array, other.array) for _, first, other in pairs], reading)
    repeated: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (name, first, other), is_equal in zip(pairs, equal, strict=True):
        if is_equal:
            repeated[first.layer, other.layer].append(name)
    if not repeated:
        return
    lines = [
        f"layer {other} repeats layer {first} in {len(names)} of {plural(total[other], 'weight')}, "
        f"such as {names[0]}"
        for (first, other), names in sorted(repeated.items())
    ]
    problem = (
        f"{plural(len(repeated), 'layer')} with the values of another one: {first_names(lines, _MAX_NAMED)}"
    )
    reason = "trained layers differ: a conversion or a restore may have written one layer twice"
    yield Finding(WARNING, str(location), problem, reason, f"compare it with its source; {_AGAIN}")


def _layer_of(array: LazyArray, row: LayerRow, layer: int) -> LazyArray:
    """Return one layer of an array, lazily."""
    if not row.axes:
        return array
    index = np.unravel_index(row.numbers.index(layer), [array.shape[axis] for axis in row.axes])
    for axis, position in reversed(list(zip(row.axes, index, strict=True))):
        array = take(array, axis, int(position))
    return array


def _are_equal(pairs: Sequence[tuple[LazyArray, LazyArray]], reading: ValueReading) -> list[bool]:
    """Return whether two arrays have the same bits, for each pair."""
    result = [True] * len(pairs)

    def compare(index: int, region: Region, values: tuple[np.ndarray, ...], scratch: Scratch) -> bool:
        first, second = values
        return bool(np.array_equal(first, second))

    for piece in scan(pairs, compare, memory=reading.memory, jobs=reading.jobs) if pairs else ():
        result[piece.index] &= piece.result
    return result
