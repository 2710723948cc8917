"""L2 norms of two arrays and of their difference, and the cosine of the angle between them.

Products are made and added in float64, in rows of 1,024. Sums of blocks are added as integers, without
rounding, so their order does not matter. Elements that are NaN or infinite on either side do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, fsum, hypot, inf, isqrt, ldexp, sqrt

import numpy as np

from ckpttools.array.elements import wide, widen
from ckpttools.array.scratch import ALIGNMENT, Scratch
from ckpttools.compare.measure import as_doubles, steps_between
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType

_ROW = 1024
# Elements that become float64 at once, in three arrays. Fewer take longer: one of bfloat16 1.8 ns in parts of
# 32 Ki, 1.4 of 64 Ki, 1.2 of 128 Ki, 1.1 of 256 Ki.
_PART = 1 << 17
# The same for dtypes whose squares may leave the range of float64: these parts are copied several times.
_WIDE_PART = 1 << 14
_DOUBLE, _SINGLE = np.dtype(np.float64), np.dtype(np.float32)
SCRATCH_BYTES = (3 * _DOUBLE.itemsize + _SINGLE.itemsize) * _PART + 4 * ALIGNMENT
"""Scratch bytes of `sums`."""
# If a sum exceeds this, squares that are too small for float64 do not change it.
_LEAST = 2.0**-900
# Ratio of two sums of squares up to which the law of cosines loses three digits of sixteen at most.
_SIMILAR = 1e6

Sides = tuple[np.ndarray, np.ndarray]
"""Elements of both sides."""
Products = tuple[float, float, float, float]
"""Products of a with a, b with b, a with b, and a - b with itself."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of products of elements, as exact integers.

    Attributes:
        elements: Number of elements that are finite on both sides.
        bits: The sums are in units of 2**-bits; an even number.
        a, b: Sums of squares.
        product: Sum of a * b.
        difference: Sum of squares of a - b.
    """

    elements: int = 0
    bits: int = 0
    a: int = 0
    b: int = 0
    product: int = 0
    difference: int = 0

    @classmethod
    def of(cls, elements: int, products: Products, exponents: Sequence[int] = (0, 0, 0, 0)) -> Sums:
        """Return products times powers of two as integers."""
        parts = [frexp(value) for value in products]
        shifts = [k + power - 53 for k, (_, power) in zip(exponents, parts, strict=True)]
        bits = max([0, *(-shift for shift, (mantissa, _) in zip(shifts, parts, strict=True) if mantissa)])
        bits += bits % 2
        wholes = (
            int(ldexp(mantissa, 53)) << max(0, shift + bits)
            for (mantissa, _), shift in zip(parts, shifts, strict=True)
        )
        return cls(elements, bits, *wholes)

    def __add__(self, other: Sums) -> Sums:
        bits = max(self.bits, other.bits)
        mine, others = bits - self.bits, bits - other.bits
        return Sums(
            self.elements + other.elements,
            bits,
            (self.a << mine) + (other.a << others),
            (self.b << mine) + (other.b << others),
            (self.product << mine) + (other.product << others),
            (self.difference << mine) + (other.difference << others),
        )


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two arrays, or between several pairs of arrays together.

    Attributes:
        elements: Number of elements that are finite on both sides. Others do not count here.
        norm_a, norm_b: L2 norms of both sides.
        norm_difference: L2 norm of a - b.
        rel_l2: `norm_difference` / `norm_a`; infinite if only A is zero, and 0 if both are.
        rms: Root mean square of a - b.
        cosine: Cosine of the angle between a and b as vectors; None if one of them is zero.
    """

    elements: int
    norm_a: float
    norm_b: float
    norm_difference: float
    rel_l2: float
    rms: float
    cosine: float | None

    @classmethod
    def of(cls, sums: Sums) -> Distance:
        """Return the distance that sums over all elements give."""
        is_zero = not sums.a or not sums.b
        cosine = min(1.0, _root_of_ratio(sums.product * sums.product, sums.a * sums.b))
        return cls(
            sums.elements,
            _root(sums.a, sums.bits),
            _root(sums.b, sums.bits),
            _root(sums.difference, sums.bits),
            _root_of_ratio(sums.difference, sums.a),
            _root_of_ratio(sums.difference, sums.elements << sums.bits),
            None if is_zero else -cosine if sums.product < 0 else cosine,
        )

    @classmethod
    def joined(cls, parts: Iterable[Distance]) -> Distance:
        """Return the distance between all these arrays as one vector."""
        parts = list(parts)
        a, b, difference = (
            hypot(*norms)
            for norms in zip(*((p.norm_a, p.norm_b, p.norm_difference) for p in parts), strict=True)
        )
        elements = sum(part.elements for part in parts)
        has_angle = min(a, b) > 0 and max(a, b) < inf
        shares = ((part.norm_a / a) * (part.norm_b / b) * (part.cosine or 0) for part in parts if has_angle)
        return cls(
            elements,
            a,
            b,
            difference,
            # If the norm is zero or exceeds float64, the largest ratio of a part is an upper bound.
            difference / a if 0 < a < inf else max((part.rel_l2 for part in parts), default=0.0),
            difference / sqrt(elements) if elements else 0.0,
            max(-1.0, min(1.0, fsum(shares))) if has_angle else None,
        )


def _root(square: int, bits: int) -> float:
    """Return the root of a sum of squares in units of 2**-bits as a float."""
    # The integer root of 128 bits is rounded less than float64.
    shift = (square.bit_length() - 128) // 2
    part = square >> 2 * shift if shift > 0 else square << -2 * shift
    try:
        return ldexp(isqrt(part), shift - bits // 2)
    except OverflowError:
        return inf


def _root_of_ratio(part: int, total: int) -> float:
    """Return the root of a ratio as a float; 0 for 0 / 0."""
    if not total:
        return inf if part else 0.0
    bits = max(0, 128 + total.bit_length() - part.bit_length())
    bits += bits % 2
    return _root((part << bits) // total, bits)


def sums(
    a: np.ndarray,
    b: np.ndarray | None,
    dtypes: tuple[DType, DType],
    scratch: Scratch,
    *,
    is_sparse: bool = False,
) -> Sums:
    """Return the sums of a block.

    Args:
        a, b: Carriers of the dtypes, of one size and in C order; `b` is None if it has the bits of `a`.
        dtypes: Of `a` and of `b`.
        scratch: Has `SCRATCH_BYTES`.
        is_sparse: Whether most elements of `b` have the bits of those of `a`, which is faster.
    """
    left = a.reshape(-1)
    right = left if b is None else b.reshape(-1)
    is_sparse = is_sparse or b is None
    is_simple = all(dtype.kind != "complex" and (dtype.is_float or dtype.bits <= 32) for dtype in dtypes)
    total = Sums()
    room = min(_PART, left.size)
    with (
        scratch.take((3, room), _DOUBLE) as doubles,
        scratch.take((room,), _SINGLE) as float32_buffer,
        np.errstate(over="ignore", invalid="ignore", under="ignore"),
    ):
        for start in range(0, left.size, room or 1):
            sides = left[start : start + room], right[start : start + room]
            found = None
            if is_simple and is_sparse:
                where = np.flatnonzero(sides[0] != sides[1]) if b is not None else np.empty(0, np.intp)
                found = _of_sparse(sides, where, dtypes, doubles, float32_buffer)
            elif is_simple:
                found = _of_dense(sides, dtypes, doubles, float32_buffer)
            total += _of_any(*sides, dtypes) if found is None else Sums.of(sides[0].size, found)
    return total


def _of_dense(
    sides: Sides, dtypes: tuple[DType, DType], doubles: np.ndarray, float32_buffer: np.ndarray
) -> Products | None:
    """Return the products of elements; None if float64 may not hold all of them."""
    x, y, gaps = doubles[:, : sides[0].size]
    _widen(sides[0], dtypes[0], x, float32_buffer)
    _widen(sides[1], dtypes[1], y, float32_buffer)
    a, b, difference = _product(x, x), _product(y, y), _product(np.subtract(x, y, out=gaps), gaps)
    if not all(_is_held(item, dtypes) for item in (a, b, difference)):
        return None
    # The law of cosines saves a product, but digits are lost if one norm is much larger. Sums of squares may
    # overflow, halves do not.
    is_similar = max(a, b) < _SIMILAR * min(a, b)
    return a, b, a / 2 + b / 2 - difference / 2 if is_similar else _product(x, y), difference


def _of_sparse(
    sides: Sides,
    where: np.ndarray,
    dtypes: tuple[DType, DType],
    doubles: np.ndarray,
    float32_buffer: np.ndarray,
) -> Products | None:
    """Return the same for elements that have different bits in few locations."""
    x, y = doubles[0, : sides[0].size], doubles[1, : where.size]
    _widen(sides[0], dtypes[0], x, float32_buffer)
    _widen(sides[1][where], dtypes[1], y, float32_buffer)
    differing = x[where]
    x[where] = 0
    same, gaps = _product(x, x), differing - y
    a, b, difference = (
        same + _product(differing, differing),
        same + _product(y, y),
        _product(gaps, gaps),
    )
    if not (_is_held(a, dtypes) and _is_held(b, dtypes) and (not where.size or _is_held(difference, dtypes))):
        return None
    return a, b, same + _product(differing, y), difference


def _is_held(squares: float, dtypes: tuple[DType, DType]) -> bool:
    """Return whether a sum of squares has neither overflowed nor lost any that count."""
    can_be_lost = any(dtype.bits > 32 for dtype in dtypes)
    return (_LEAST < squares < inf) if can_be_lost else (0 <= squares < inf)


def _widen(carriers: np.ndarray, dtype: DType, out: np.ndarray, float32_buffer: np.ndarray) -> None:
    """Convert elements to float64."""
    if wide(dtype) == _DOUBLE:
        widen(carriers, dtype, out)
    else:
        narrow = float32_buffer[: carriers.size]
        widen(carriers, dtype, narrow)
        np.copyto(out, narrow)


def _product(x: np.ndarray, y: np.ndarray) -> float:
    """Return the sum of x * y."""
    # BLAS starts threads of its own for rows of more than 10,000.
    total = x.size // _ROW * _ROW
    rows = np.vecdot(x[:total].reshape(-1, _ROW), y[:total].reshape(-1, _ROW))
    return float(np.add.reduce(rows)) + float(np.vdot(x[total:], y[total:]))


def _of_any(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType]) -> Sums:
    """Return the sums of elements of any dtype, including NaN, infinities and very large numbers."""
    total = Sums()
    for start in range(0, a.size, _WIDE_PART):
        total += _of_part(a[start : start + _WIDE_PART], b[start : start + _WIDE_PART], dtypes)
    return total


def _of_part(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType]) -> Sums:
    x, y = (as_doubles(item, dtype) for item, dtype in zip((a, b), dtypes, strict=True))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    # float64 cannot distinguish all 64-bit integers.
    steps = steps_between(a, b, dtypes) if all(dtype.is_whole for dtype in dtypes) else None
    gaps = None if steps is None else steps.astype(_DOUBLE)
    if np.iscomplexobj(x) or np.iscomplexobj(y):
        x, y = (np.ascontiguousarray(item, np.complex128).view(_DOUBLE) for item in (x, y))
    (x, high), (y, low) = _scale_near_one(x), _scale_near_one(y)
    if gaps is None:
        # Halves, as the difference of the largest numbers is infinite.
        gaps = np.ldexp(x, high - max(high, low) - 1) - np.ldexp(y, low - max(high, low) - 1)
        gaps, shift = _scale_near_one(gaps)
        shift += max(high, low) + 1
    else:
        gaps, shift = _scale_near_one(gaps)
    products = _product(x, x), _product(y, y), _product(x, y), _product(gaps, gaps)
    return Sums.of(int(np.count_nonzero(finite)), products, (2 * high, 2 * low, high + low, 2 * shift))


def _scale_near_one(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Return values divided by a power of two, so that none is above 1, and the exponent of that power."""
    exponent = frexp(float(np.abs(values).max(initial=0.0)))[1]
    return np.ldexp(values, -exponent), exponent
