"""Compare the output head of a model with its embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored, swap_last_axes, window
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.message_terms import action, option, option_names
from ckpttools.core.region import Region, split_evenly
from ckpttools.core.text import plural
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.maxtext.model_options import family_for
from ckpttools.maxtext.tied_embeddings import Head, right_head

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.maxtext.conversion_options import ToMaxText

# Scratch memory per element: both arrays as float64, their difference, and a mask.
_ELEMENTS = 1 << 18
_SCRATCH = 64 * _ELEMENTS
# Number of groups of adjacent rows in a sample of a table.
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class StoredHead:
    """An output head and an embedding, which may be equal.

    Attributes:
        names: Names of both arrays.
        head, embedding: The arrays.
        is_transposed: Whether the vocabulary is the head's last axis, as in MaxText.
    """

    names: Head
    head: LazyArray
    embedding: LazyArray
    is_transposed: bool = False

    @property
    def oriented(self) -> LazyArray:
        """Return the head with one row per token, like the embedding."""
        if not self.is_transposed or len(self.head.shape) != 2:
            return self.head
        return swap_last_axes(self.head)

    def deviation(
        self, *, memory: int, reserved: int = 0, max_rows: int | None = None
    ) -> HeadDeviation | None:
        """Compare both arrays, piece by piece.

        Args:
            memory: Peak memory limit in bytes.
            reserved: Bytes of the limit that are already in use.
            max_rows: Maximum number of rows to compare, spread over the table; None for all.

        Returns:
            The deviation; None if all values are equal.

        Raises:
            MemoryBudgetError: Even a small piece does not fit in memory.
            FormatError, StorageError: An array cannot be read.
        """
        import numpy as np

        from ckpttools.plan.pieces import Tiles, fit_pieces

        head, table = self.oriented, self.embedding
        if head is table or _have_same_bytes(head, table):
            return None
        if head.shape != table.shape:
            return HeadDeviation(head.shape[0] if head.shape else 0, head.shape[0] if head.shape else 0, None)
        items = list(_parts(head, table, max_rows))
        fit = fit_pieces(items, memory=memory, jobs=1, scratch=_SCRATCH, reserved=reserved)
        rows, differing, largest = 0, 0, 0.0
        for item in items:
            unequal = np.zeros(item[0].shape[:1], bool)
            limit = fit.piece_bytes // sum(array.dtype.itemsize for array in item)
            for piece in Tiles(fit.piece_bytes)(item, limit):
                largest = max(largest, _compare_piece(item, piece, unequal))
            rows, differing = rows + unequal.size, differing + int(np.count_nonzero(unequal))
        return HeadDeviation(differing, rows, largest) if differing else None


@dataclass(frozen=True, slots=True)
class HeadDeviation:
    """The deviation of an output head from an embedding.

    Attributes:
        rows: Number of rows that differ.
        compared: Number of rows that were compared.
        largest: Largest absolute difference; None if the shapes differ.
    """

    rows: int
    compared: int
    largest: float | None

    def __str__(self) -> str:
        if self.largest is None:
            return "a different shape"
        return f"{self.rows:,} of {plural(self.compared, 'row')} differ, by up to {self.largest:.3g}"


def refuse_lost_head(lost: StoredHead, tree: Tree, *, memory: int, reserved: int = 0) -> None:
    """Refuse to leave out an output head that differs from the embedding.

    Args:
        lost: The head that a conversion leaves out.
        tree: The checkpoint that is converted.
        memory, reserved: See `StoredHead.deviation`.

    Raises:
        ConfigError: The head differs from the embedding.
        CheckpointError: As for `StoredHead.deviation`.
    """
    deviation = lost.deviation(memory=memory, reserved=reserved)
    if deviation is None:
        return
    location, names = tree.metadata.location, lost.names
    without = f"{option('drop', names.head)} discards it"
    if lost.is_transposed:
        pattern = f"*{names.head.replace('.', '/')}"
        selected = action("select", "SRC", "DST", drop=[pattern])
        without = f"{selected} writes a checkpoint without it"
    raise ConfigError(
        "the output head differs from the embedding: its values would be lost",
        location=f"{names.head} in {location}" if location else names.head,
        got=str(deviation),
        expected=f"the values of {names.embedding}",
        hint=f"{option('tied', 'keep')} keeps the head; {without}",
    )


def with_head_compared(error: CoverageError, tree: Tree, options: ToMaxText, memory: int) -> CoverageError:
    """Add the head's deviation from the embedding to an error about an unexpected output head.

    Args:
        error: An error of `ckpttools.maxtext.to_maxtext.to_maxtext`.
        tree, options: The arguments of that call.
        memory: Peak memory limit in bytes.

    Returns:
        The error, or an extended copy of it if the head is the only defect.

    Raises:
        CheckpointError: As for `StoredHead.deviation`.
    """
    if not isinstance(error, NotCoveredError):
        return error
    coverage, arrays = error.coverage, by_name(tree.arrays)
    family = family_for(tree.metadata.config, options.model, tree.metadata.location)
    names = right_head(family, family.spelling_of(arrays))
    if names is None or coverage.extra != (names.head,) or coverage.missing or coverage.misshapen:
        return error
    if not {names.head, names.embedding} <= arrays.keys():
        return error
    deviation = StoredHead(names, arrays[names.head], arrays[names.embedding]).deviation(memory=memory)
    if deviation is None:
        got = f"{names.head} has the values of {names.embedding}"
        hint = f"{option('tied', 'drop')} stores both once"
    else:
        got = f"{names.head} differs from {names.embedding}: {deviation}"
        hint = f"{option('tied', 'keep')} keeps both"
    # Omit reasons about the `tied` option, because the comparison has already decided it.
    reasons = [reason for reason in coverage.reasons if "tied" not in option_names(reason)[:1]]
    return error.at(got=got, hint="; ".join((hint, *reasons)))


def is_alias(names: Head, arrays: Mapping[str, LazyArray]) -> bool:
    """Return whether a file stores the head and the embedding once, under two names."""
    return {names.head, names.embedding} <= arrays.keys() and _have_same_bytes(
        arrays[names.head], arrays[names.embedding]
    )


def _have_same_bytes(head: LazyArray, table: LazyArray) -> bool:
    """Return whether two arrays are the same stored bytes."""
    return (
        isinstance(head, Stored)
        and isinstance(table, Stored)
        and (head.shape, head.dtype, head.offset) == (table.shape, table.dtype, table.offset)
        and head.source is table.source
    )


def _parts(head: LazyArray, table: LazyArray, max_rows: int | None) -> Iterator[tuple[LazyArray, LazyArray]]:
    """Yield both arrays, or only groups of their rows that are spread over the table."""
    import numpy as np

    rows, width = head.shape[0], head.shape[1:]
    if max_rows is None or rows <= max_rows:
        yield head, table
        return
    count = max(1, max_rows // _SAMPLES)
    for start in np.linspace(0, rows - count, _SAMPLES).astype(int).tolist():
        first, shape = (start, *(0 for _ in width)), (count, *width)
        yield window(head, first, shape), window(table, first, shape)


def _compare_piece(item: tuple[LazyArray, LazyArray], piece: Region, unequal: np.ndarray) -> float:
    """Mark the rows of a piece that differ, and return the largest absolute difference."""
    import numpy as np

    head, table = (np.ascontiguousarray(array.read(piece)) for array in item)
    if item[0].dtype == item[1].dtype and head.tobytes() == table.tobytes():
        return 0.0
    largest = 0.0
    for part in split_evenly(piece, _ELEMENTS):
        inside = part.relative_to(piece).slices
        head_values, other = _to_float64(head[inside], item[0]), _to_float64(table[inside], item[1])
        differs = (head_values != other) & ~(np.isnan(head_values) & np.isnan(other))
        if differs.any():
            where = slice(part.start[0], part.stop[0])
            unequal[where] |= differs.reshape(len(differs), -1).any(axis=1)
            with np.errstate(invalid="ignore"):
                gap = np.abs(head_values - other)[differs]
            largest = max(largest, float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max()))
    return largest


def _to_float64(carriers: np.ndarray, array: LazyArray) -> np.ndarray:
    import numpy as np

    from ckpttools.array.elements import wide, widen

    carriers = np.ascontiguousarray(carriers)
    result = np.empty(carriers.shape, wide(array.dtype))
    # Casting signaling NaNs is an invalid operation, and the caller compares NaNs separately.
    with np.errstate(invalid="ignore"):
        widen(carriers, array.dtype, result)
        return result.astype(np.float64, copy=False)
