"""Weighted sums of arrays, element by element: means of checkpoints, and differences of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import frexp
from typing import TYPE_CHECKING

from ckpttools.array import read_blocks
from ckpttools.array.lazy import LazyArray, OfAlikeParts
from ckpttools.array.rounding import as_float32
from ckpttools.array.views import subview
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, split_to

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

# Elements added at once, 2 MiB in float32. Two workers took 7.4 s for a mean of two models of 2.47 GB with
# 2**16 here and in `ckpttools.mapping.values`, and 3.9 s as it is: they wait for each other less often.
_BLOCK = 1 << 19
_WIDE = DTYPES["float64"]
# Powers of two whose inverse float32 has.
_MOST_EXPONENT = 100


@dataclass(frozen=True, eq=False, repr=False)
class Mean(OfAlikeParts):
    """(w1 x1 + w2 x2 + …) / total in float32 or float64, of arrays of one shape and any such dtypes.

    The order of the sum is that of the parts, for each element alone: the bits do not depend on how the work
    is cut or who does it. Every term and sum is rounded to the 24 or 53 digits of the dtype; an element that
    is then infinite or no number in float32 is made in float64.

    Attributes:
        weights: one for each part.
        total: what the sum is divided by; 1 for a sum.
    """

    weights: tuple[float, ...]
    total: float

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        for box in split_to(region, read_blocks.elements(_WIDE.itemsize)):
            with scratch.take(box.shape, self.dtype.numpy) as made:
                if not self._sum(box, made, scratch):
                    self._sum_with_care(box, made, scratch)
                subview(out, box.relative_to(region))[...] = made.view(self.dtype.carrier)

    def _sum(self, box: Region, made: np.ndarray, scratch: Scratch) -> bool:
        """Writes the mean; returns whether all of it is finite."""
        flat = made.reshape(-1)
        for place, (part, weight) in enumerate(zip(self.parts, self.weights, strict=True)):
            with scratch.take(box.shape, part.dtype.carrier) as read:
                part.read_into(box, read, scratch)
                values = read.view(part.dtype.numpy).reshape(-1)
                _add(flat, values, weight, is_first=place == 0)
        return _divide(flat, self.total)

    def _sum_with_care(self, box: Region, made: np.ndarray, scratch: Scratch) -> None:
        """Elements that are not finite anew, in float64, which may make them so.

        Every NaN gets the same bits: which of several a sum keeps is left open.
        """
        import numpy as np

        with scratch.take(box.shape, _WIDE.numpy) as wide, np.errstate(over="ignore", invalid="ignore"):
            self._sum(box, wide, scratch)
            np.copyto(wide, np.nan, where=np.isnan(wide))
            np.copyto(made, wide, where=~np.isfinite(made), casting="same_kind")

    @property
    def scratch_bytes(self) -> int:
        widest = max(part.dtype.itemsize for part in self.parts)
        own = 2 * read_blocks.scratch(self.size * _WIDE.itemsize) + read_blocks.scratch(self.size * widest)
        return own + max(part.scratch_bytes for part in self.parts)

    @property
    def stored_bits(self) -> int:
        return sum(part.stored_bits for part in self.parts)

    @property
    def read_kind(self) -> Hashable:
        return ("mean", *(part.read_kind for part in self.parts))


def _add(total: np.ndarray, values: np.ndarray, weight: float, *, is_first: bool) -> None:
    """total += weight * values, or total = weight * values."""
    import numpy as np

    dtype = total.dtype
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, total.size, _BLOCK):
            sums, block = total[start : start + _BLOCK], values[start : start + _BLOCK]
            if block.itemsize < 4:
                block = as_float32(block)
            if is_first and weight == 1:
                sums[...] = block
            elif is_first:
                np.multiply(block, weight, out=sums, dtype=dtype)
            elif weight == 1:
                np.add(sums, block, out=sums)
            else:
                np.add(sums, np.multiply(block, weight, dtype=dtype), out=sums)


def _divide(total: np.ndarray, divisor: float) -> bool:
    """total /= divisor; returns whether all of it is finite."""
    import numpy as np

    finite, (mantissa, exponent) = True, frexp(divisor)
    is_power = mantissa == 0.5 and exponent != 1 and abs(exponent) < _MOST_EXPONENT
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, total.size, _BLOCK):
            sums = total[start : start + _BLOCK]
            if is_power:
                # The same bits, in a third of the time.
                np.multiply(sums, 1 / divisor, out=sums)
            elif divisor != 1:
                np.divide(sums, divisor, out=sums)
            # The largest of numbers is NaN where one of them is.
            finite = finite and bool(np.isfinite(sums.max()) and np.isfinite(sums.min()))
    return finite


def mean(parts: Sequence[LazyArray], weights: Sequence[float], total: float, dtype: DType = _WIDE) -> Mean:
    """The weighted sum of `parts` divided by `total`, as `dtype`: float32 or float64.

    Raises:
        ShapeError: the parts differ in shape or hold no floating-point numbers, or there are none.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or not all(part.dtype.is_float for part in parts):
        listed = ", ".join(sorted({f"{part.dtype}{list(part.shape)}" for part in parts}))
        raise ShapeError("only floating-point arrays of one shape have a mean", got=listed or "none")
    return Mean(parts[0].shape, dtype, tuple(parts), tuple(map(float, weights)), float(total))
