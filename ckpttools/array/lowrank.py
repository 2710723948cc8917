"""Products of low-rank factors, and sums with them, for adapters.

A product is summed in float64, multiplied by its scale and rounded to float32. A sum is added in float32, or
in float64 for float64 arrays, and rounded once to the array's dtype. Elements therefore do not depend on how
a matrix is split or on the linear algebra library, except that the last float32 bit of about one element in
10**8 may differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from math import frexp
from typing import TYPE_CHECKING

from ckpttools.array import read_blocks
from ckpttools.array.lazy import Composite, ElementwiseCombination, LazyArray, ReadCost
from ckpttools.array.read_blocks import subview
from ckpttools.array.relayout import Permutation, Relayout, relayout, reshape_in_order, swap_last_axes
from ckpttools.array.rounding import round_to
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

FLOAT32 = DTYPES["float32"]
_WIDE = 8
# OpenBLAS stays in the calling thread if a product has at most 2**18 multiplications. With its own threads in
# addition to the workers, it was ten times slower. Many small products are computed in one numpy call: with
# rank 16, an element takes 0.88 ns in tiles of 8 rows and 1 MiB, and 1.15 ns in single products of 32 rows.
_TILE_ROWS, _TILE_PRODUCTS, _TILE = 8, 1 << 18, 1 << 17
# Bytes of sums that are computed and rounded at a time. A merge takes 2.0 ns per element with this size, and
# 2.25 ns with 256 KiB, which stay in a core's cache but need four times as many calls.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class _FactorView:
    """A view of a factor for reading.

    Attributes:
        array: The factor, with its last two axes swapped if that makes reads more contiguous.
        is_swapped: Whether they are swapped.
    """

    array: LazyArray
    is_swapped: bool

    @classmethod
    def of(cls, factor: LazyArray) -> _FactorView:
        if isinstance(factor, Relayout) and factor.has_transposed_matrices:
            return cls(swap_last_axes(factor), is_swapped=True)
        return cls(factor, is_swapped=False)

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Read a matrix of the factor into `out` as float64, in C order."""
        if self.is_swapped:
            _read_as(self.array, region.swapped(), out.T, scratch)
        else:
            _read_as(self.array, region, out, scratch)


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Composite):
    """The product `scale * left @ right` over the last two axes, in float32.

    `parts` are the floating-point factors left (…, rows, rank) and right (…, rank, columns).

    Attributes:
        scale: Scale of the product, multiplied in float64.
    """

    scale: float

    @property
    def has_factors(self) -> bool:
        return True

    def permuted(self, permutation: Permutation) -> LazyArray | None:
        """Permute the factors instead of the product, unless atoms of rows and columns alternate.

        The product is then computed in the new order, without moving elements.
        """
        if self.ndim != 2:
            return None
        split, order, merge = permutation
        row_atoms = len(split[0])
        is_column = [atom >= row_atoms for atom in order]
        rows_first = is_column == sorted(is_column)
        if not rows_first and is_column != sorted(is_column, reverse=True):
            return None
        left, right = self.parts
        rows = [atom for atom in order if atom < row_atoms]
        columns = [atom - row_atoms for atom in order if atom >= row_atoms]
        rank = (self.rank,)
        left = relayout(left, (split[0], rank), (*rows, row_atoms), (row_atoms, 1))
        right = relayout(right, (rank, split[1]), (0, *(atom + 1 for atom in columns)), (1, len(columns)))
        if not rows_first:
            left, right = swap_last_axes(right), swap_last_axes(left)
        product = low_rank(left, right, self.scale)
        atoms = permutation.atoms
        lengths = [atoms[atom] for atom in order]
        first = row_atoms if rows_first else len(columns)
        groups = (tuple(lengths[:first]), tuple(lengths[first:]))
        return reshape_in_order(product, Permutation(groups, tuple(range(len(atoms))), merge))

    @property
    def rank(self) -> int:
        """Return the rank of the factors."""
        return self.parts[0].shape[-1]

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        left, right = self._factors
        for one in region.each(region.rank - 2):
            for part in one.pieces(region.rank - 1, self._columns):
                with scratch.take((self.rank, part.shape[-1]), DTYPES["float64"].numpy) as second:
                    right.read_into(part.replaced(part.rank - 2, 0, self.rank), second, scratch)
                    for piece in part.pieces(region.rank - 2, self._rows):
                        view = subview(out, piece.relative_to(region)).view(FLOAT32.numpy)
                        self._multiply(left, piece, second, view, scratch)

    def _multiply(
        self, left: _FactorView, piece: Region, second: np.ndarray, out: np.ndarray, scratch: Scratch
    ) -> None:
        import numpy as np

        wide = DTYPES["float64"].numpy
        with scratch.take((piece.shape[-2], self.rank), wide) as first:
            left.read_into(piece.replaced(piece.rank - 1, 0, self.rank), first, scratch)
            of_left, of_sums = self._scales
            first *= of_left
            with scratch.take((_TILE,), wide) as tile, np.errstate(over="ignore", invalid="ignore"):
                _multiply_scaled(first, second, out.reshape(out.shape[-2:]), tile, of_sums)

    @cached_property
    def _scales(self) -> tuple[float, float]:
        """Return the scale of the left factor and the scale of the sums.

        Sums of bfloat16 or float16 factors are exact in any order, and after scaling many lie halfway between
        two float32 numbers; for example, with a scale of 16/7, the sums that are multiples of 7. If the left
        factor were scaled and rounded first, the order of summation would decide how those round (40 of 10**5
        elements). Powers of two scale without rounding, so they are applied to the left factor, which has
        fewer numbers.
        """
        return (self.scale, 1.0) if abs(frexp(self.scale)[0]) == 0.5 else (1.0, self.scale)

    @cached_property
    def _factors(self) -> tuple[_FactorView, _FactorView]:
        left, right = self.parts
        return _FactorView.of(left), _FactorView.of(right)

    @property
    def _columns(self) -> int:
        """Return how many columns of the right factor are held in memory at a time."""
        return max(1, min(self.shape[-1], read_blocks.READ_BLOCK_BYTES // (_WIDE * max(1, self.rank))))

    @property
    def _rows(self) -> int:
        """Return how many rows of the left factor are held in memory at a time."""
        return max(1, min(self.shape[-2], read_blocks.READ_BLOCK_BYTES // (_WIDE * max(1, self.rank))))

    @property
    def scratch_bytes(self) -> int:
        rows, columns = self._rows, self._columns
        taken = (self.rank * columns, rows * self.rank, max(_TILE, max(rows, columns) * self.rank))
        own = sum(read_blocks.page(_WIDE * item) for item in taken) + read_blocks.page(0)
        return own + max(factor.array.scratch_bytes for factor in self._factors)

    @property
    def is_computed(self) -> bool:
        return True

    def _factor_regions(self, region: Region) -> tuple[tuple[LazyArray, Region], tuple[LazyArray, Region]]:
        left, right = self.parts
        rows = region.replaced(region.rank - 1, 0, self.rank)
        return (left, rows), (right, region.replaced(region.rank - 2, 0, self.rank))

    def read_cost(self, region: Region) -> ReadCost:
        return sum((part.read_cost(inner) for part, inner in self._factor_regions(region)), ReadCost())

    @property
    def read_kind(self) -> Hashable:
        return ("lowrank", *(part.read_kind for part in self.parts))

    def first_byte(self, region: Region) -> tuple[str, int]:
        part, inner = self._factor_regions(region)[0]
        return part.first_byte(inner)


def low_rank(left: LazyArray, right: LazyArray, scale: float = 1.0) -> LowRank:
    """Return `scale * left @ right`.

    Raises:
        ShapeError: The shapes of the factors do not match, or a dtype is not floating-point.
    """
    fits = (
        left.ndim == right.ndim >= 2
        and left.shape[:-2] == right.shape[:-2]
        and left.shape[-1] == right.shape[-2]
    )
    if not (fits and left.dtype.is_float and right.dtype.is_float):
        raise ShapeError(
            "these are not the factors of one product",
            got=f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}",
            expected="floating-point numbers, (rows, rank) and (rank, columns)",
        )
    return LowRank((*left.shape[:-1], right.shape[-1]), FLOAT32, (left, right), scale)


@dataclass(frozen=True, eq=False, repr=False)
class Plus(ElementwiseCombination):
    """The sum of an array and an addend (`parts`), rounded once to the array's dtype."""

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        array, addend = self.parts
        if self.parts[1].stacked_axes:
            # Reading single layers or experts would take many short reads.
            array.read_into(region, out, scratch)
        for box in self._boxes(region, self.parts[1].stacked_axes):
            values = subview(out, box.relative_to(region))
            if not self.parts[1].stacked_axes:
                array.read_into(box, values, scratch)
            with scratch.take(box.shape, self._sums.numpy) as total:
                self._read_addend(addend, box, total, scratch)
                self._add(box, total, values, scratch)

    def _boxes(self, region: Region, axes: Sequence[int]) -> Iterator[Region]:
        """Split a region into boxes of one layer or expert each, so that products are large matrices."""
        if not axes:
            yield from split_evenly(region, read_blocks.elements(self._widest))
            return
        for piece in region.pieces(axes[0], 1):
            yield from self._boxes(piece, axes[1:])

    def _add(self, box: Region, total: np.ndarray, values: np.ndarray, scratch: Scratch) -> None:
        """Compute values += total, block by block."""
        import numpy as np

        block = min(_BLOCK_BYTES // total.itemsize, total.size)
        with (
            scratch.take((block,), total.dtype) as spare,
            scratch.take((block,), values.dtype) as result,
            np.errstate(over="ignore", invalid="ignore", under="ignore"),
        ):
            for piece in split_evenly(box, block):
                location, shape, size = piece.relative_to(box), piece.shape, piece.size
                sums, part = subview(total, location), subview(values, location)
                self._add_block(
                    sums, part, spare[:size].reshape(shape), result[:size].reshape(shape), scratch
                )

    def _read_addend(self, addend: LazyArray, box: Region, total: np.ndarray, scratch: Scratch) -> None:
        if addend.dtype == self._sums:
            addend.read_into(box, total.view(addend.dtype.carrier), scratch)
        else:
            _read_as(addend, box, total, scratch)

    def _add_block(
        self, sums: np.ndarray, values: np.ndarray, spare: np.ndarray, out: np.ndarray, scratch: Scratch
    ) -> None:
        """Compute values += sums, rounded once; count numbers that become non-finite."""
        import numpy as np

        from ckpttools.array.elements import all_finite, widen

        numbers = values.view(self.dtype.numpy)
        if self.dtype.bits >= 32:
            sums += numbers
            out[...] = sums.view(self.dtype.carrier)
        else:
            widen(values, self.dtype, spare)
            sums += spare
            round_to(self.dtype, sums, out, spare.view(np.uint32))
        if self.dtype.not_finite_from is not None and not all_finite(out, self.dtype):
            lost = np.isfinite(numbers) & ~np.isfinite(out.view(self.dtype.numpy))
            scratch.tally({"overflowed": int(np.count_nonzero(lost))} if lost.any() else {})
        values[...] = out

    @property
    def _sums(self) -> DType:
        """Return the dtype of the sums."""
        return DTYPES["float64"] if self.dtype.bits > 32 else FLOAT32

    @property
    def _widest(self) -> int:
        """Return the largest element size of the sum and its parts, in bytes."""
        return max(4, *(part.dtype.itemsize for part in self.parts))

    @property
    def scratch_bytes(self) -> int:
        nbytes = self.size * self._widest
        own = read_blocks.scratch(nbytes) + 2 * read_blocks.page(min(nbytes, _BLOCK_BYTES))
        return own + max(part.scratch_bytes for part in self.parts)

    @property
    def read_kind(self) -> Hashable:
        return ("plus", *(part.read_kind for part in self.parts))


def add_arrays(array: LazyArray, addend: LazyArray) -> Plus:
    """Return `array` plus `addend`.

    Raises:
        ShapeError: The shapes differ, or a dtype is not floating-point.
    """
    if array.shape != addend.shape or not (array.dtype.is_float and addend.dtype.is_float):
        raise ShapeError(
            "these arrays cannot be added",
            got=f"{array.dtype}{list(array.shape)} and {addend.dtype}{list(addend.shape)}",
            expected="floating-point arrays of the same shape",
        )
    return Plus(array.shape, array.dtype, (array, addend))


@dataclass(frozen=True, eq=False, repr=False)
class DoraUpdate(Composite):
    """Adds a matrix and its addend, then scales the rows to given norms, as in DoRA.

    `parts` are the matrix (rows, columns), its addend, and the norms (rows,). The result is float32. Norms
    are summed in float64.
    """

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for piece in region.pieces(0, self._rows):
            rows = piece.replaced(1, 0, self.shape[1])
            with (
                scratch.take(rows.shape, FLOAT32.numpy) as matrix,
                scratch.take(rows.shape, FLOAT32.numpy) as total,
            ):
                self._read(rows, matrix, total, scratch)
                columns = slice(piece.start[1], piece.stop[1])
                total -= matrix
                subview(out, piece.relative_to(region)).view(FLOAT32.numpy)[...] = total[:, columns]

    def _read(self, rows: Region, matrix: np.ndarray, total: np.ndarray, scratch: Scratch) -> None:
        """Read rows of the matrix and the same rows of the other parts."""
        import numpy as np

        array, addend, lengths = self.parts
        _read_as(array, rows, matrix, scratch)
        _read_as(addend, rows, total, scratch)
        with (
            scratch.take(rows.shape[:1], FLOAT32.numpy) as expected,
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),
        ):
            _read_as(lengths, rows.without(1), expected, scratch)
            total += matrix
            present = [np.sqrt(np.dot(row, row)) for row in (item.astype(np.float64) for item in total)]
            total *= (expected / np.array(present, np.float64)).astype(np.float32)[:, None]

    @property
    def _rows(self) -> int:
        """Return how many rows are held in memory at a time."""
        return max(1, min(self.shape[0], read_blocks.elements(4) // max(1, self.shape[1])))

    @property
    def scratch_bytes(self) -> int:
        rows, columns = self._rows, self.shape[1]
        own = 3 * read_blocks.page(_WIDE * rows * columns) + 2 * read_blocks.page(_WIDE * rows)
        return own + max(part.scratch_bytes for part in self.parts)

    @property
    def is_computed(self) -> bool:
        return True

    def read_cost(self, region: Region) -> ReadCost:
        array, addend, lengths = self.parts
        rows = region.replaced(1, 0, self.shape[1])
        return array.read_cost(rows) + addend.read_cost(rows) + lengths.read_cost(rows.without(1))

    @property
    def read_kind(self) -> Hashable:
        return ("renormed", *(part.read_kind for part in self.parts))

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.parts[0].first_byte(region)


def dora_update(matrix: LazyArray, addend: LazyArray, lengths: LazyArray) -> DoraUpdate:
    """Return the sum of two arrays with its rows scaled to the given norms, as in DoRA.

    Raises:
        ShapeError: The shapes do not match, or a dtype is not floating-point.
    """
    parts = (matrix, addend, lengths)
    fits = matrix.ndim == 2 and addend.shape == matrix.shape and lengths.shape == matrix.shape[:1]
    if not (fits and all(part.dtype.is_float for part in parts)):
        raise ShapeError(
            "a matrix, an addend of its shape, and one norm per row are needed",
            got=", ".join(f"{part.dtype}{list(part.shape)}" for part in parts),
        )
    return DoraUpdate(matrix.shape, FLOAT32, parts)


def _read_as(array: LazyArray, region: Region, out: np.ndarray, scratch: Scratch) -> None:
    """Read a region into `out`, converted to its dtype (float32 or float64)."""
    from ckpttools.array.elements import widen

    with scratch.take(region.shape, array.dtype.carrier) as buffer:
        array.read_into(region, buffer, scratch)
        values = buffer.reshape(out.shape)
        if array.dtype.bits > 16:
            out[...] = values.view(array.dtype.numpy)
        elif out.dtype == FLOAT32.numpy:
            widen(values, array.dtype, out)
        else:
            with scratch.take(out.shape, FLOAT32.numpy) as narrow:
                widen(values, array.dtype, narrow)
                out[...] = narrow


def _multiply_scaled(
    left: np.ndarray, right: np.ndarray, out: np.ndarray, tile: np.ndarray, scale: float
) -> None:
    """Compute out = scale * left @ right in `tile`, rounded to float32; `left` is in C order."""
    import numpy as np

    (rows, rank), length = left.shape, right.shape[1]
    columns = max(1, min(length, _TILE // _TILE_ROWS, _TILE_PRODUCTS // (_TILE_ROWS * max(1, rank))))
    step = _TILE // (columns * _TILE_ROWS) * _TILE_ROWS
    for first in range(0, length, columns):
        others = right[:, first : first + columns]
        for start in range(0, rows, step):
            part = left[start : start + step]
            result = tile[: len(part) * others.shape[1]].reshape(len(part), -1)
            _multiply(part, others, result)
            if scale != 1:
                result *= scale
            np.copyto(out[start : start + step, first : first + columns], result, casting="same_kind")


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Compute out = left @ right in batches of a few rows; all but the last rows take one call."""
    import numpy as np

    full_rows = len(left) // _TILE_ROWS * _TILE_ROWS
    tile_shape = (full_rows // _TILE_ROWS, _TILE_ROWS)
    np.matmul(
        left[:full_rows].reshape(*tile_shape, left.shape[1]),
        right,
        out=out[:full_rows].reshape(*tile_shape, right.shape[1]),
    )
    if full_rows < len(left):
        np.matmul(left[full_rows:], right, out=out[full_rows:])
