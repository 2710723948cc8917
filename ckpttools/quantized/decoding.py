"""Codes times scales: the product in float32, rounded once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttools.array.dequantized import DequantizedPiece
from ckpttools.array.rounding import as_float32, round_to
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, ceil_div

if TYPE_CHECKING:
    import numpy as np

Like = Literal["float32", "maxtext"]
"""How products are rounded: once, or as MaxText does, which rounds scales to bfloat16 first."""

# Of the codes of four bits: -8 to 7, each stored with 8 added.
OFFSET_INT4 = "int4 + 8"
# What zero points come in: whole numbers of four bits, all of which it has.
ZERO_POINT_DTYPE = DTYPES["bfloat16"]
# Numbers that are multiplied at once, in 2 MiB of each worker: of FP8 each takes 1.01 ns of a core. With a
# quarter as many at once it takes 1.31, for the calls, during each of which workers wait for each other.
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Decode:
    """Codes times scales.

    Attributes:
        numbers: what a code stands for: a dtype of floating-point numbers of up to 8 bits, or `OFFSET_INT4`.
        scales: the dtypes of the scales; of several arrays all but the first have one element.
        divides: of each array, whether numbers are divided by it.
        result: dtype of the products: float32, bfloat16 or float16.
        name: of the weight, for messages.
        like: how products are rounded.
        has_zero_points: whether the last array beside the codes has zero points, of `ZERO_POINT_DTYPE`: what
            is taken from numbers before they are multiplied, one for each block of the first array.
    """

    numbers: str
    scales: tuple[DType, ...]
    divides: tuple[bool, ...]
    result: DType
    name: str
    like: Like = "float32"
    has_zero_points: bool = False

    @property
    def kind(self) -> Hashable:
        return self.numbers, self.scales, self.divides, self.result, self.like, self.has_zero_points

    def decode(
        self, codes: np.ndarray, scales: Sequence[np.ndarray], piece: DequantizedPiece, out: np.ndarray
    ) -> None:
        """As `ckpttools.array.dequantized.Decoding.decode`."""
        factors = self.factors(scales[: len(self.scales)])
        self.check(factors)
        zeros = as_float32(scales[-1].view(ZERO_POINT_DTYPE.numpy)) if self.has_zero_points else None
        self._fill(_Rows.of(codes, factors, piece, zeros), out, 0)

    def _fill(self, rows: _Rows, out: np.ndarray, before: int) -> None:
        """Writes rows; `before` is how many come before those of `out`."""
        import numpy as np

        flat = out.reshape(-1, out.shape[-1])
        if not np.may_share_memory(flat, out):
            count = flat.shape[0] // out.shape[0]
            for number, each in enumerate(out):
                self._fill(rows, each, before + number * count)
            return
        width = min(_BLOCK, flat.shape[1])
        height = max(1, _BLOCK // width)
        numbers, products = np.empty((2, height * (width + 2 * rows.packed)), np.float32)
        for top in range(0, flat.shape[0], height):
            for left in range(0, flat.shape[1], width):
                part = flat[top : top + height, left : left + width]
                self._multiply(rows.part(before + top, left, part.shape), part, numbers, products)

    def _multiply(self, part: _RowBatch, out: np.ndarray, numbers: np.ndarray, products: np.ndarray) -> None:
        """Writes a few rows through two buffers."""
        import numpy as np

        read = self._numbers(part.codes, part.packed, numbers)[:, part.first : part.first + out.shape[1]]
        product = products[: out.size].reshape(out.shape)
        with np.errstate(under="ignore", invalid="ignore"):
            if part.zeros is not None:
                read = np.subtract(read, part.zeros, out=product)
            np.multiply(read, part.factors, out=product)
            spare = numbers.view(np.uint32)[: out.size].reshape(out.shape)
            round_to(self.result, product, out, spare)

    def factors(self, scales: Sequence[np.ndarray]) -> np.ndarray:
        """What numbers are multiplied by, in float32, of carriers of scales."""
        import numpy as np

        made: np.ndarray = np.ones((), np.float32)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
            for carriers, dtype, divides in zip(scales, self.scales, self.divides, strict=True):
                scale = carriers.view(dtype.numpy).astype(np.float32)
                made = np.asarray(np.divide(made, scale) if divides else np.multiply(made, scale))
        if self.like == "maxtext":
            made = made.astype(DTYPES["bfloat16"].numpy).astype(np.float32)
        return made

    def check(self, factors: np.ndarray) -> None:
        """Refuses factors that make no finite numbers of the largest code.

        Raises:
            FormatError: there is one, or it is no number.
        """
        wrong = self.is_beyond(factors)
        if wrong.any():
            raise FormatError(
                "a quantised weight has scales of which no finite numbers can be made",
                place=self.name,
                got=", ".join(f"{value:g}" for value in factors[wrong][:3]),
                wanted=f"scales of which products are within the range of {self.result}",
                hint="get the checkpoint again: its scales are damaged",
            )

    def is_beyond(self, factors: np.ndarray) -> np.ndarray:
        """For each factor whether the largest code times it is beyond the result, or no number."""
        import numpy as np

        # Zero points are numbers of the same kind.
        most = np.abs(factors).astype(np.float64) * largest(self.numbers) * (1 + self.has_zero_points)
        beyond: np.ndarray = ~(most < self.result.beyond_range)
        return beyond

    def _numbers(self, codes: np.ndarray, packed: int, buffer: np.ndarray) -> np.ndarray:
        """What rows of codes stand for, in float32."""
        import numpy as np

        from ckpttools.array.elements import widen

        made = buffer[: codes.size * packed].reshape(codes.shape[0], -1)
        if packed == 1:
            widen(codes, DTYPES[self.numbers], made)
        else:
            pairs = codes.view(np.uint8)
            _pairs(self.numbers).take(pairs, out=made.view(np.uint64), mode="clip")
        return made


class _RowBatch(NamedTuple):
    """A few rows.

    Attributes:
        codes: theirs, with all that those at the ends hold.
        packed: numbers in a code.
        first: the first number that is wanted.
        factors: of each number; of one row or column where all have the same.
        zeros: what is taken from each before, likewise; None for nothing.
    """

    codes: np.ndarray
    packed: int
    first: int
    factors: np.ndarray
    zeros: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A piece as rows: all axes but the last count as one.

    Attributes:
        codes: of all rows.
        factors: of the blocks that the piece touches.
        piece: it.
        within: where the piece begins in the first of those blocks, and in the first code.
        zeros: of the same blocks, what is taken from numbers before; None for nothing.
    """

    codes: np.ndarray
    factors: np.ndarray
    piece: DequantizedPiece
    within: Shape
    zeros: np.ndarray | None

    @classmethod
    def of(
        cls, codes: np.ndarray, factors: np.ndarray, piece: DequantizedPiece, zeros: np.ndarray | None
    ) -> _Rows:
        block, start = piece.blocks[0], piece.region.start
        within = tuple(a % n for a, n in zip(start, block, strict=True))
        return cls(codes.reshape(-1, codes.shape[-1]), factors, piece, within, zeros)

    @property
    def packed(self) -> int:
        return self.piece.packed

    def part(self, top: int, left: int, shape: Shape) -> _RowBatch:
        """Some columns, from `left` on, of some rows, from `top` on."""
        height, width = shape
        start = self.piece.region.start[-1] % self.packed + left
        stop = ceil_div(start + width, self.packed)
        codes = self.codes[top : top + height, start // self.packed : stop]
        factors = self._factors(top, left, height, width)
        by_zeros = None if self.zeros is None else replace(self, factors=self.zeros)
        zeros = None if by_zeros is None else by_zeros._factors(top, left, height, width)
        return _RowBatch(codes, self.packed, start % self.packed, factors, zeros)

    def _factors(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        import numpy as np

        rows, length = self._of_rows(top, height), self.piece.blocks[0][-1]
        if rows.shape[1] == 1:
            return rows
        first = self.within[-1] + left
        some = rows[:, first // length : ceil_div(first + width, length)]
        return np.repeat(some, length, 1)[:, first % length : first % length + width]

    def _of_rows(self, top: int, height: int) -> np.ndarray:
        """The factors of some rows; of one where all have the same."""
        import numpy as np

        lead = self.piece.region.shape[:-1]
        long = [axis for axis, length in enumerate(lead) if length > 1]
        if len(long) < 2:
            return self._of_rows_along(long[0] if long else 0, top, height)
        factors = self.factors.reshape(-1, self.factors.shape[-1])
        index = np.unravel_index(np.arange(top, top + height), lead)
        cells = [
            (coordinate + first) // length
            for coordinate, first, length in zip(index, self.within, self.piece.blocks[0], strict=False)
        ]
        at = np.ravel_multi_index(cells, self.factors.shape[:-1])
        return factors[at[:1]] if (at == at[0]).all() else factors[at]

    def _of_rows_along(self, axis: int, top: int, height: int) -> np.ndarray:
        """The same where all rows follow each other on one axis."""
        import numpy as np

        factors = self.factors.reshape(-1, self.factors.shape[-1])
        length, start = self.piece.blocks[0][axis], self.within[axis] + top
        some = factors[start // length : ceil_div(start + height, length)]
        if len(some) == 1 or length == 1:
            return some
        return np.repeat(some, length, 0)[start % length : start % length + height]


@cache
def _values(numbers: str) -> np.ndarray:
    """What all codes of a kind stand for, in float32: 16 of four bits, 256 of others."""
    import numpy as np

    from ckpttools.array.elements import table

    if numbers == OFFSET_INT4:
        return np.arange(-8, 8, dtype=np.float32)
    dtype = DTYPES[numbers]
    return table(dtype)[: 1 << dtype.bits]


@cache
def _pairs(numbers: str) -> np.ndarray:
    """For each byte both numbers that it holds, the lower four bits first, as one element of 64 bits."""
    import numpy as np

    values = _values(numbers)
    bytes_ = np.arange(256)
    both = np.stack([values[bytes_ & 15], values[bytes_ >> 4]], axis=1)
    return np.ascontiguousarray(both).view(np.uint64)[:, 0]


@cache
def largest(numbers: str) -> float:
    """The largest magnitude that a code stands for."""
    import numpy as np

    values = np.abs(_values(numbers))
    return float(values[np.isfinite(values)].max())
