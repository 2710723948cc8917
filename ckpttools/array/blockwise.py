"""Quantization on the fly: the codes of an array's elements, and the scales of its blocks.

Codes and scales are computed from complete blocks of the same elements, so the bits of a region do not depend
on how an array is split. Blocks are on the last two axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING, Protocol

from ckpttools.array import read_blocks
from ckpttools.array.lazy import LARGEST, Derived, LazyArray, ReadCost
from ckpttools.array.read_blocks import subview
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, ShapeError
from ckpttools.core.message_terms import action, option
from ckpttools.core.region import Region, Shape, ceil_div

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


class NonFiniteError(Exception):
    """Raised when no scale can encode a block because it has NaN or infinity."""


class BlockEncoder(Protocol):
    """Encodes blocks of elements as codes with one scale per block. Its `repr` identifies it completely."""

    @property
    def block(self) -> tuple[int, int]:
        """Return the shape of a block on the last two axes."""

    @property
    def packed(self) -> int:
        """Return the number of elements per code, along the last axis; a code never spans two blocks."""

    @property
    def code(self) -> DType:
        """Return the dtype of the codes."""

    @property
    def scale(self) -> DType:
        """Return the dtype of the scales."""

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Compute the scale of each block, as carriers of `scale`.

        Args:
            values: Floating-point elements (rows, columns); the first row and column are at the edge of a
                block.

        Raises:
            NonFiniteError: The values contain NaN or infinity.
        """

    def codes(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Encode elements as carriers of `code`, (rows, columns / packed); arguments as for `scales`."""

    def decoded(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Decode codes to float32: the inverse of `codes`, except for rounding."""

    def lost(self, values: np.ndarray, decoded: np.ndarray) -> Mapping[str, float]:
        """Return sums of quantization errors that can be added up as in `ckpttools.array.scratch`."""


@dataclass(frozen=True, eq=False, repr=False)
class _Blockwise(Derived):
    """A node computed from complete blocks of another array.

    Attributes:
        encoder: Encodes the blocks.
        name: Name of the other array, for messages.
    """

    encoder: BlockEncoder
    name: str = ""

    @abstractmethod
    def _source_blocks(self, region: Region) -> Region:
        """Return the complete blocks of the other array that a region needs."""

    @abstractmethod
    def _encode(
        self, part: Region, values: np.ndarray, region: Region, out: np.ndarray, scratch: Scratch
    ) -> None:
        """Encode some complete blocks into `out`.

        Args:
            part: The blocks' region in the other array; it has length one on all axes but the last two.
            values: The elements of that region (rows, columns).
            region, out: The region to read and its destination, as for `read_into`.
            scratch: Receives the counts of quantization errors.
        """

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        dtype = self.source.dtype
        for part in self._parts(self._source_blocks(region)):
            with scratch.take(part.shape, dtype.carrier) as buffer:
                self.source.read_into(part, buffer, scratch)
                values = buffer.view(dtype.numpy).reshape(part.shape[-2:])
                try:
                    self._encode(part, values, region, out, scratch)
                except NonFiniteError as error:
                    leave = option("exclude", "PATTERN")
                    raise FormatError(
                        "an array with NaN or infinity cannot be quantized",
                        location=self.name or None,
                        got=f"in [{part}]",
                        expected="finite numbers",
                        hint=f"{action('stats')} counts them; {leave} leaves this array as it is",
                    ) from error

    def _parts(self, needed: Region) -> Iterator[Region]:
        """Yield the needed blocks in pieces of read-block size, as wide as possible for long reads."""
        if not needed.size:
            return
        rows, columns = _part_shape(self.source, self.encoder.block)
        last = needed.rank - 1
        for one in needed.each(last - 1):
            for strip in one.pieces(last - 1, rows):
                yield from strip.pieces(last, columns)

    @property
    def is_computed(self) -> bool:
        return True

    @property
    def scratch_bytes(self) -> int:
        rows, columns = _part_shape(self.source, self.encoder.block)
        return read_blocks.page(rows * columns * self.source.dtype.itemsize) + self.source.scratch_bytes

    def read_cost(self, region: Region) -> ReadCost:
        needed = self._source_blocks(region)
        return self.source.read_cost(needed) if needed.size else ReadCost()

    def first_byte(self, region: Region) -> tuple[str, int]:
        return self.source.first_byte(self._source_blocks(region))

    @property
    def read_kind(self) -> Hashable:
        return (type(self).__name__, repr(self.encoder), self.source.read_kind)


@dataclass(frozen=True, eq=False, repr=False)
class BlockScales(_Blockwise):
    """The scales of another array's blocks, one per block on the last two axes."""

    def _source_blocks(self, region: Region) -> Region:
        return _to_element_region(region, self.encoder.block, self.source.shape)

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits * min(prod(self.encoder.block), max(1, self.source.size))

    def _encode(
        self, part: Region, values: np.ndarray, region: Region, out: np.ndarray, scratch: Scratch
    ) -> None:
        result = _to_block_region(part, self.encoder.block)
        target = subview(out, result.relative_to(region))
        target[...] = self.encoder.scales(values).reshape(target.shape)


@dataclass(frozen=True, eq=False, repr=False)
class BlockCodes(_Blockwise):
    """The codes of another array's elements. The encoder counts quantization errors."""

    def _source_blocks(self, region: Region) -> Region:
        return _to_element_region(
            _to_block_region(self._elements(region), self.encoder.block),
            self.encoder.block,
            self.source.shape,
        )

    def _elements(self, region: Region) -> Region:
        """Return the region of the elements that a region of codes encodes."""
        last, packed = region.rank - 1, self.encoder.packed
        return region.replaced(last, region.start[last] * packed, region.stop[last] * packed)

    @property
    def stored_bits(self) -> int:
        return self.source.stored_bits * self.encoder.packed

    def _encode(
        self, part: Region, values: np.ndarray, region: Region, out: np.ndarray, scratch: Scratch
    ) -> None:
        expected = part.intersect(self._elements(region))
        if expected is None:
            return
        scales = self.encoder.scales(values)
        codes = self.encoder.codes(values, scales)
        rows, columns = (slice(a, b) for a, b in _last_two(expected.relative_to(part)))
        packed = slice(columns.start // self.encoder.packed, columns.stop // self.encoder.packed)
        last = expected.rank - 1
        location = expected.replaced(
            last, expected.start[last] // self.encoder.packed, expected.stop[last] // self.encoder.packed
        )
        target = subview(out, location.relative_to(region))
        target[...] = codes[rows, packed].reshape(target.shape)
        decoded = self.encoder.decoded(codes, scales)
        scratch.tally(self.encoder.lost(values[rows, columns], decoded[rows, columns]))


def block_codes(source: LazyArray, encoder: BlockEncoder, name: str = "") -> tuple[BlockCodes, BlockScales]:
    """Quantize an array to codes and the scales of its blocks.

    Args:
        source: Floating-point numbers with at least two axes.
        encoder: Encodes the blocks.
        name: Name of the array, for messages.

    Raises:
        ShapeError: The array has fewer than two axes, or the last axis does not fill complete codes.
    """
    if not source.dtype.is_float or source.ndim < 2 or source.shape[-1] % encoder.packed:
        raise ShapeError(
            "this array cannot be quantized in blocks",
            location=name or None,
            got=f"{source.dtype}{list(source.shape)}",
            expected=f"floating-point numbers of at least two axes, the last a multiple of {encoder.packed}",
        )
    *outer, rows, columns = source.shape
    high, wide = encoder.block
    coded = (*outer, rows, columns // encoder.packed)
    grid = (*outer, ceil_div(rows, high), ceil_div(columns, wide))
    return (
        BlockCodes(coded, encoder.code, source, encoder, name),
        BlockScales(grid, encoder.scale, source, encoder, name),
    )


def _part_shape(source: LazyArray, block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of rows and columns to read at a time: one row of blocks, as wide as a read block."""
    rows, columns = (max(1, length) for length in source.shape[-2:])
    limit = read_blocks.elements(source.dtype.itemsize)
    high = min(block[0], rows)
    wide = max(1, limit // high // block[1]) * block[1]
    if block[0] == 1:
        high = max(1, limit // min(wide, columns))
    return min(high, rows), min(wide, columns)


def _last_two(region: Region) -> tuple[tuple[int, int], tuple[int, int]]:
    first, second = zip(region.start[-2:], region.stop[-2:], strict=True)
    return first, second


def _to_block_region(region: Region, block: tuple[int, int]) -> Region:
    """Return the region of the blocks that overlap a region of elements."""
    for axis, size in zip((region.rank - 2, region.rank - 1), block, strict=True):
        region = region.replaced(axis, region.start[axis] // size, ceil_div(region.stop[axis], size))
    return region


def _to_element_region(region: Region, block: tuple[int, int], shape: Shape) -> Region:
    """Return the region of the elements in a region of blocks."""
    for axis, size in zip((region.rank - 2, region.rank - 1), block, strict=True):
        stop = min(region.stop[axis] * size, shape[axis])
        region = region.replaced(axis, region.start[axis] * size, stop)
    return region


# Keys of the quantization error counts: the maximum and the sums of squares, which parts add up in any order.
_MAX, _ELEMENTS = f"{LARGEST}quantization_error", "quantized_elements"
_SQUARES, _OWN = "quantization_error_squares", "quantized_squares"


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """The deviation of a quantized array from its original values.

    Attributes:
        elements: Number of elements.
        largest: The largest absolute error.
        rms: Root mean square of the errors.
        rms_of_values: Root mean square of the values.
        relative: `rms` divided by `rms_of_values`; 0 if all values are zero.
    """

    elements: int
    largest: float
    rms: float
    rms_of_values: float
    relative: float


def error_sums(values: np.ndarray, decoded: np.ndarray) -> dict[str, float]:
    """Return a part's contribution to the error tally of its array.

    Args:
        values: The original values, of any floating-point dtype.
        decoded: The decoded values, float32 of the same shape.
    """
    import numpy as np

    wide = np.float64 if values.dtype.itemsize == 8 else np.float32
    exact = values.astype(wide, copy=False)
    errors = np.subtract(exact, decoded, dtype=wide)
    largest = float(max(errors.max(initial=0), -errors.min(initial=0)))
    return {
        _MAX: largest,
        _ELEMENTS: values.size,
        _SQUARES: _squares(errors),
        _OWN: _squares(exact),
    }


def _squares(values: np.ndarray) -> float:
    import numpy as np

    flat = values.reshape(-1)
    largest = float(np.abs(flat).max(initial=0))
    if 0 < largest < 1e-15 or largest > 1e15:
        flat = flat.astype(np.float64)
    return float(np.dot(flat, flat))


def quantization_errors(counts: Mapping[str, Mapping[str, float]]) -> dict[str, QuantizationError]:
    """Return the quantization error of each array in the tallies, the largest first."""
    result = {
        name: _error(int(tally[_ELEMENTS]), tally[_MAX], tally[_SQUARES], tally[_OWN])
        for name, tally in counts.items()
        if _ELEMENTS in tally
    }
    return dict(sorted(result.items(), key=lambda item: (-item[1].relative, item[0])))


def total_error(errors: Mapping[str, QuantizationError]) -> QuantizationError:
    """Return the combined error of several arrays."""
    result = errors.values()
    return _error(
        sum(item.elements for item in result),
        max((item.largest for item in result), default=0.0),
        sum(item.rms**2 * item.elements for item in result),
        sum(item.rms_of_values**2 * item.elements for item in result),
    )


def drop_error_counts(counts: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, int]]:
    """Remove the error counts from the tallies of arrays."""
    own = {_MAX, _ELEMENTS, _SQUARES, _OWN}
    left = {
        name: {kind: int(n) for kind, n in tally.items() if kind not in own} for name, tally in counts.items()
    }
    return {name: tally for name, tally in left.items() if tally}


def _error(elements: int, largest: float, squares: float, own: float) -> QuantizationError:
    """Compute an error from the sums of squared deviations and squared values."""
    rms, rms_of_values = (sqrt(item / elements) if elements else 0.0 for item in (squares, own))
    return QuantizationError(
        elements, largest, rms, rms_of_values, rms / rms_of_values if rms_of_values else 0.0
    )
