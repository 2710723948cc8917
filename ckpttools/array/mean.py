"""Elementwise weighted sums of arrays, for averaging and subtracting checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import frexp, fsum, isclose, ldexp
from typing import TYPE_CHECKING

from ckpttools.array import read_blocks
from ckpttools.array.lazy import ElementwiseCombination, LazyArray
from ckpttools.array.read_blocks import subview
from ckpttools.array.rounding import widen
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.region import Region, split_evenly

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch

_WIDE_DTYPE = DTYPES["float64"]
# Powers of two with a smaller exponent have an inverse that is a normal float32 number.
_MAX_EXPONENT = 100


@dataclass(frozen=True, eq=False, repr=False)
class Mean(ElementwiseCombination):
    """The weighted mean (w1 x1 + w2 x2 + …) / total of floating-point arrays, in float32 or float64.

    Each element is summed in the order of the parts, so the bits do not depend on how the work is split or
    scheduled. Every term and sum is rounded to the precision of the dtype (24 or 53 bits). An element that is
    not finite in float32 is recomputed in float64.

    Attributes:
        weights: One for each part.
        total: The divisor of the sum; 1 for a plain sum.
    """

    weights: tuple[float, ...]
    total: float

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        # Elements processed at a time: large enough that workers rarely compete for the interpreter lock,
        # which every numpy call takes.
        for block in split_evenly(region, read_blocks.elements(_WIDE_DTYPE.itemsize)):
            target = subview(out, block.relative_to(region))
            if target.flags.c_contiguous:
                self._make(block, target.view(self.dtype.numpy), scratch)
                continue
            with scratch.take(block.shape, self.dtype.numpy) as result:
                self._make(block, result, scratch)
                target[...] = result.view(self.dtype.carrier)

    def _make(self, block: Region, out: np.ndarray, scratch: Scratch) -> None:
        self._sum(block, out, scratch, self.weights)
        if not _divide(out.reshape(-1), self.total):
            self._replace_nonfinite(block, out, scratch)

    def _sum(self, block: Region, out: np.ndarray, scratch: Scratch, weights: Sequence[float]) -> None:
        """Compute the weighted sum of a block."""
        flat = out.reshape(-1)
        with scratch.take(flat.shape, flat.dtype) as spare:
            for location, (part, weight) in enumerate(zip(self.parts, weights, strict=True)):
                with scratch.take(block.shape, part.dtype.carrier) as read:
                    part.read_into(block, read, scratch)
                    values = read.view(part.dtype.numpy).reshape(-1)
                    _add(flat, values, weight, None if location == 0 else spare)

    def _replace_nonfinite(self, block: Region, out: np.ndarray, scratch: Scratch) -> None:
        """Recompute non-finite elements in float64, with weights that sum to at most 1.

        Weights and total are divided by the same power of two, so sums do not overflow and keep every digit.
        All NaNs get the same bits, because IEEE 754 does not define which NaN a sum keeps.
        """
        import numpy as np

        largest_weight = max(abs(weight) for weight in self.weights)
        scale = max(0, frexp(largest_weight)[1] + len(self.weights).bit_length())
        weights = [ldexp(weight, -scale) for weight in self.weights]
        total = ldexp(self.total, -scale)
        with (
            scratch.take(block.shape, _WIDE_DTYPE.numpy) as wide,
            np.errstate(over="ignore", invalid="ignore"),
        ):
            self._sum(block, wide, scratch, weights)
            is_finite = np.isfinite(wide)
            _divide(wide.reshape(-1), total)
            if min(weights) >= 0 and isclose(total, fsum(weights)):
                # A mean is between its parts, but rounding may still exceed the largest float64.
                largest = np.copysign(np.finfo(np.float64).max, wide)
                np.copyto(wide, largest, where=is_finite & np.isinf(wide))
            np.copyto(wide, np.nan, where=np.isnan(wide))
            np.copyto(out, wide, where=~np.isfinite(out), casting="same_kind")

    @property
    def scratch_bytes(self) -> int:
        widest = max(part.dtype.itemsize for part in self.parts)
        own = 3 * read_blocks.scratch(self.size * _WIDE_DTYPE.itemsize) + read_blocks.scratch(
            self.size * widest
        )
        return own + max(part.scratch_bytes for part in self.parts)

    @property
    def stored_bits(self) -> int:
        return sum(part.stored_bits for part in self.parts)

    @property
    def read_kind(self) -> Hashable:
        return ("mean", *(part.read_kind for part in self.parts))


def _add(total: np.ndarray, values: np.ndarray, weight: float, spare: np.ndarray | None) -> None:
    """Compute total += weight * values through `spare`, or total = weight * values without it.

    Computes in place: new arrays of this size would need new pages each time, and take 3 ns per element
    instead of 0.5.
    """
    import numpy as np

    terms = total if spare is None else spare
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        widen(values, terms)
        if weight != 1:
            np.multiply(terms, weight, out=terms)
        if spare is not None:
            np.add(total, terms, out=total)


def _divide(total: np.ndarray, divisor: float) -> bool:
    """Compute total /= divisor; return whether all results are finite."""
    import numpy as np

    mantissa, exponent = frexp(divisor)
    is_power = mantissa == 0.5 and exponent != 1 and abs(exponent) < _MAX_EXPONENT
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if is_power:
            # Multiplying gives the same bits in a third of the time.
            np.multiply(total, 1 / divisor, out=total)
        elif divisor != 1:
            np.divide(total, divisor, out=total)
        # The dot product takes half the time of the minimum and maximum, which are NaN if any element is. It
        # can overflow although all elements are finite, so a non-finite result needs the full check.
        if np.isfinite(np.dot(total, total)):
            return True
        return bool(np.isfinite(total.max()) and np.isfinite(total.min()))


def mean(
    parts: Sequence[LazyArray], weights: Sequence[float], total: float, dtype: DType = _WIDE_DTYPE
) -> Mean:
    """Return the weighted sum of `parts` divided by `total`, as `dtype`: float32 or float64.

    Raises:
        ShapeError: The parts differ in shape or are not floating-point, or the list is empty.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or not all(part.dtype.is_float for part in parts):
        types_text = ", ".join(sorted({f"{part.dtype}{list(part.shape)}" for part in parts}))
        raise ShapeError(
            "only floating-point arrays of the same shape can be averaged", got=types_text or "none"
        )
    return Mean(parts[0].shape, dtype, tuple(parts), tuple(map(float, weights)), float(total))
