"""Measure the deviation of two arrays: as numbers, and in units in the last place (ulp).

Because float32 rounds, close decisions are recalculated in float64: the largest deviations, and the
elements within the tolerances.

Elements are equal if they are the same number, or both NaN. A different sign of zero or NaN payload
counts as different bits and, without tolerances, as a difference.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

import numpy as np

from ckpttools.array.elements import wide, widen
from ckpttools.array.scratch import Scratch
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Shape

# Bytes that are compared at once, of each side. With shorter blocks, workers wait for the interpreter lock:
# bfloat16 ran at 1.9 GB/s on two cores with 512 KiB, 2.4 with 1 MiB, and 2.6 with 2 MiB.
_BLOCK_BYTES = 1 << 20
# Number of elements that are converted to float64 at once, in at most a dozen arrays.
_PART = 1 << 15
# Memory for `deviation_in_float32`, and for the positions of differing elements in a block.
SCRATCH_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerances of a comparison. A difference is ignored if it is within any of them.

    Attributes:
        atol, rtol: |a - b| <= atol + rtol * max(|a|, |b|).
        ulp: Maximum difference in units in the last place.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0

    def __post_init__(self) -> None:
        # Reject NaN, too: no difference is within it, and none exceeds it.
        if not (self.atol >= 0 and self.rtol >= 0 and self.ulp >= 0):
            raise UsageError("a tolerance must be a number, and not negative", got=self)

    @property
    def any(self) -> bool:
        return bool(self.atol or self.rtol or self.ulp)


EXACT = Tolerances()

MAX_STEPS = 1024
"""Most units in the last place that are counted. Values that are farther apart are not one value rounded in
different ways, and their relative difference describes them better."""


def deviation(
    a: np.ndarray,
    b: np.ndarray,
    dtypes: tuple[DType, DType],
    tolerances: Tolerances = EXACT,
    scratch: Scratch | None = None,
) -> Deviation:
    """Measure two blocks of at most about `block_elements`.

    Args:
        a, b: Carriers of the dtypes, of the same shape and in C order. The index `first` is relative to them.
        dtypes: Dtypes of `a` and `b`.
        tolerances: Deviations that do not count in `beyond`.
        scratch: Memory of `SCRATCH_BYTES`. Without it, memory is allocated and freed, which takes three times
            as long.
    """
    left, right = a.reshape(-1), b.reshape(-1)
    locations, other_bits = None, 0
    if dtypes[0] == dtypes[1]:
        unequal = _unequal_bits(left, right)
        other_bits = int(np.count_nonzero(unequal))
        # Extracting elements costs as much as comparing twice as many.
        if 2 * other_bits < unequal.size:
            locations = np.flatnonzero(unequal)
            left, right = left[locations], right[locations]
    if not left.size:
        return Deviation(a.size)
    result = _measure_elements(left, right, dtypes, tolerances, scratch or Scratch(SCRATCH_BYTES))
    if result.first is not None:
        (where,) = result.first if locations is None else (locations[result.first[0]],)
        result = replace(result, first=tuple(map(int, np.unravel_index(where, a.shape))))
    return replace(result, elements=a.size, other_bits=max(0, other_bits - result.num_differing))


def block_elements(dtypes: tuple[DType, DType]) -> int:
    """Return the number of elements to pass to `deviation` at once."""
    return _BLOCK_BYTES // max(dtype.itemsize for dtype in dtypes)


def _unequal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "c":
        return np.asarray(a != b)
    halves = (item.view(np.uint64).reshape(-1, 2) for item in (a, b))
    return np.asarray(np.not_equal(*halves).any(axis=-1))


def _measure_elements(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances, scratch: Scratch
) -> Deviation:
    """Measure elements one by one."""
    if all(dtype.name in IN_FLOAT32 for dtype in dtypes):
        result = deviation_in_float32((a, b), dtypes, tolerances, scratch)
        if result is not None:
            return result
    total = Deviation()
    for start in range(0, a.size, _PART):
        part = _measure_part(a[start : start + _PART], b[start : start + _PART], dtypes, tolerances)
        total += replace(part, first=(part.first[0] + start,)) if part.first else part
    return total


def _measure_part(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances
) -> Deviation:
    """Measure a few consecutive elements in float64."""
    x, y = (as_doubles(item, dtype) for item, dtype in zip((a, b), dtypes, strict=True))
    steps = steps_between(a, b, dtypes)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nan = np.isnan(x), np.isnan(y)
        if steps is not None and dtypes[0].is_whole:
            # float64 cannot represent all 64-bit integers exactly.
            unequal, gap = steps != 0, steps.astype(np.float64)
        else:
            unequal, gap = (x != y) & ~(nan[0] & nan[1]), np.abs(x - y)
        one_nan = nan[0] != nan[1]
        size = np.maximum(np.abs(x), np.abs(y))
        compared = unequal & ~one_nan
        # Infinite complex numbers may have the same direction without being equal.
        gap[compared & np.isnan(gap)] = inf
        near = compared & np.isfinite(gap) & (gap <= tolerances.atol + tolerances.rtol * size)
        if steps is not None and tolerances.ulp:
            near |= compared & np.isfinite(gap) & (steps <= tolerances.ulp)
        relative = np.where(np.isfinite(gap), gap / size, inf)
    beyond = unequal & ~near
    differing, first = int(np.count_nonzero(unequal)), beyond if beyond.any() else unequal
    return Deviation(
        num_differing=differing,
        num_exceeding=int(np.count_nonzero(beyond)),
        nan=int(np.count_nonzero(one_nan)),
        max_abs=_largest(gap, compared),
        max_rel=_largest(relative, compared),
        max_ulp=_counted(steps, compared, dtypes),
        first=(int(first.argmax()),) if differing else None,
    )


def _counted(steps: np.ndarray | None, where: np.ndarray, dtypes: tuple[DType, DType]) -> int | None:
    """Return the most steps between floating-point numbers; None if there are too many to mean anything."""
    if steps is None or (dtypes[0].is_whole and where.any()):
        return None
    most = int(steps.max(where=where, initial=0))
    return most if most <= MAX_STEPS else None


def _largest(values: np.ndarray, where: np.ndarray) -> float:
    return float(values.max(where=where, initial=0.0))


IN_FLOAT32 = ("float16", "bfloat16", "float32")
"""Dtypes that float32 can represent, with the layout that `steps_into` needs."""

# Relative errors of float32 results here are less than 2**-22 ...
_MARGIN = 2.0**-20
# ... and absolute errors of subnormal results are less than this.
_LEAST = 2.0**-140
# If more elements than this are close, the general method is used.
_MAX_CLOSE = 1 << 15
# If fewer than 1/16 of the signs differ, selecting these elements takes less time than processing all.
_FEW = 16
# Number of elements with the largest relative difference whose steps are counted first.
_SAMPLE = 64
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)

Sides = tuple[np.ndarray, np.ndarray]
Dtypes = tuple[DType, DType]
"""Dtypes of both sides."""


def deviation_in_float32(
    sides: Sides, dtypes: Dtypes, tolerances: Tolerances, scratch: Scratch
) -> Deviation | None:
    """Return the deviation of consecutive elements; None if float32 is not precise enough.

    Args:
        sides: 1-d carriers of both sides, with at least one element.
        dtypes: Dtypes of both sides, among `IN_FLOAT32`.
        tolerances: Deviations that do not count in `beyond`.
        scratch: Memory of 32 bytes per element.
    """
    size = sides[0].size
    with (
        scratch.take((3, size), _FLOAT32) as (x, y, gap),
        scratch.take((size,), _BOOL) as mask,
        scratch.take((size,), coarser(*dtypes).carrier) as steps,
        np.errstate(invalid="ignore", over="ignore"),
    ):
        widen(sides[0], dtypes[0], x)
        widen(sides[1], dtypes[1], y)
        limit = float(np.absolute(np.subtract(x, y, out=gap), out=gap).max())
        if not isfinite(limit) or not _can_be_rounded(dtypes, x, y):
            return None
        # Different numbers always have a nonzero difference, thanks to subnormal numbers.
        if not limit:
            return Deviation()
        np.not_equal(gap, 0, out=mask)
        differing, first = int(np.count_nonzero(mask)), int(mask.argmax())
        beyond: int | None = differing
        farthest = None if tolerances.any else _farthest_signs(mask, steps, gap, limit, (x, y), sides, dtypes)
        if farthest is None:
            magnitudes = np.maximum(np.absolute(x, out=x), np.absolute(y, out=y), out=x)
            if tolerances.any:
                if tolerances.ulp:
                    _steps(steps, sides, dtypes, scratch)
                beyond = _count_over(mask, gap, magnitudes, steps, y, sides, dtypes, tolerances, scratch)
                first = int(mask.argmax()) if beyond else first
            # 0 in proportion to 0 is NaN, and ignored.
            relative = np.divide(gap, magnitudes, out=y)
            ends = (gap, limit), (relative, float(np.fmax.reduce(relative)))
            farthest = np.concatenate([_near_end(item, end, mask) for item, end in ends])
        if beyond is None or farthest.size > _MAX_CLOSE:
            return None
        apart, magnitude = _exactly(farthest, sides, dtypes)
        return Deviation(
            num_differing=differing,
            num_exceeding=beyond,
            max_abs=float(apart.max()),
            max_rel=float((apart / magnitude).max()),
            max_ulp=_most_steps(steps, farthest, sides, dtypes, scratch),
            first=(first,),
        )


def _can_be_rounded(dtypes: Dtypes, *sides: np.ndarray) -> bool:
    """Return whether all numbers are within the range of the coarser dtype."""
    room = coarser(*dtypes).beyond_range
    return dtypes[0] == dtypes[1] or all(max(-float(side.min()), float(side.max())) < room for side in sides)


def _most_steps(
    steps: np.ndarray, farthest: np.ndarray, sides: Sides, dtypes: Dtypes, scratch: Scratch
) -> int | None:
    """Return the most steps from one number to the next; None if there are more than `MAX_STEPS`.

    The numbers that are the farthest apart are usually too far, which saves a third of the time.

    Args:
        steps: room for the steps of all elements.
        farthest: where these numbers are.
    """
    sample = farthest[-_SAMPLE:]
    some = steps_between(sides[0][sample], sides[1][sample], dtypes)
    if some is None or some.max(initial=0) > MAX_STEPS:
        return None
    _steps(steps, sides, dtypes, scratch)
    most = int(steps.max())
    return most if most <= MAX_STEPS else None


def _steps(out: np.ndarray, carriers: Sides, dtypes: Dtypes, scratch: Scratch) -> None:
    """Steps from one number to the next, in the coarser dtype."""
    dtype = coarser(*dtypes)
    if dtypes[0] == dtypes[1]:
        steps_into(out, carriers[0], carriers[1], dtype, scratch)
        return
    with scratch.take((2, out.size), dtype.carrier) as sides:
        for side, own, item in zip(sides, dtypes, carriers, strict=True):
            if own == dtype:
                side[...] = item
                continue
            with scratch.take(item.shape, _FLOAT32) as values:
                widen(item, own, values)
                if dtype.name == "float16":
                    side.view(np.float16)[...] = values
                else:
                    _to_bfloat16(values, side, scratch)
        steps_into(out, sides[0], sides[1], dtype, scratch)


def _to_bfloat16(values: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    """Round finite float32 numbers to nearest even, and write them as carriers."""
    bits = values.view(np.uint32)
    with scratch.take(bits.shape, bits.dtype) as rounded:
        # Rounds to nearest even: adds half of the last kept place, minus the smallest step if that place is
        # even.
        np.bitwise_and(np.right_shift(bits, 16, out=rounded), 1, out=rounded)
        np.add(np.add(rounded, 0x7FFF, out=rounded), bits, out=rounded)
        np.right_shift(rounded, 16, out=out, casting="unsafe")


def _farthest_signs(
    mask: np.ndarray,
    bits: np.ndarray,
    gap: np.ndarray,
    limit: float,
    values: Sides,
    sides: Sides,
    dtypes: Dtypes,
) -> np.ndarray | None:
    """Return where the largest differences may be, if a few elements have opposite signs, else None.

    No others are as far apart in proportion, so nothing needs to be divided for them.

    Args:
        mask, bits: Overwritten.
        gap, limit: The differences, and the largest of them.
        values: The elements in float32.
    """
    if dtypes[0] != dtypes[1]:
        return None
    np.less(np.bitwise_xor(*sides, out=bits).view(f"<i{dtypes[0].itemsize}"), 0, out=mask)
    if not 0 < np.count_nonzero(mask) < mask.size // _FEW:
        return None
    where = np.flatnonzero(mask)
    # 0 and -0 are the same number.
    if not np.all((sides[0][where] | sides[1][where]) << 1):
        return None
    relative = gap[where] / np.maximum(*(np.abs(item[where]) for item in values))
    return np.concatenate([_near_end(gap, limit, mask), where[_near_end(relative, relative.max())]])


def _near_end(values: np.ndarray, end: float, mask: np.ndarray | None = None) -> np.ndarray:
    """Return where values may be the largest, which is about `end`; `mask` is overwritten."""
    return np.flatnonzero(np.greater_equal(values, end * (1 - _MARGIN), out=mask))


def _count_over(
    mask: np.ndarray,
    gap: np.ndarray,
    size: np.ndarray,
    steps: np.ndarray,
    bound: np.ndarray,
    sides: Sides,
    dtypes: Dtypes,
    tolerances: Tolerances,
    scratch: Scratch,
) -> int | None:
    """Return the number of elements that exceed the tolerances; None if float32 leaves too many in doubt.

    Args:
        mask: Receives the elements that exceed the tolerances.
        bound: Overwritten.
    """
    with scratch.take(mask.shape, _BOOL) as sure:
        np.add(np.multiply(size, tolerances.rtol, out=bound), tolerances.atol, out=bound)
        np.multiply(bound, 1 + _MARGIN, out=bound)
        np.greater(gap, np.add(bound, _LEAST, out=bound), out=sure)
        np.multiply(bound, 1 - 3 * _MARGIN, out=bound)
        np.maximum(np.subtract(bound, 4 * _LEAST, out=bound), 0, out=bound)
        np.greater(gap, bound, out=mask)
        if tolerances.ulp:
            mask &= np.greater(steps, tolerances.ulp)
        doubtful = np.flatnonzero(np.greater(mask, sure, out=sure))
    if doubtful.size > _MAX_CLOSE:
        return None
    distance, magnitude = _exactly(doubtful, sides, dtypes)
    mask[doubtful] &= distance > tolerances.atol + tolerances.rtol * magnitude
    return int(np.count_nonzero(mask))


def _exactly(locations: np.ndarray, sides: Sides, dtypes: Dtypes) -> Sides:
    """Return |a - b| and max(|a|, |b|) of a few elements, in float64."""
    x, y = (as_doubles(item[locations], dtype) for item, dtype in zip(sides, dtypes, strict=True))
    return np.abs(x - y), np.maximum(np.abs(x), np.abs(y))


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of two arrays. Deviations of parts of an array can be added.

    Attributes:
        elements: Number of compared elements.
        num_differing: Number of elements that are not equal.
        num_exceeding: Number of differing elements that exceed all tolerances.
        other_bits: Number of elements that are equal but have different bits.
        nan: Number of elements that are NaN on one side only; they count as differing and in no field below.
        max_abs: Largest |a - b|; infinite if one element is infinite and the other is different.
        max_rel: Largest |a - b| / max(|a|, |b|), which is at most 2; infinite if `max_abs` is.
        max_ulp: Largest number of steps between the two elements among the numbers of the coarser dtype, with
            infinity after the largest number. None if there are more than `MAX_STEPS`, between numbers of
            different kinds, and for integers, whose difference is `max_abs`.
        first: Index of the first element that exceeds all tolerances, or otherwise of the first that differs.
    """

    elements: int = 0
    num_differing: int = 0
    num_exceeding: int = 0
    other_bits: int = 0
    nan: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    first: Shape | None = None

    def __add__(self, other: Deviation) -> Deviation:
        ulps = (self.max_ulp, other.max_ulp)
        return Deviation(
            self.elements + other.elements,
            self.num_differing + other.num_differing,
            self.num_exceeding + other.num_exceeding,
            self.other_bits + other.other_bits,
            self.nan + other.nan,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            None if ulps[0] is None or ulps[1] is None else max(ulps[0], ulps[1]),
            _earlier(self, other),
        )


def _earlier(one: Deviation, other: Deviation) -> Shape | None:
    """Return the first index of both.

    An index within the tolerances is returned only if none is beyond them.
    """
    ranked = [(not item.num_exceeding, item.first) for item in (one, other) if item.first is not None]
    return min(ranked)[1] if ranked else None


def as_doubles(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert elements to float64, or to complex128 if they are complex. 64-bit integers are rounded."""
    # Some NaN values cause numpy warnings.
    with np.errstate(invalid="ignore"):
        if dtype.kind == "complex":
            return carriers.view(dtype.numpy).astype(np.complex128)
        narrow = np.empty(carriers.shape, wide(dtype))
        widen(carriers, dtype, narrow)
        return narrow.astype(np.float64, copy=False)


def coarser(a: DType, b: DType) -> DType:
    """Return the floating-point dtype that rounds more; `a` if both round alike."""
    return b if b.epsilon > a.epsilon else a


def steps_between(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType]) -> np.ndarray | None:
    """Return the number of steps of the coarser dtype between the elements. The result for NaN is arbitrary.

    The distance to a number outside this dtype's range is larger than any distance within the range.
    """
    kinds = {"int" if dtype.is_whole else dtype.kind for dtype in dtypes}
    if kinds == {"float"}:
        dtype = coarser(*dtypes)
        sides = (_rounded(item, own, dtype) for item, own in zip((a, b), dtypes, strict=True))
        steps = _distance(*(_ranks(side, dtype) for side in sides))
        for item, own in zip((a, b), dtypes, strict=True):
            if own != dtype:
                size = np.abs(as_doubles(item, own))
                steps[(size >= dtype.beyond_range) & np.isfinite(size)] = 1 << dtype.bits
        return steps
    if kinds == {"int"} and (dtypes[0] == dtypes[1] or "uint64" not in (d.name for d in dtypes)):
        return _distance(*(_integers(item, own) for item, own in zip((a, b), dtypes, strict=True)))
    if kinds == {"complex"} and dtypes[0] == dtypes[1]:
        part = DTYPES["float32" if dtypes[0].name == "complex64" else "float64"]
        halves = [_ranks(item.view(part.carrier).reshape(-1, 2), part) for item in (a, b)]
        return np.asarray(_distance(*halves).max(axis=-1))
    return None


def steps_into(out: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: DType, scratch: Scratch) -> None:
    """Compute `steps_between` several times as fast, in unsigned integers of the elements' width.

    Args:
        out: Carriers of the dtype, which are overwritten.
        a, b: 1-d carriers of a dtype with a sign bit followed by ordered magnitudes, without NaN.
        dtype: Dtype of the elements.
        scratch: Memory for twice the elements of `a`.
    """
    signed = np.dtype(f"<i{dtype.itemsize}")
    with scratch.take((2, a.size), signed) as (one, other):
        sign = out.view(signed)
        for carriers, ranks in ((a, one), (b, other)):
            # Negative numbers get negative ranks, by magnitude.
            np.right_shift(carriers.view(signed), dtype.bits - 1, out=sign)
            np.bitwise_and(sign, np.iinfo(signed).max, out=ranks)
            np.bitwise_xor(ranks, carriers.view(signed), out=ranks)
            np.subtract(ranks, sign, out=ranks)
        np.maximum(one, other, out=sign)
        np.subtract(sign, np.minimum(one, other, out=one), out=sign)


def _ranks(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the ranks of floating-point numbers; 0 and -0 have rank 0."""
    if dtype.bits == 64:
        signed, lowest = carriers.view(np.int64), np.iinfo(np.int64).min
        return np.asarray(np.where(signed < 0, lowest - signed, signed))
    locations: np.ndarray = carriers.astype(np.int64)
    if dtype.layout is not None and not dtype.layout.sign:
        return locations
    sign = 1 << (dtype.bits - 1)
    return np.asarray(np.where(locations >= sign, sign - locations, locations))


def _integers(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.kind == "bool":
        return np.asarray(carriers != 0).astype(np.int64)
    values = carriers.view(dtype.numpy)
    return np.asarray(values if dtype.name == "uint64" else values.astype(np.int64))


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| as unsigned integers, since signed integers can overflow."""
    distance: np.ndarray = np.where(a > b, a - b, b - a)
    return distance.view(np.uint64)


def _rounded(carriers: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    if dtype == to:
        return carriers
    from ckpttools.mapping.values import round_constant

    return round_constant(carriers.view(dtype.numpy), to).view(to.carrier)
