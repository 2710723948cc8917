"""Arrays of the left side that only multiply others: the right side has their products."""

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

# Elements of one block: what they are widened to stays in a core's L2 cache.
_BLOCK = 1 << 16
# What widening, multiplying and rounding one of its elements take: at most 32.5 bytes of bfloat16.
_BYTES = 36


@dataclass(frozen=True, slots=True)
class Factor(Fill):
    """The row's right array is in no file: it is full of 1, and where it was trained, it is in a product.

    The product is the right array whose name is this one's without its last word, `fn` of `fn.norm`. The left
    arrays that it is made of have all axes of the factor.
    """

    number: float = 1

    def bound(self, sizes: Mapping[str, int]) -> Multiplied:
        return Multiplied(self.number)


@dataclass(frozen=True, slots=True)
class Multiplied(BoundFill):
    """Elements as they are; on the way back each is a factor of others."""

    def inverse(self) -> Multiplied:
        return self

    def exactness(self, dtype: DType) -> Exactness:
        declared = "where it was trained, multiplied into the array behind it on the way back"
        return Exactness(True, f"full of {self.number:g}; {declared}")


def multiply_factors(key: str) -> str:
    """The right key of the array that a factor of this key is multiplied into."""
    return key.rpartition(".")[0]


def multiply_array(
    side: Side,
    factor: Side,
    arrays: Mapping[str, LazyArray],
    by: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, LazyArray]:
    """Arrays of a side, each times the factor of its place.

    Args:
        side: of the arrays; `factor`: of the factors, with none but axes that the side has, in its order.
        arrays, by: those of both sides, by their keys.
        sizes: length of every axis.

    Raises:
        MappingError: the factor has an axis that the arrays have not.
    """
    if not (set(factor.groups) <= set(side.groups) and set(factor.key.axes) <= set(side.key.axes)):
        raise MappingError(
            "a factor has axes that what it is multiplied into has not",
            location=str(factor.key),
            got=str(factor),
            expected=f"axes of {side}",
        )
    built: dict[str, LazyArray] = {}
    for index in side.indices(sizes):
        key = side.key.format(index, sizes)
        lengths = [
            n if group in factor.groups else 1
            for group, n in zip(side.groups, arrays[key].shape, strict=True)
        ]
        built[key] = times(arrays[key], reshape_array(by[factor.key.format(index, sizes)], tuple(lengths)))
    return built


def times(array: LazyArray, factor: LazyArray) -> Dequantized:
    """Every element times that of a factor of the same rank, which may have a length of 1 on some axes."""
    cells = [n if length == 1 else 1 for length, n in zip(factor.shape, array.shape, strict=True)]
    return Dequantized(
        array.shape, array.dtype, array, (factor,), (tuple(cells),), 1, Times(array.dtype, factor.dtype)
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Products in float32, in float64 where the array is that, rounded once to the array's dtype."""

    dtype: DType
    factor: DType

    @property
    def kind(self) -> Hashable:
        return self

    def working_bytes(self, size: int, packed: int, scales: int) -> int:
        """As `ckpttools.array.dequantized.Decoding.working_bytes`: nothing of the scratch."""
        return _BYTES * min(size, _BLOCK)

    def decode(
        self,
        codes: np.ndarray,
        scales: Sequence[np.ndarray],
        piece: DequantizedPiece,
        out: np.ndarray,
        scratch: Scratch,
    ) -> None:
        """As `ckpttools.array.dequantized.Decoding.decode`."""
        import numpy as np

        wide = np.float64 if self.dtype.bits > 32 else np.float32
        numbers = codes.view(self.dtype.numpy)
        factors = np.broadcast_to(scales[0].view(self.factor.numpy), codes.shape)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for part in split_evenly(Region.whole(codes.shape), _BLOCK):
                products = numbers[part.slices].astype(wide) * factors[part.slices].astype(wide)
                out[part.slices] = round_constant(products, self.dtype).view(self.dtype.carrier)
