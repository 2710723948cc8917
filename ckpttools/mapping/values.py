"""Element-wise functions that a row may apply, each with its effect on exactness.

Arithmetic is in float32, or in the element's own dtype if that is wider. Results are rounded once, to
nearest, ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, ElementOp
from ckpttools.array.rounding import as_float32, round_to
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import MappingError
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape

if TYPE_CHECKING:
    import numpy as np


# Number of elements in a block, whose float32 copy takes 1 MiB. Workers take the interpreter lock once per
# numpy call. With blocks of 2**16 elements, two workers were slower than one.
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Exactness:
    """States whether the inverse of an op restores the original bits.

    Attributes:
        exact: Whether the bits are restored, except for the values in `reason`.
        reason: Why the bits are not restored, or the exceptions; empty if there are none.
    """

    exact: bool
    reason: str = ""


class ValueOp(Protocol):
    """A row's change of values, which becomes an `ElementOp` when it is bound to the sizes of a model."""

    def bound(self, sizes: Mapping[str, int]) -> BoundOp:
        """Return the function for known sizes.

        Raises:
            MappingError: A required size is missing.
        """


class BoundOp(ElementOp, Protocol):
    """An element-wise function that knows its inverse and whether the inverse is exact."""

    def inverse(self) -> BoundOp:
        """Return the inverse function."""

    def exactness(self, dtype: DType) -> Exactness:
        """Return whether applying `inverse` after this function restores the bits of `dtype`."""

    def widened(self) -> BoundOp:
        """Return the function with a result wide enough for `inverse` to restore 16-bit values exactly."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Computes x * size ** power, such as `Scale("head_dim", -0.5)` for MaxText's query scale.

    Attributes:
        axis: The axis whose length is the size.
        power: Exponent of the size.
        factor_dtype: The dtype to which the factor is rounded first, as some models do.
    """

    axis: str
    power: float
    factor_dtype: str = "float32"

    def bound(self, sizes: Mapping[str, int]) -> BoundOp:
        import numpy as np

        if not sizes.get(self.axis):
            raise MappingError(
                "values are scaled by an axis of unknown length",
                got=self.axis,
                expected=", ".join(sizes),
            )
        rounded = np.array(sizes[self.axis] ** self.power).astype(DTYPES[self.factor_dtype].numpy)
        return Multiply(float(rounded))


@dataclass(frozen=True, slots=True)
class Multiply:
    """Computes x * float32(factor), or x / float32(factor) with `divide`, rounded to x's dtype.

    Attributes:
        factor: The multiplier or divisor.
        divide: Whether to divide instead of multiply.
        wide: Whether to keep the result in float32 if x has 16 bits or fewer.
    """

    factor: float
    divide: bool = False
    wide: bool = False

    def result(self, dtype: DType) -> DType:
        if not dtype.is_float:
            raise MappingError("only floating-point values can be scaled", got=dtype)
        return DTYPES["float32"] if self.wide and dtype.bits <= 16 else dtype

    def inverse(self) -> Multiply:
        return Multiply(self.factor, not self.divide)

    def widened(self) -> Multiply:
        return Multiply(self.factor, self.divide, True)

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        import numpy as np

        factor = (np.float64 if dtype.bits == 64 else np.float32)(np.float32(self.factor))
        operation = np.divide if self.divide else np.multiply
        result = self.result(dtype)

        steps = self._steps if result == dtype else None

        def rescaled(block: np.ndarray) -> np.ndarray:
            shifted = None if steps is None else _with_shifted_exponents(block, steps, dtype)
            if shifted is not None:
                return shifted
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                numbers = block.view(dtype.numpy)
                numbers = numbers if dtype.bits == 64 else as_float32(numbers)
                return round_constant(operation(numbers, factor), result).view(result.carrier)

        _apply_to_carriers(source, target, rescaled)

    @property
    def _steps(self) -> int | None:
        """Return the exponent of the factor if it is a power of two, else None."""
        mantissa, exponent = math.frexp(self.factor)
        return None if mantissa != 0.5 else (1 - exponent if self.divide else exponent - 1)

    def exactness(self, dtype: DType) -> Exactness:
        edge = "largest" if (self.factor > 1) != self.divide else "smallest"
        but = f"except for values near the {edge} of the type"
        factor = 1 / self.factor if self.divide else self.factor
        if math.frexp(self.factor)[0] == 0.5 and dtype.name in ("bfloat16", "float32", "float64"):
            return Exactness(True, f"times {factor:g}, a power of two: exact {but}")
        sign = "divided by" if self.divide else "times"
        if self.wide and dtype.bits <= 16:
            return Exactness(True, f"{sign} {self.factor:.6g}, stored in float32: exact {but}")
        return Exactness(False, f"{sign} {self.factor:.6g}, rounded to {dtype}: off by at most 1 ulp {but}")


@dataclass(frozen=True, slots=True)
class Shift:
    """Computes x + amount and stores it in float32, or in float64 if x is float64."""

    amount: float

    def bound(self, sizes: Mapping[str, int]) -> BoundOp:
        return Add(self.amount)


@dataclass(frozen=True, slots=True)
class Add:
    """Computes x + amount and stores it in float32 or wider.

    MaxText's norms are Hugging Face's norms with `Add(1)`.
    """

    amount: float

    def result(self, dtype: DType) -> DType:
        if not dtype.is_float:
            raise MappingError("only floating-point values can be shifted", got=dtype)
        return dtype if dtype.bits > 32 else DTYPES["float32"]

    def inverse(self) -> Add:
        return Add(-self.amount)

    def widened(self) -> Add:
        return self

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        import numpy as np

        result = self.result(dtype)

        def shifted(block: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = as_float32(block) if result.bits == 32 else block
                moved: np.ndarray = np.add(numbers, result.numpy.type(self.amount))
                return moved

        blockwise(source, target, dtype, result, shifted)

    def exactness(self, dtype: DType) -> Exactness:
        result = self.result(dtype)
        effect = f"{self.amount:+g}, stored in {result}"
        if dtype == result:
            return Exactness(False, f"{effect}: off by at most 1 ulp of the larger value")
        # float32 has 24 bits. Next to 1, it keeps all bits of 8-bit values down to 2**-16, and of 11-bit
        # values down to 2**-13.
        least = f"2**-{24 - dtype.digits}"
        return Exactness(True, f"{effect}: exact except for values under {least}, off by at most 2**-24")


@dataclass(frozen=True, slots=True)
class Cast:
    """Converts to another dtype with the same value, rounded to nearest even."""

    to: DType
    origin: DType | None = None

    def result(self, dtype: DType) -> DType:
        if not (dtype.is_float and self.to.is_float) and not self.exactness(dtype).exact:
            raise MappingError(
                f"a cast from {dtype} to {self.to} can lose integers", hint="keep the stored dtype"
            )
        return self.to

    def widened(self) -> Cast:
        return self

    def inverse(self) -> Cast:
        if self.origin is None:
            raise MappingError("a cast of unknown origin has no inverse")
        return Cast(self.origin, self.to)

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        blockwise(source, target, dtype, self.to, lambda block: round_constant(block, self.to))

    def exactness(self, dtype: DType) -> Exactness:
        if dtype == self.to or _holds(self.to, dtype):
            return Exactness(True)
        return Exactness(False, f"cast from {dtype} to {self.to}: rounded")


def round_constant(block: np.ndarray, to: DType) -> np.ndarray:
    """Round floating-point values once to another floating-point dtype, to nearest even."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if to.name == "float32":
            return as_float32(block)
        if to.bits <= 16:
            # Some pairs of small dtypes have no direct cast, and float64 would be rounded twice.
            block = _rounded_to_odd(block) if block.dtype == np.float64 else as_float32(block)
        if to.name != "bfloat16":
            return block.astype(to.numpy)
        rounded = np.empty(block.shape, to.carrier)
        round_to(to, block, rounded)
        return rounded.view(to.numpy)


def _holds(to: DType, dtype: DType) -> bool:
    """Return whether a wider floating-point dtype can represent all values of a narrower one."""
    least = {"bfloat16": 8, "float32": 16, "float64": 32}
    return dtype.is_float and dtype.bits <= least.get(to.name, 0)


def _with_shifted_exponents(bits: np.ndarray, steps: int, dtype: DType) -> np.ndarray | None:
    """Multiply carriers by 2**steps with integer arithmetic; None if a value is or becomes subnormal.

    This processes 10 GB/s of bfloat16 on one core; multiplying in float32 and rounding gives 0.65 GB/s.
    """
    import numpy as np

    if dtype.layout is None or dtype.bits < 16 or bits.size == 0:
        return None
    digits = dtype.layout.mantissa
    kind = bits.dtype.type
    limit = (1 << dtype.bits - 1 - digits) - 1
    exponents = np.bitwise_and(bits, kind(limit << digits))
    low, high = int(exponents.min()) >> digits, int(exponents.max()) >> digits
    if min(low, low + steps) < 1 or max(high, high + steps) >= limit:
        return None
    amount = kind(abs(steps) << digits)
    shifted: np.ndarray = np.add(bits, amount) if steps >= 0 else np.subtract(bits, amount)
    return shifted


def _rounded_to_odd(block: np.ndarray) -> np.ndarray:
    """Round float64 to float32 with rounding to odd, so that a second rounding is exact.

    The last bit records whether any bits were cut off.
    """
    import numpy as np

    single = block.astype(np.float32)
    widened = single.astype(np.float64)
    bits = single.view(np.uint32)
    bits -= np.abs(widened) > np.abs(block)
    bits |= widened != block
    return single


def blockwise(
    source: np.ndarray,
    target: np.ndarray,
    dtype: DType,
    target_dtype: DType,
    function: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Compute target = function(source) in blocks of the leading axis, using the actual dtypes."""

    def on_carriers(block: np.ndarray) -> np.ndarray:
        return function(block.view(dtype.numpy)).view(target_dtype.carrier)

    _apply_to_carriers(source, target, on_carriers)


def _apply_to_carriers(
    source: np.ndarray, target: np.ndarray, function: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Compute target = function(source) in blocks of the leading axis."""
    if source.ndim == 0:
        target[...] = function(source.reshape(1))[0]
        return
    if source.shape[0] == 0 or source.size == 0:
        return
    rows = max(1, _BLOCK // (source.size // source.shape[0]))
    for first in range(0, source.shape[0], rows):
        block = source[first : first + rows]
        if block.size > _BLOCK and block.ndim > 1 and block.shape[0] == 1:
            _apply_to_carriers(block[0], target[first], function)
            continue
        target[first : first + rows] = function(block)


@dataclass(frozen=True, slots=True)
class Fill:
    """A float32 array on the right side that no file contains; every element equals `number`."""

    number: float

    def array(self, shape: Shape) -> LazyArray:
        """Return the constant array for the right side."""
        import numpy as np

        return Constant(shape, DTYPES["float32"], np.array(self.number, "<f4").tobytes())

    def bound(self, sizes: Mapping[str, int]) -> BoundFill:
        return BoundFill(self.number)


@dataclass(frozen=True, slots=True)
class BoundFill:
    """An array whose elements all equal `number`; values are not changed."""

    number: float

    def result(self, dtype: DType) -> DType:
        return dtype

    def inverse(self) -> BoundFill:
        return self

    def widened(self) -> BoundFill:
        return self

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        target[...] = source

    def exactness(self, dtype: DType) -> Exactness:
        return Exactness(True, f"filled with {self.number:g}: the Hugging Face model has no such array")


@dataclass(frozen=True, slots=True)
class Whole:
    """Integers of dtype `left` on the left and `right` on the right."""

    left: str
    right: str

    def bound(self, sizes: Mapping[str, int]) -> BoundRecode:
        return BoundRecode(self.left, self.right)


@dataclass(frozen=True, slots=True)
class BoundRecode:
    """Integers converted to the dtype `to`; values outside its range are refused.

    Floating-point input is also accepted, because MaxText trains with its tables in float32. Values to which
    a neighbor may have been rounded, such as 256 and above in bfloat16, are refused.

    Attributes:
        to, origin: Names of the two dtypes.
        name: The name of the resulting arrays, for messages.
    """

    to: str
    origin: str
    name: str = ""

    def result(self, dtype: DType) -> DType:
        return DTYPES[self.to]

    def inverse(self) -> BoundRecode:
        return BoundRecode(self.origin, self.to, self.name)

    def widened(self) -> BoundRecode:
        return self

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        blockwise(source, target, dtype, DTYPES[self.to], partial(self._recode, dtype))

    def _recode(self, dtype: DType, block: np.ndarray) -> np.ndarray:
        import numpy as np

        with np.errstate(invalid="ignore"):
            converted = block.astype(DTYPES[self.to].numpy)
            # Out-of-range values wrap around or give arbitrary results.
            mismatches = converted.astype(block.dtype) != block
        if mismatches.any():
            raise MappingError(
                "a value is not an integer, or too large",
                location=self.name or None,
                got=block[mismatches][0],
                expected=f"values of {self.to}",
                hint=f"check that the checkpoint is complete: {action('doctor', 'SRC')}",
            )
        if dtype.is_float and (round_constant := np.abs(converted) >= 1 << dtype.digits).any():
            raise MappingError(
                f"{dtype} does not represent all integers of this size, so the value may have been rounded",
                location=self.name or None,
                got=converted[round_constant][0],
                expected=f"values under {1 << dtype.digits}, or a wider dtype",
                hint="use the checkpoint from before the cast",
            )
        return converted

    def exactness(self, dtype: DType) -> Exactness:
        effect = f"{dtype} to {self.to}, refused if a value does not fit both"
        widened = DTYPES[self.origin]
        return Exactness(
            dtype == widened, effect if dtype == widened else f"{effect}; converted back to {widened}"
        )
