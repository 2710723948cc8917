"""Decode quantized values: values times scales in float32, rounded once."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttools.array.dequantized import Dequantized, DequantizedPiece
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, swap_last_axes
from ckpttools.array.read_blocks import page
from ckpttools.array.relayout import reshape_array
from ckpttools.array.rounding import round_to
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import DamagedScalesError
from ckpttools.core.region import Shape, ceil_div
from ckpttools.quantized.config import DEFAULT_DTYPE, RESULTS, Like
from ckpttools.quantized.schemes.base import Weight

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

REFETCH_HINT = "get the checkpoint again: its scales are damaged"

# 4-bit integers from -8 to 7, each stored with 8 added.
OFFSET_INT4 = "int4 + 8"
# The dtype of zero points, which represents all 4-bit integers.
ZERO_POINT_DTYPE = DTYPES["bfloat16"]
# Number of values that are multiplied at a time, in 2 MiB per worker. An FP8 number takes 1.01 ns on one
# core. With a quarter of this size, it takes 1.31 ns, because workers wait for each other in more calls.
_BLOCK = 1 << 18
# Maximum number of rows in a batch: if rows are short, their scale indices take more memory than the rows.
_MAX_ROWS = 1 << 13
# Bytes allocated per row in that case, as 64-bit integers: locations on up to six axes, and of scales.
_LOCATIONS = 24
# Size of the lookup tables of quantized values, in bytes.
_TABLES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Decode:
    """Decodes quantized values with their scales.

    Attributes:
        numbers: The meaning of quantized values: a floating-point dtype of up to 8 bits, or `OFFSET_INT4`.
        scales: The dtypes of the scales; all arrays but the first have one element.
        divides: Whether numbers are divided by the scales, for each array of scales.
        result: Dtype of the products: float32, bfloat16 or float16.
        name: Name of the scales, for messages.
        like: How products are rounded.
        has_zero_points: Whether the last additional array has zero points of `ZERO_POINT_DTYPE`, one per
            block of the first array, which are subtracted before multiplying.
        location: Location of the checkpoint, for messages.
    """

    numbers: str
    scales: tuple[DType, ...]
    divides: tuple[bool, ...]
    result: DType
    name: str
    like: Like = "float32"
    has_zero_points: bool = False
    # Excluded from the repr, because values do not depend on the location.
    location: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        """Return the name of the scales, with their checkpoint if known."""
        return f"{self.location}: {self.name}" if self.location else self.name

    @property
    def kind(self) -> Hashable:
        return self.numbers, self.scales, self.divides, self.result, self.like, self.has_zero_points

    def working_bytes(self, size: int, packed: int, scales: int) -> int:
        """Return the working memory; see `ckpttools.array.dequantized.Decoding.working_bytes`."""
        block_size, rows = min(size, _BLOCK), min(size, _MAX_ROWS)
        factors = (1 + self.has_zero_points) * page(4 * scales)
        buffers = 2 * page(4 * (block_size + 2 * packed * rows))
        # Allocated memory: scales rounded as in MaxText; factors and zero points of all numbers, repeated
        # over rows and columns; and 8 bytes for the table index of each quantized value.
        rounded = 8 * scales if self.like == "maxtext" else 0
        permanent, temporary = 4 * block_size * self.has_zero_points, 4 * block_size + 16 * rows
        spread = permanent + temporary + max(2 * block_size, 8 * rows * _LOCATIONS)
        looked_up = (
            permanent + temporary + 8 * (block_size if packed == 1 else block_size // 2 + packed * rows)
        )
        return factors + buffers + max(rounded, spread, looked_up) + _TABLES

    def decode(
        self,
        codes: np.ndarray,
        scales: Sequence[np.ndarray],
        piece: DequantizedPiece,
        out: np.ndarray,
        scratch: Scratch,
    ) -> None:
        """Decode a piece; see `ckpttools.array.dequantized.Decoding.decode`."""
        import numpy as np

        from ckpttools.array.elements import widen

        with ExitStack() as taken:

            def buffer(*shape: int) -> np.ndarray:
                return taken.enter_context(scratch.take(shape, np.dtype(np.float32)))

            factors = self.factors(scales[: len(self.scales)], buffer(*scales[0].shape))
            self.check(factors)
            zeros = None
            if self.has_zero_points:
                zeros = buffer(*scales[-1].shape)
                widen(scales[-1], ZERO_POINT_DTYPE, zeros)
            size = min(_BLOCK, out.size) + 2 * piece.packed * min(_MAX_ROWS, out.size)
            self._fill(_Rows.of(codes, factors, piece, zeros), out, 0, (buffer(size), buffer(size)))

    def _fill(
        self, rows: _Rows, out: np.ndarray, before: int, buffers: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Write rows using two buffers; `before` is the number of rows before those of `out`."""
        import numpy as np

        flat = out.reshape(-1, out.shape[-1])
        if not np.may_share_memory(flat, out):
            count = flat.shape[0] // out.shape[0]
            for number, item in enumerate(out):
                self._fill(rows, item, before + number * count, buffers)
            return
        width = min(_BLOCK, flat.shape[1])
        height = min(max(1, _BLOCK // width), _MAX_ROWS)
        for top in range(0, flat.shape[0], height):
            for left in range(0, flat.shape[1], width):
                part = flat[top : top + height, left : left + width]
                self._multiply(rows.part(before + top, left, part.shape), part, *buffers)

    def _multiply(self, part: _RowBatch, out: np.ndarray, numbers: np.ndarray, products: np.ndarray) -> None:
        """Write a few rows using two buffers."""
        import numpy as np

        read = self._decode_values(part.codes, part.packed, numbers)[
            :, part.first : part.first + out.shape[1]
        ]
        product = products[: out.size].reshape(out.shape)
        with np.errstate(under="ignore", invalid="ignore"):
            if part.zeros is not None:
                read = np.subtract(read, part.zeros, out=product)
            np.multiply(read, part.factors, out=product)
            spare = numbers.view(np.uint32)[: out.size].reshape(out.shape)
            round_to(self.result, product, out, spare)

    def factors(self, scales: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Compute the float32 factors of numbers from the carriers of scales.

        Args:
            scales: The scales of each array.
            out: Destination in the shape of the first array; None allocates one.
        """
        import numpy as np

        from ckpttools.array.elements import widen

        result = np.empty(scales[0].shape, np.float32) if out is None else out
        with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
            widen(scales[0], self.scales[0], result)
            if self.divides[0]:
                result[np.isinf(result)] = np.nan
                np.divide(np.float32(1), result, out=result)
            for one, dtype, divides in zip(scales[1:], self.scales[1:], self.divides[1:], strict=True):
                scale = one.view(dtype.numpy).astype(np.float32)
                if divides:
                    # An infinite divisor is damaged, because quotients would be zero.
                    scale[np.isinf(scale)] = np.nan
                (np.divide if divides else np.multiply)(result, scale, out=result)
        if self.like == "maxtext":
            result[...] = result.astype(DTYPES["bfloat16"].numpy)
        return result

    def check(self, factors: np.ndarray) -> None:
        """Refuse factors for which the largest quantized value does not give a finite number.

        Raises:
            DamagedScalesError: A factor is too large or NaN.
        """
        out_of_range = self.out_of_range_factors(factors)
        if out_of_range.size:
            from ckpttools.quantized.scale_checks import list_all_damaged

            error = DamagedScalesError(
                "a quantized weight has scales that give values that are not finite",
                location=self.where,
                got=", ".join(f"{value:g}" for value in out_of_range[:3]),
                expected=f"scales whose products are in the range of {self.result}",
                hint=REFETCH_HINT,
            )
            error.list_all = list_all_damaged
            raise error

    def out_of_range_factors(self, factors: np.ndarray) -> np.ndarray:
        """Return the factors for which the largest value exceeds the result dtype, and NaN factors."""
        import numpy as np

        # A single factor for all numbers may be 0-dimensional.
        factors = factors.reshape(-1)
        least, limit = float(factors.min(initial=0)), float(factors.max(initial=0))
        if self._is_within(max(limit, -least)):
            return factors[:0]
        # The caller reports signaling NaNs.
        with np.errstate(invalid="ignore"):
            out_of_range: np.ndarray = factors[~self._is_within(np.abs(factors).astype(np.float64))]
        return out_of_range

    def _is_within(self, factor: Any) -> Any:
        """Return whether the largest value times each factor is in the range of the result dtype."""
        # Zero points have the same range as the numbers.
        return factor * largest(self.numbers) * (1 + self.has_zero_points) < self.result.beyond_range

    def _decode_values(self, codes: np.ndarray, packed: int, buffer: np.ndarray) -> np.ndarray:
        """Return the float32 numbers of rows of quantized values."""
        import numpy as np

        from ckpttools.array.elements import widen

        result = buffer[: codes.size * packed].reshape(codes.shape[0], -1)
        if packed == 1:
            widen(codes, DTYPES[self.numbers], result)
        else:
            pairs = codes.view(np.uint8)
            _pairs(self.numbers).take(pairs, out=result.view(np.uint64), mode="clip")
        return result


class _RowBatch(NamedTuple):
    """A batch of rows.

    Attributes:
        codes: The quantized values, including complete values at both ends.
        packed: Numbers per quantized value.
        first: Index of the first expected number.
        factors: The factor of each number, or of one row or column if all are equal.
        zeros: Zero points in the same form; None if there are none.
    """

    codes: np.ndarray
    packed: int
    first: int
    factors: np.ndarray
    zeros: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A region viewed as rows: all axes except the last are flattened.

    Attributes:
        codes: The quantized values of all rows.
        factors: The factors of blocks that overlap the region.
        piece: The elements to read.
        within: Start of the region in the first of those blocks, and in the first quantized value.
        zeros: The zero points of the same blocks; None if there are none.
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
        """Return some columns, starting at `left`, of some rows, starting at `top`."""
        height, width = shape
        start = self.piece.region.start[-1] % self.packed + left
        stop = ceil_div(start + width, self.packed)
        codes = self.codes[top : top + height, start // self.packed : stop]
        factors = self._factors(top, left, height, width)
        by_zeros = None if self.zeros is None else replace(self, factors=self.zeros)
        zeros = None if by_zeros is None else by_zeros._factors(top, left, height, width)
        return _RowBatch(codes, self.packed, start % self.packed, factors, zeros)

    def _factors(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        rows, length = self._row_factors(top, height), self.piece.blocks[0][-1]
        return rows if rows.shape[1] == 1 else _repeat_factors(rows, length, self.within[-1] + left, width, 1)

    def _row_factors(self, top: int, height: int) -> np.ndarray:
        """Return the factors of some rows, or of one row if all rows are equal."""
        import numpy as np

        lead = self.piece.region.shape[:-1]
        long = [axis for axis, length in enumerate(lead) if length > 1]
        if len(long) < 2:
            return self._row_factors_along(long[0] if long else 0, top, height)
        factors = self.factors.reshape(-1, self.factors.shape[-1])
        index = np.unravel_index(np.arange(top, top + height), lead)
        cells = [
            (coordinate + first) // length
            for coordinate, first, length in zip(index, self.within, self.piece.blocks[0], strict=False)
        ]
        at = np.ravel_multi_index(cells, self.factors.shape[:-1])
        return factors[at[:1]] if (at == at[0]).all() else factors[at]

    def _row_factors_along(self, axis: int, top: int, height: int) -> np.ndarray:
        """Return the factors of some rows that are consecutive on one axis."""
        factors = self.factors.reshape(-1, self.factors.shape[-1])
        length, start = self.piece.blocks[0][axis], self.within[axis] + top
        part = factors[start // length : ceil_div(start + height, length)]
        return part if len(part) == 1 else _repeat_factors(factors, length, start, height, 0)


def _repeat_factors(factors: np.ndarray, length: int, start: int, count: int, axis: int) -> np.ndarray:
    """Repeat the factors along an axis, each for `length` numbers, the first from position `start`."""
    import numpy as np

    first, stop = start // length, ceil_div(start + count, length)
    part = factors[first:stop] if axis == 0 else factors[:, first:stop]
    if length == 1:
        return part
    before, after = start - first * length, stop * length - start - count
    if not (before or after):
        return np.repeat(part, length, axis)
    times = np.full(stop - first, length)
    times[0] -= before
    times[-1] -= after
    return np.repeat(part, times, axis)


@cache
def _values(numbers: str) -> np.ndarray:
    """Return the float32 values of all codes of a kind: 16 values for four bits, 256 otherwise."""
    import numpy as np

    from ckpttools.array.elements import table

    if numbers == OFFSET_INT4:
        return np.arange(-8, 8, dtype=np.float32)
    dtype = DTYPES[numbers]
    return table(dtype)[: 1 << dtype.bits]


@cache
def _pairs(numbers: str) -> np.ndarray:
    """Return both numbers of each byte, the lower four bits first, as one 64-bit element."""
    import numpy as np

    values = _values(numbers)
    bytes_ = np.arange(256)
    both = np.stack([values[bytes_ & 15], values[bytes_ >> 4]], axis=1)
    return np.ascontiguousarray(both).view(np.uint64)[:, 0]


@cache
def largest(numbers: str) -> float:
    """Return the largest magnitude that a code represents."""
    import numpy as np

    values = np.abs(_values(numbers))
    return float(values[np.isfinite(values)].max())


def array_of(
    weight: Weight,
    arrays: Mapping[str, LazyArray],
    dtype: DType = DEFAULT_DTYPE,
    like: Like = "float32",
    location: str = "",
) -> LazyArray:
    """Return the dequantized array of a weight.

    Args:
        weight: A quantized weight.
        arrays: Arrays by name, including at least the weight's stored arrays.
        dtype: Dtype of the result: float32, bfloat16 or float16.
        like: How products are rounded.
        location: Location of the checkpoint, for messages.
    """
    shifts = [] if weight.zero_points is None else [_zero_points(weight, arrays[weight.zero_points])]
    result = Dequantized(
        weight.shape,
        dtype,
        reshape_array(arrays[weight.codes], weight.layout),
        (*(reshape_array(arrays[scale.name], scale.shape) for scale in weight.scales), *shifts),
        (*(scale.block for scale in weight.scales), *(weight.scales[0].block for _ in shifts)),
        weight.packed,
        replace(decode_of(weight, dtype, like), location=location),
    )
    return swap_last_axes(result) if weight.is_swapped else result


def unscaled_array(weight: Weight, arrays: Mapping[str, LazyArray]) -> LazyArray:
    """Return the unscaled values of a weight, in the order of its codes; arguments as for `array_of`."""
    float32, scale = DTYPES["float32"], weight.scales[0]
    ones = Constant(scale.shape, float32, array("f", [1.0]).tobytes())
    names = filter(None, (weight.codes, weight.zero_points))
    rescaled = replace(weight, scales=(replace(scale, dtype=float32, divides=False),), is_swapped=False)
    return array_of(rescaled, {scale.name: ones, **{name: arrays[name] for name in names}}, float32)


def _zero_points(weight: Weight, words: LazyArray) -> LazyArray:
    """Return one zero point per scale from words that hold eight column neighbors.

    The words are read by columns as int4 with the scale 1.
    """
    float32, (rows, groups) = DTYPES["float32"], weight.scales[0].shape
    one, swapped_shape = Constant((1, 1), float32, array("f", [1.0]).tobytes()), (groups, rows)
    decode = Decode(weight.numbers, (float32,), (False,), ZERO_POINT_DTYPE, weight.scale_names)
    packed = Dequantized(
        swapped_shape,
        ZERO_POINT_DTYPE,
        swap_last_axes(words),
        (one,),
        (swapped_shape,),
        weight.packed,
        decode,
    )
    return swap_last_axes(packed)


def decode_of(weight: Weight, dtype: DType | None = None, like: Like = "float32") -> Decode:
    """Return the decoder of a weight; arguments as for `array_of`."""
    dtypes = tuple(scale.dtype for scale in weight.scales)
    divides = tuple(scale.divides for scale in weight.scales)
    has_zero_points = weight.zero_points is not None
    return Decode(
        weight.numbers, dtypes, divides, result_of(dtype), weight.scale_names, like, has_zero_points
    )


def result_of(dtype: DType | None) -> DType:
    """Return the dtype of products that converts to the expected dtype without loss."""
    if dtype is None:
        return DEFAULT_DTYPE
    return dtype if dtype.name in RESULTS else DTYPES["float32"]
