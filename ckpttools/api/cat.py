"""Read the values of an array, or of a region of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from itertools import product
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Unpack

from ckpttools.api.options import MEMORY, OPENING, REQUESTS
from ckpttools.api.options.inspect import CAT
from ckpttools.api.output_file import check_output_file
from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.array.lazy import Index, LazyArray, parse_index
from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree, keystr
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, MemoryBudgetError, StorageError, UsageError
from ckpttools.core.memory_limit import format_size, limit_memory
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare, parse_size_option
from ckpttools.core.region import Region
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.inspection.stats import Statistics

# Maximum number of elements for which all values are printed, and number of values at both ends of longer
# axes; as in numpy.
SUMMARY_THRESHOLD = 1000
EDGE_ITEMS = 3
# Memory of an element as a Python number in nested lists and as text, in bytes.
_BYTES_AS_TEXT = 64
# Bytes that are read at once for statistics.
_CHUNK_BYTES = 4 << 20
_INDEX = re.compile(r"(.*?)\[([^\[\]]*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArrayValues:
    """Values of an array.

    Attributes:
        path: Path of the checkpoint.
        name: Path of the array, joined by "/".
        dtype: Dtype of the values; for quantized weights, the dtype to which they are dequantized.
        shape: Shape of the array.
        index: The selected index, such as "3, :, 10:20"; "" for the full array.
        selected_shape: Shape of the selection.
        values: The selected values as nested lists, a single value or a text; None if they were not
            requested.
        excerpt: Whether `values` contains only the first and last items of each long axis.
        statistics: Statistics of the selected elements, if requested.
        output: File to which the values were written.
        remarks: Remarks about quantized weights, and about dtypes that `.npy` files do not support.
    """

    path: str
    name: str
    dtype: str | None
    shape: tuple[int, ...]
    index: str
    selected_shape: tuple[int, ...]
    values: Any = None
    excerpt: bool = False
    statistics: Statistics | None = None
    output: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArraySelection:
    """A part of an array: the selected coordinates of each axis.

    Attributes:
        array: The array.
        coordinates: One range for each axis.
        kept: Axes that are not removed by an integer index.
    """

    array: LazyArray
    coordinates: tuple[range, ...]
    kept: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.coordinates[axis]) for axis in self.kept)

    @property
    def size(self) -> int:
        return prod(map(len, self.coordinates))

    @property
    def nbytes(self) -> int:
        return self.size * self.array.dtype.itemsize

    def with_coordinates(self, axis: int, indices: range) -> ArraySelection:
        """Return the selection with other coordinates along one axis."""
        return replace(self, coordinates=(*self.coordinates[:axis], indices, *self.coordinates[axis + 1 :]))

    def chunks(self, max_bytes: int) -> Iterator[np.ndarray]:
        """Yield the values in C order, in arrays that keep all axes.

        Args:
            max_bytes: Maximum size of a region that is read at once, but at least one element.
        """
        axis = next((axis for axis, indices in enumerate(self.coordinates) if len(indices) > 1), None)
        region = parse_index(self.array.shape, self._slices()).region
        if axis is None or region.size * self.array.dtype.itemsize <= max_bytes:
            yield self.array[self._slices()]
            return
        indices = self.coordinates[axis]
        middle = len(indices) // 2
        for half in (indices[:middle], indices[middle:]):
            yield from self.with_coordinates(axis, half).chunks(max_bytes)

    def read(self, max_bytes: int) -> np.ndarray:
        """Read the selected values, without the axes that integer indexes remove."""
        import numpy as np

        parts = [part.reshape(-1) for part in self.chunks(max_bytes)]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values.reshape(self.shape)

    def excerpt(self, max_bytes: int) -> np.ndarray:
        """Read `EDGE_ITEMS` items at both ends of each long axis, and one placeholder item between them."""
        import numpy as np

        ends = [
            [indices]
            if len(indices) <= 2 * EDGE_ITEMS
            else [indices[: EDGE_ITEMS + 1], indices[-EDGE_ITEMS:]]
            for indices in self.coordinates
        ]
        out = np.empty([sum(map(len, axis)) for axis in ends], self.array.dtype.numpy)
        for corner in product(*(range(len(axis)) for axis in ends)):
            part = replace(self, coordinates=tuple(axis[i] for axis, i in zip(ends, corner, strict=True)))
            at = tuple(
                slice(i * len(axis[0]), i * len(axis[0]) + len(axis[i]))
                for axis, i in zip(ends, corner, strict=True)
            )
            values = [item.reshape(-1) for item in part.chunks(max_bytes)]
            out[at] = np.concatenate(values).reshape(out[at].shape)
        return out.reshape([out.shape[axis] for axis in self.kept])

    def _slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(indices.start, indices.stop if indices.stop >= 0 else None, indices.step)
            if indices
            else slice(0, 0)
            for indices in self.coordinates
        )


@validate_arguments
@declare(*CAT, *OPENING, MEMORY, REQUESTS)
def cat(
    source: Source,
    name: str,
    *,
    index: Index | str | None = None,
    raw: bool = False,
    full: bool = False,
    stats: bool = False,
    output: LocationLike | None = None,
    memory: int | str = "1GiB",
    requests: int | None = None,
    **reading: Unpack[Opening],
) -> ArrayValues:
    """Read values of an array. Reads only the selected region.

    Without `full`, `stats` or `output`, a selection of more than 1,000 elements is read as an excerpt: the
    first and last three items of each long axis, as in numpy's output. Use `ckpttools.open(source)[name][3,
    :]` to get a numpy array.

    Args:
        source: A file, item, step or run directory, or a tree.
        name: Path of the array, with keys joined by "/" or ".". It may end with an index, as in
            "params/scale[3, :, 10:20]".
        index: Integers, slices and an ellipsis, as in numpy, or the same as text.

    Raises:
        NoSuchPathError: No array has this name. The message suggests similar names.
        UsageError: The index is invalid, or the output file exists or does not end in `.npy`.
        MemoryBudgetError: The selected values do not fit into the memory.
        CheckpointError: The checkpoint cannot be read.
    """
    limit = parse_size_option("memory", memory)
    with limit_memory(limit), use_concurrency(requests):
        tree = opened(source, read_options(reading))
        output_location = None if output is None else parse(output, is_written=True)
        if output_location is not None:
            _check_output(output_location, tree.metadata.location)
        path, index_text = _find_array(tree, name, index)
        leaf: Leaf = tree.leaves[path]
        remarks: tuple[str, ...] = ()
        if isinstance(leaf, LazyArray) and not raw:
            leaf, remarks = _dequantize_leaf(tree, path)
        report = ArrayValues(tree.metadata.location, keystr(path), None, (), index_text, ())
        if not isinstance(leaf, LazyArray):
            for is_given, term in ((stats, option("stats", True)), (output_location, option("output"))):
                if is_given:
                    raise UsageError(f"{report.name} is not an array", got=term, expected="an array")
            return _describe_leaf(report, leaf)
        selection = _select(leaf, index_text, keystr(path))
        report = replace(
            report,
            dtype=leaf.dtype.name,
            shape=leaf.shape,
            selected_shape=selection.shape,
            remarks=remarks,
        )
        if output_location is not None:
            report = _write_npy(report, selection, output_location, limit)
        if stats:
            report = replace(report, statistics=_statistics(selection, limit))
        if stats or output is not None:
            return report
        is_excerpt = not full and selection.size > SUMMARY_THRESHOLD
        if not is_excerpt:
            _check_fits(selection, limit)
        read = selection.excerpt if is_excerpt else selection.read
        return replace(report, values=read(limit // 4).tolist(), excerpt=is_excerpt)


def _find_array(tree: Tree, name: str, index: Index | str | None) -> tuple[Path, str]:
    """Return the path and the index as text. The name may include the index."""
    text = index if isinstance(index, str) else "" if index is None else _format_index(index)
    bracketed = _INDEX.fullmatch(name)
    if bracketed and tree.get(name) is None:
        if text:
            raise UsageError("the index is given twice", got=f"{name} and {text}")
        name, text = bracketed[1], bracketed[2].strip()
    return tree.find_path(name), text


def _format_index(index: Index) -> str:
    keys = index if isinstance(index, tuple) else (index,)
    return ", ".join(
        "..."
        if key is Ellipsis
        else ":".join("" if bound is None else str(bound) for bound in _bounds(key))
        if isinstance(key, slice)
        else str(key)
        for key in keys
    )


def _bounds(key: slice) -> tuple[object, ...]:
    return (key.start, key.stop) if key.step is None else (key.start, key.stop, key.step)


def _dequantize_leaf(tree: Tree, path: Path) -> tuple[Leaf, tuple[str, ...]]:
    """Return the values of a quantized weight, or another leaf unchanged."""
    from ckpttools.quantized.view import quantized_view

    numeric = quantized_view(tree).plain_where_possible().tree
    if path not in numeric or numeric.leaves[path] is tree.leaves[path]:
        return tree.leaves[path], ()
    stored, leaf = tree.arrays[path], numeric.arrays[path]
    return leaf, (
        f"dequantized from {stored.dtype} to {leaf.dtype}; {option('raw', True)} shows stored values",
    )


def _describe_leaf(report: ArrayValues, leaf: Leaf) -> ArrayValues:
    """Return the value of a leaf that is not an array."""
    if report.index:
        raise UsageError(f"{report.name} is not an array", got=f"the index [{report.index}]")
    if isinstance(leaf, Text):
        return replace(report, dtype="text", values=leaf.value)
    assert isinstance(leaf, Empty)
    return replace(report, dtype=leaf.kind)


def _select(array: LazyArray, text: str, name: str) -> ArraySelection:
    """Parse an index such as `3, :, 10:20`."""
    try:
        keys = tuple(_parse_key(key.strip()) for key in text.split(",")) if text else ()
        indexing = parse_index(array.shape, keys)
    except IndexError as error:
        raise UsageError(
            f"invalid index for {name}",
            got=f"[{text}]: {error}",
            expected=f"integers, slices and an ellipsis for the shape {list(array.shape)}, such as "
            f"[{', '.join(['0'] * min(array.ndim, 1) + [':'] * (array.ndim - 1)) or '...'}]",
        ) from error
    takes = indexing.within
    spans = map(range, indexing.region.start, indexing.region.stop)
    coordinates = tuple(
        span[take] if isinstance(take, slice) else span for span, take in zip(spans, takes, strict=True)
    )
    return ArraySelection(
        array, coordinates, tuple(axis for axis, take in enumerate(takes) if isinstance(take, slice))
    )


def _parse_key(text: str) -> int | slice | EllipsisType:
    if text == "...":
        return ...
    try:
        bounds = [int(bound) if bound.strip() else None for bound in text.split(":")]
    except ValueError as error:
        raise IndexError(f"{text!r} is not an index") from error
    if len(bounds) == 1 and bounds[0] is not None:
        return bounds[0]
    if not 1 < len(bounds) <= 3 or bounds[2:] == [0]:
        raise IndexError(f"{text!r} is not an index")
    return slice(*bounds)


def _check_fits(selection: ArraySelection, limit: int) -> None:
    needed = selection.nbytes + selection.size * _BYTES_AS_TEXT
    if needed > limit:
        raise MemoryBudgetError(
            f"{selection.size:,} values do not fit into the memory",
            expected=f"at most {format_size(limit)} ({option('memory')})",
            got=format_size(needed),
            hint=f"select a smaller region, or write them to a file: {option('output', 'values.npy')}",
        )


def _statistics(selection: ArraySelection, limit: int) -> Statistics:
    from ckpttools.array.scratch import Scratch
    from ckpttools.inspection.moment_statistics import SCRATCH_BYTES, Moments, moments
    from ckpttools.inspection.stats import statistics_of

    result, scratch = Moments(), Scratch(SCRATCH_BYTES)
    for chunk in selection.chunks(min(limit // 4, _CHUNK_BYTES)):
        values = chunk.view(selection.array.dtype.carrier).reshape(-1)
        region = Region.whole(values.shape)
        result += moments(values, region, region, selection.array.dtype, scratch)
    return statistics_of(result)


def _write_npy(report: ArrayValues, selection: ArraySelection, output: Location, limit: int) -> ArrayValues:
    """Write the selected values to a new file, with a wider dtype if numpy lacks the dtype."""
    import numpy as np

    if 2 * selection.nbytes > limit:
        raise MemoryBudgetError(
            f"{selection.size:,} values do not fit into the memory",
            expected=f"at most {format_size(limit // 2)} of values, half of {option('memory')}",
            got=format_size(selection.nbytes),
            hint=f"select a smaller region, or raise {option('memory')}",
        )
    values, remarks = selection.read(limit // 4), report.remarks
    if values.dtype.isbuiltin != 1:
        kind = selection.array.dtype.kind
        values = values.astype({"float": "float32", "uint": "uint8"}.get(kind, "int8"))
        remarks = (
            *remarks,
            f".npy files have no {report.dtype}; the values are stored as {values.dtype}, without loss",
        )
    content = BytesIO()
    np.lib.format.write_array(content, np.ascontiguousarray(values), allow_pickle=False)
    output.put(content.getvalue())
    return replace(report, output=str(output), remarks=remarks)


def _check_output(output: Location, source: str) -> None:
    """Reject an invalid output path before anything is read."""
    if output.suffix != ".npy":
        raise UsageError("the output is not a .npy file", got=output, expected="a name that ends in .npy")
    check_output_file(output, source)
    if output.lexists():
        raise DestinationExistsError(f"{output} exists", expected="a new name")
    if not output.absolute().parent.is_dir():
        raise StorageError(f"the directory {output.absolute().parent} does not exist", location=output)
