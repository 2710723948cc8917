"""Arrays of the left side that are full of one number, and that the right side has none of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Shape
from ckpttools.mapping.values import Exactness

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Fill:
    """The row's right array is in no file: it is float32, and every element is `number`."""

    number: float

    def array(self, shape: Shape) -> LazyArray:
        """The right array."""
        import numpy as np

        return Constant(shape, DTYPES["float32"], np.array(self.number, "<f4").tobytes())

    def bound(self, sizes: Mapping[str, int]) -> Filled:
        return Filled(self.number)


@dataclass(frozen=True, slots=True)
class Filled:
    """Elements as they are, all of them `number`."""

    number: float

    def result(self, dtype: DType) -> DType:
        return dtype

    def inverse(self) -> Filled:
        return self

    def widened(self) -> Filled:
        return self

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        target[...] = source

    def exactness(self, dtype: DType) -> Exactness:
        return Exactness(True, f"full of {self.number:g}: Hugging Face's model has no such array")
