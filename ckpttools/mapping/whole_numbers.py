"""Whole numbers, such as numbers of experts, that the two sides of a row store in different dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import MappingError
from ckpttools.mapping.values import Exactness, blockwise

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers of the dtype `left` on the left and of `right` on the right."""

    left: str
    right: str

    def bound(self, sizes: Mapping[str, int]) -> Recoded:
        return Recoded(self.left, self.right)


@dataclass(frozen=True, slots=True)
class Recoded:
    """The same whole number in the dtype `to`; numbers that it does not have are refused.

    What comes as floating-point numbers is taken, too, as MaxText trains with its tables in float32; but not
    numbers so large that a neighbour may have been rounded to them, from 256 on in bfloat16.

    Attributes:
        to, origin: names of dtypes.
        name: of the arrays that are made, for messages.
    """

    to: str
    origin: str
    name: str = ""

    def result(self, dtype: DType) -> DType:
        return DTYPES[self.to]

    def inverse(self) -> Recoded:
        return Recoded(self.origin, self.to, self.name)

    def widened(self) -> Recoded:
        return self

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        blockwise(source, target, dtype, DTYPES[self.to], partial(self._recoded, dtype))

    def _recoded(self, dtype: DType, block: np.ndarray) -> np.ndarray:
        import numpy as np

        with np.errstate(invalid="ignore"):
            built = block.astype(DTYPES[self.to].numpy)
            # Beyond the range numbers wrap around, or come out as any other.
            odd = built.astype(block.dtype) != block
        if odd.any():
            raise MappingError(
                "a number that is not whole, or too large",
                location=self.name or None,
                got=block[odd][0],
                expected=f"numbers of {self.to}",
                hint="check that the checkpoint is whole: ckpt verify SRC",
            )
        if dtype.is_float and (rounded := np.abs(built) >= 1 << dtype.digits).any():
            raise MappingError(
                f"{dtype} does not hold all whole numbers of this size: this may have been another one",
                location=self.name or None,
                got=built[rounded][0],
                expected=f"numbers under {1 << dtype.digits}, or a wider dtype",
                hint="take the checkpoint as it was before it was cast",
            )
        return built

    def exactness(self, dtype: DType) -> Exactness:
        declared = f"{dtype} to {self.to}, refused where a number is not of both"
        back = DTYPES[self.origin]
        return Exactness(
            dtype == back, declared if dtype == back else f"{declared}; they come back as {back}"
        )
