"""Factors: left arrays that only multiply others, so that the right side stores the products."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttools.array.dequantized import Dequantized, DequantizedPiece
from ckpttools.array.lazy import LazyArray
from ckpttools.array.relayout import reshape_array
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import MappingError
from ckpttools.core.region import Region, split_evenly
from ckpttools.mapping.axes import Side
from ckpttools.mapping.values import BoundFill, Exactness, Fill, round_constant

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Number of elements in a block, chosen so that the widened block fits in a core's L2 cache.
_BLOCK = 1 << 16
# Bytes per element for widening, multiplying and rounding: at most 32.5 for bfloat16.
_BYTES = 36


@dataclass(frozen=True, slots=True)
class Factor(Fill):
    """A right array that no file contains: it is filled with 1, and trained values become part of a product.

    The product is the right array whose name is that of the factor without its last word: `fn` for `fn.norm`.
    The left arrays of the product have all axes of the factor.
    """

    number: float = 1

    def bound(self, sizes: Mapping[str, int]) -> Multiplied:
        return Multiplied(self.number)


@dataclass(frozen=True, slots=True)
class Multiplied(BoundFill):
    """Unchanged elements that are factors of other arrays in the reverse conversion."""

    def inverse(self) -> Multiplied:
        return self

    def exactness(self, dtype: DType) -> Exactness:
        effect = "if trained, multiplied into the next array in the reverse conversion"
        return Exactness(True, f"filled with {self.number:g}; {effect}")


def multiply_factors(key: str) -> str:
    """Return the right key of the array that a factor is multiplied into."""
    return key.rpartition(".")[0]


def multiply_array(
    side: Side,
    factor: Side,
    arrays: Mapping[str, LazyArray],
    by: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, LazyArray]:
    """Multiply each array of a side by the factor at its location.

    Args:
        side: The side of the arrays.
        factor: The side of the factors, whose axes are a subset of the arrays' axes in the same order.
        arrays, by: Arrays of both sides, by key.
        sizes: The length of every axis.

    Raises:
        MappingError: The factor has an axis that the arrays do not have.
    """
    if not (set(factor.groups) <= set(side.groups) and set(factor.key.axes) <= set(side.key.axes)):
        raise MappingError(
            "a factor has axes that the multiplied array does not have",
            location=str(factor.key),
            got=str(factor),
            expected=f"axes of {side}",
        )
    products: dict[str, LazyArray] = {}
    for index in side.indices(sizes):
        key = side.key.format(index, sizes)
        lengths = [
            n if group in factor.groups else 1
            for group, n in zip(side.groups, arrays[key].shape, strict=True)
        ]
        products[key] = times(arrays[key], reshape_array(by[factor.key.format(index, sizes)], tuple(lengths)))
    return products


def times(array: LazyArray, factor: LazyArray) -> Dequantized:
    """Multiply an array by a factor of the same rank, whose axes may have length 1."""
    cells = [n if length == 1 else 1 for length, n in zip(factor.shape, array.shape, strict=True)]
    return Dequantized(
        array.shape, array.dtype, array, (factor,), (tuple(cells),), 1, Times(array.dtype, factor.dtype)
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Computes products in float32, or in float64 for float64 arrays, rounded once to the array's dtype."""

    dtype: DType
    factor: DType

    @property
    def kind(self) -> Hashable:
        return self

    def working_bytes(self, size: int, packed: int, scales: int) -> int:
        """Return 0; see `ckpttools.array.dequantized.Decoding.working_bytes`."""
        return _BYTES * min(size, _BLOCK)

    def decode(
        self,
        codes: np.ndarray,
        scales: Sequence[np.ndarray],
        piece: DequantizedPiece,
        out: np.ndarray,
        scratch: Scratch,
    ) -> None:
        """Multiply values by factors; see `ckpttools.array.dequantized.Decoding.decode`."""
        import numpy as np

        wide = np.float64 if self.dtype.bits > 32 else np.float32
        numbers = codes.view(self.dtype.numpy)
        factors = np.broadcast_to(scales[0].view(self.factor.numpy), codes.shape)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for part in split_evenly(Region.whole(codes.shape), _BLOCK):
                products = numbers[part.slices].astype(wide) * factors[part.slices].astype(wide)
                out[part.slices] = round_constant(products, self.dtype).view(self.dtype.carrier)
