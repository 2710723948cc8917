"""An HTML report about a checkpoint: one file that needs no other files and no network.

A hundred thousand arrays with all their statistics take about 4 MB before compression.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from importlib.resources import files
from math import hypot, isfinite, sqrt
from typing import Any

from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import render
from ckpttools.core.text import printable
from ckpttools.inspection.distribution import Distribution
from ckpttools.inspection.layer_rows import LayerRow
from ckpttools.inspection.moment_statistics import Spread, combine_spreads
from ckpttools.inspection.stats import ArrayStats, Statistics, StatsReport
from ckpttools.inspection.tree import ArrayReport, TreeReport

# Number of digits that are visible in a plot.
_DIGITS = 8
_COLUMNS = ("min", "max", "mean", "std", "norm", "zeros", "subnormals", "nan", "inf")
# Maximum number of entries, because more entries make the page large and hard to search. The largest are
# kept.
MAX_HISTOGRAMS, _MAX_HEAT_ROWS = 2000, 500


def contents(tree: TreeReport, stats: StatsReport | None, rows: Mapping[Path, LayerRow]) -> dict[str, Any]:
    """Return the data of the page as JSON values.

    Args:
        tree: Report of all arrays.
        stats: Statistics of these arrays, by layer and with distributions; None for a page without
            statistics.
        rows: Layers of the arrays.
    """
    by_path = {} if stats is None else {array.path: array for array in stats.arrays}
    arrays = [by_path.get(array.path) for array in tree.arrays]
    return {
        "facts": _facts(tree),
        **_columns(tree.arrays),
        "stats": None if stats is None else _statistics(arrays),
        "histograms": _histograms(arrays),
        "heat": _heat(filter(None, arrays), rows),
    }


def _facts(tree: TreeReport) -> dict[str, Any]:
    return {
        "path": printable(tree.path),
        "format": tree.format,
        "kind": tree.kind,
        "flavor": tree.flavor,
        "scanAxis": tree.scan_axis,
        "step": tree.step,
        "parameters": tree.num_parameters,
        "layers": [asdict(group) for group in tree.layers],
        "optimizer": tree.optimizer.name if tree.optimizer else None,
        "custom": {key: json.dumps(value, default=str) for key, value in tree.custom_metadata.items()},
        "warnings": [printable(render(warning.text)) for warning in tree.warnings],
    }


def _columns(arrays: Sequence[ArrayReport]) -> dict[str, Any]:
    paths = [printable(array.path) for array in arrays]
    return {
        "separator": "/" if any("/" in path for path in paths) else ".",
        "paths": list(_front_coded(paths)),
        "shape": _index_words([f"[{', '.join(map(str, array.shape))}]" for array in arrays]),
        "dtype": _index_words([array.dtype for array in arrays]),
        "role": _index_words([array.role for array in arrays]),
        "bytes": [array.nbytes for array in arrays],
    }


def _front_coded(paths: Iterable[str]) -> Iterator[int | str]:
    """Yield each path front-coded: the length of the prefix shared with the previous path, then the rest."""
    before = ""
    for path in paths:
        shared = _common_prefix_length(before, path)
        yield shared
        yield path[shared:]
        before = path


def _common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two words, in JavaScript's code units."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b or a > "\uffff"), min(len(one), len(other)))


def _index_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the distinct words, and the index of the word at each position."""
    numbers: dict[str, int] = {}
    indices = [numbers.setdefault(word, len(numbers)) for word in words]
    return {"words": list(numbers), "indices": indices}


def _statistics(arrays: Sequence[ArrayStats | None]) -> dict[str, list[Any]]:
    return {
        name: [None if array is None else _short(getattr(array.statistics, name)) for array in arrays]
        for name in _COLUMNS
    }


def _short(number: float | None) -> float | None:
    if number is None or isinstance(number, int):
        return number
    return float(f"{number:.{_DIGITS}g}") if isfinite(number) else None


def _histograms(arrays: Sequence[ArrayStats | None]) -> dict[str, Any]:
    """Return the distributions of the largest arrays that have one, by index of the array."""
    having = (
        (index, item, item.distribution)
        for index, item in enumerate(arrays)
        if item is not None and item.distribution
    )
    largest = sorted(having, key=lambda result: -result[1].nbytes)[:MAX_HISTOGRAMS]
    return {str(index): _histogram(item.statistics.zeros, spread) for index, item, spread in largest}


def _histogram(zeros: int, spread: Distribution) -> dict[str, Any]:
    return {
        "zeros": zeros,
        "tiny": spread.zeros - zeros,
        "minExponent": spread.min_exponent,
        "bins": [[item.exponent, item.negative, item.positive] for item in spread.bins],
        "quantiles": [[share, _short(value)] for share, value in spread.quantiles.items()],
    }


@dataclass(slots=True)
class _Cell:
    """A cell of the heat map. Arrays such as those of experts are combined into one cell."""

    spread: Spread = (0, 0.0, 0.0)
    limit: float = 0.0
    bad: int = 0

    def add(self, result: Statistics) -> None:
        self.bad += result.nan + result.inf
        if result.mean is not None and result.std is not None and result.max_abs is not None:
            finite = result.elements - result.nan - result.inf
            self.spread = combine_spreads(self.spread, (finite, result.mean, result.std * sqrt(finite)))
            self.limit = max(self.limit, result.max_abs)

    def packed(self) -> list[float | None]:
        """Return norm, deviation, mean, largest magnitude, and number of NaN and infinite elements."""
        finite, mean, root = self.spread
        if not finite:
            return [None, None, None, None, self.bad]
        norm, deviation = hypot(root, sqrt(finite) * mean), root / sqrt(finite)
        return [*map(_short, (norm, deviation, mean, self.limit)), self.bad]


@dataclass(slots=True)
class _HeatRow:
    name: str
    role: str
    nbytes: int = 0
    cells: dict[int, _Cell] = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        layers = {str(layer): cell.packed() for layer, cell in sorted(self.cells.items())}
        return {"name": printable(self.name), "role": self.role, "layers": layers}


def _heat(arrays: Iterable[ArrayStats], rows: Mapping[Path, LayerRow]) -> list[dict[str, Any]]:
    """Return the rows of the heat map in the order of the arrays, each with all layers of a parameter."""
    by_path = {keystr(path): row for path, row in rows.items()}
    built: dict[str, _HeatRow] = {}
    for array in arrays:
        row = by_path.get(array.path)
        # Counters and random states also have layers, but their norms are meaningless.
        if row is not None and array.role != "other":
            name = row.without_expert_numbers
            heat_row = built.setdefault(name, _HeatRow(name, array.role))
            heat_row.nbytes += array.nbytes
            layers = array.layers or {row.numbers[0]: array.statistics}
            for layer, result in layers.items():
                heat_row.cells.setdefault(layer, _Cell()).add(result)
    # A single layer does not make a row of the heat map.
    multi_layer_rows = [row for row in built.values() if len(row.cells) > 1]
    largest = {id(row) for row in sorted(multi_layer_rows, key=lambda row: -row.nbytes)[:_MAX_HEAT_ROWS]}
    return [row.packed() for row in multi_layer_rows if id(row) in largest]


# Each script uses only earlier ones.
_SCRIPTS = ("format", "contents", "elements", "facts", "treemap", "heatmap", "histograms", "table", "main")


def page(contents: Mapping[str, Any], title: str) -> str:
    """Return the HTML of the report.

    Args:
        contents: Result of `ckpttools.inspection.html_report.contents`.
        title: Title of the window.
    """
    text = json.dumps(_printable(contents), separators=(",", ":"), allow_nan=False)
    # Compressed, because names and numbers repeat. base64 contains no characters that are special in HTML.
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    slots = {
        "title": html.escape(title),
        "style": _part("style.css"),
        "script": "\n".join(_part(f"{name}.js") for name in _SCRIPTS),
        "contents": packed,
    }
    built = _part("page.html")
    for name, filling in slots.items():
        built = built.replace(f"<!-- {name} -->", filling)
    return built


def _printable(value: object) -> object:
    """Escape every string of the report, so that data cannot control how the page looks."""
    match value:
        case str():
            return printable(value)
        case Mapping():
            return {printable(str(key)): _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
    return value


def _part(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
