"""The output head of a model next to its embedding: whether both are the same array, and how far apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored, swapped, window
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.region import Region, split_to
from ckpttools.core.text import plural
from ckpttools.core.wording import option, step
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.maxtext.model import family_for
from ckpttools.maxtext.tying import Head, right_head
from ckpttools.plan.pieces import Tiles, fitted_pieces

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.maxtext.to_maxtext_options import ToMaxText

# Both sides of a block as float64, their difference, and where they differ.
_ELEMENTS = 1 << 18
_SCRATCH = 64 * _ELEMENTS
# Groups of adjacent rows that stand for a whole table.
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class StoredHead:
    """An output head and the embedding that may be the same array.

    Attributes:
        names: of both.
        head, embedding: the arrays.
        is_transposed: whether the head has the vocabulary on its last axis, as in MaxText.
    """

    names: Head
    head: LazyArray
    embedding: LazyArray
    is_transposed: bool = False

    @property
    def oriented(self) -> LazyArray:
        """The head with one row for each token, as the embedding has them."""
        if not self.is_transposed or len(self.head.shape) != 2:
            return self.head
        return swapped(self.head)

    def deviation(
        self, *, memory: int, reserved: int = 0, most_rows: int | None = None
    ) -> HeadDeviation | None:
        """Compare both. Reads them piece by piece.

        Args:
            memory: Peak memory limit in bytes.
            reserved: Bytes of it that are in use already.
            most_rows: Compare only this many rows, spread over the table; None for all.

        Returns:
            How far they are apart, None if all numbers are equal.

        Raises:
            MemoryBudgetError: Not even a small piece fits into the memory.
            FormatError, StorageError: An array cannot be read.
        """
        import numpy as np

        head, table = self.oriented, self.embedding
        if head is table or _same_bytes(head, table):
            return None
        if head.shape != table.shape:
            return HeadDeviation(head.shape[0] if head.shape else 0, head.shape[0] if head.shape else 0, None)
        items = list(_parts(head, table, most_rows))
        fit = fitted_pieces(items, memory=memory, jobs=1, scratch=_SCRATCH, reserved=reserved)
        rows, differing, largest = 0, 0, 0.0
        for item in items:
            unequal = np.zeros(item[0].shape[:1], bool)
            most = fit.piece_bytes // sum(array.dtype.itemsize for array in item)
            for piece in Tiles(fit.piece_bytes)(item, most):
                largest = max(largest, _compare_piece(item, piece, unequal))
            rows, differing = rows + unequal.size, differing + int(np.count_nonzero(unequal))
        return HeadDeviation(differing, rows, largest) if differing else None


@dataclass(frozen=True, slots=True)
class HeadDeviation:
    """How far an output head and an embedding are apart.

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
            return "another shape"
        return f"{self.rows:,} of {plural(self.compared, 'row')} differ, by up to {self.largest:.3g}"


def refuse_lost_head(lost: StoredHead | None, tree: Tree, *, memory: int, reserved: int = 0) -> None:
    """Refuse to leave out an output head that differs from the embedding.

    Args:
        lost: The head that a conversion leaves out, or None.
        tree: The checkpoint that is converted.
        memory, reserved: See `StoredHead.deviation`.

    Raises:
        ConfigError: The head has values of its own.
        CheckpointError: See `StoredHead.deviation`.
    """
    found = None if lost is None else lost.deviation(memory=memory, reserved=reserved)
    if lost is None or found is None:
        return
    place, names = tree.metadata.place, lost.names
    without = f"{option('drop', names.head)} leaves it out for good"
    if lost.is_transposed:
        pattern = f"*{names.head.replace('.', '/')}"
        selected = step(
            f"ckpttools.select(SRC, DST, drop=[{pattern!r}])", f"ckpt select SRC DST --drop {quote(pattern)}"
        )
        without = f"{selected} writes a checkpoint without it"
    raise ConfigError(
        "the output head differs from the embedding: its values would be lost",
        place=f"{names.head} in {place}" if place else names.head,
        got=str(found),
        wanted=f"the values of {names.embedding}",
        hint=f"{option('tied', 'keep')} keeps the head; {without}",
    )


def with_head_compared(error: CoverageError, tree: Tree, options: ToMaxText, memory: int) -> CoverageError:
    """Add to an error about an unexpected output head how far it is from the embedding.

    Args:
        error: Raised by `ckpttools.maxtext.to_maxtext.to_maxtext`.
        tree, options: What it was called with.
        memory: Peak memory limit in bytes.

    Returns:
        The error, or a copy of it if the head is all that is wrong.

    Raises:
        CheckpointError: See `StoredHead.deviation`.
    """
    if not isinstance(error, NotCoveredError):
        return error
    found, arrays = error.coverage, by_name(tree.arrays)
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    names = right_head(family, family.spelling_of(arrays))
    if names is None or found.extra != (names.head,) or found.missing or found.misshapen:
        return error
    if not {names.head, names.embedding} <= arrays.keys():
        return error
    apart = StoredHead(names, arrays[names.head], arrays[names.embedding]).deviation(memory=memory)
    if apart is None:
        got, way = f"{names.head} has the values of {names.embedding}", "drop"
    else:
        got, way = f"{names.head} differs from {names.embedding}: {apart}", "keep"
    which = {"drop": "stores both once", "keep": "keeps both"}[way]
    made = error.at(hint=f"{option('tied', way)} {which}; {error.hint}")
    made.got = got
    return made


def is_alias(names: Head, arrays: Mapping[str, LazyArray]) -> bool:
    """Whether a file stores the head and the embedding once, under two names."""
    return {names.head, names.embedding} <= arrays.keys() and _same_bytes(
        arrays[names.head], arrays[names.embedding]
    )


def _same_bytes(head: LazyArray, table: LazyArray) -> bool:
    """Whether both are the same stored bytes."""
    return (
        isinstance(head, Stored)
        and isinstance(table, Stored)
        and (head.shape, head.dtype, head.offset) == (table.shape, table.dtype, table.offset)
        and head.source is table.source
    )


def _parts(head: LazyArray, table: LazyArray, most_rows: int | None) -> Iterator[tuple[LazyArray, LazyArray]]:
    """Both arrays, or as many of their rows as are to be compared, spread over the table."""
    import numpy as np

    rows, width = head.shape[0], head.shape[1:]
    if most_rows is None or rows <= most_rows:
        yield head, table
        return
    count = max(1, most_rows // _SAMPLES)
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
    for part in split_to(piece, _ELEMENTS):
        inside = part.relative_to(piece).slices
        mine, other = (_numbers(each[inside], array) for each, array in zip((head, table), item, strict=True))
        differs = (mine != other) & ~(np.isnan(mine) & np.isnan(other))
        if differs.any():
            where = slice(part.start[0], part.stop[0])
            unequal[where] |= differs.reshape(len(differs), -1).any(axis=1)
            with np.errstate(invalid="ignore"):
                gap = np.abs(mine - other)[differs]
            largest = max(largest, float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max()))
    return largest


def _numbers(carriers: np.ndarray, array: LazyArray) -> np.ndarray:
    import numpy as np

    from ckpttools.array.elements import wide, widen

    carriers = np.ascontiguousarray(carriers)
    made = np.empty(carriers.shape, wide(array.dtype))
    widen(carriers, array.dtype, made)
    return made.astype(np.float64, copy=False)
