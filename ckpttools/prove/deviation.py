"""How far two arrays are apart, element by element: as numbers, and in units in the last place.

Elements are equal if they are the same number, or both NaN. 0 equals -0, and one NaN another: where only
that is so, elements are equal but have other bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np

from ckpttools.dtypes import DTYPES, DType
from ckpttools.region import Shape

# Elements looked at at once, and what the temporaries of so many take: a dozen arrays of float64 at most.
BLOCK = 1 << 15
SCRATCH_BYTES = 16 * 8 * BLOCK


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Which differences do not count: those within any of these.

    Attributes:
        atol, rtol: |a - b| <= atol + rtol * max(|a|, |b|).
        ulp: so many units in the last place.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0

    @property
    def any(self) -> bool:
        return bool(self.atol or self.rtol or self.ulp)


EXACT = Tolerances()


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far two arrays are apart. Those of parts of an array add up to its own.

    Attributes:
        elements: how many were compared.
        differing: how many are not equal.
        beyond: how many of them no tolerance covers.
        other_bits: how many are equal, but not to the bit.
        nan: how many are NaN on one side only; they count as differing and nowhere below.
        max_abs: largest |a - b|; infinite where one is infinite and the other is not the same.
        max_rel: largest |a - b| / max(|a|, |b|): at most 2, infinite where max_abs is.
        max_ulp: most steps from the one to the other among the numbers of the dtype, infinity being the one
            after the largest; of two dtypes in the coarser one. None between numbers of different kinds.
        first: index of the first element that differs beyond all tolerances, else of the first that differs.
    """

    elements: int = 0
    differing: int = 0
    beyond: int = 0
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
            self.differing + other.differing,
            self.beyond + other.beyond,
            self.other_bits + other.other_bits,
            self.nan + other.nan,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            None if ulps[0] is None or ulps[1] is None else max(ulps[0], ulps[1]),
            _earlier(self, other),
        )


def _earlier(one: Deviation, other: Deviation) -> Shape | None:
    """The first index of both; one within the tolerances only where none is beyond them."""
    ranked = [(not each.beyond, each.first) for each in (one, other) if each.first is not None]
    return min(ranked)[1] if ranked else None


def deviation(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances = EXACT
) -> Deviation:
    """Of two blocks of at most about `BLOCK` elements.

    Args:
        a, b: carriers of the dtypes, of one shape and in C order. `first` counts within them.
        dtypes: of `a` and of `b`.
        tolerances: what `beyond` leaves out.
    """
    left, right = a.reshape(-1), b.reshape(-1)
    places, other_bits = None, 0
    if dtypes[0] == dtypes[1]:
        unequal = _unequal_bits(left, right)
        other_bits = int(np.count_nonzero(unequal))
        # Picking elements out costs as much as looking at twice as many.
        if 2 * other_bits < unequal.size:
            places = np.flatnonzero(unequal)
            left, right = left[places], right[places]
    if not left.size:
        return Deviation(a.size)
    found, where = _of_elements(left, right, dtypes, tolerances)
    if where is not None:
        where = where if places is None else int(places[where])
        index = tuple(map(int, np.unravel_index(where, a.shape)))
        found = replace(found, first=index)
    return replace(found, elements=a.size, other_bits=max(0, other_bits - found.differing))


def _unequal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "c":
        return np.asarray(a != b)
    halves = (each.view(np.uint64).reshape(-1, 2) for each in (a, b))
    return np.asarray(np.not_equal(*halves).any(axis=-1))


def _of_elements(
    a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType], tolerances: Tolerances
) -> tuple[Deviation, int | None]:
    """Of single elements, and the place of the first one that differs."""
    x, y = (numbers(each, dtype) for each, dtype in zip((a, b), dtypes, strict=True))
    steps = _steps(a, b, dtypes)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nan = np.isnan(x), np.isnan(y)
        if steps is not None and dtypes[0].kind in _WHOLE:
            # Integers of 64 bits are more than float64 tells apart.
            unequal, gap = steps != 0, steps.astype(np.float64)
        else:
            unequal, gap = (x != y) & ~(nan[0] & nan[1]), np.abs(x - y)
        one_nan = nan[0] != nan[1]
        size = np.maximum(np.abs(x), np.abs(y))
        compared = unequal & ~one_nan
        near = compared & np.isfinite(gap) & (gap <= tolerances.atol + tolerances.rtol * size)
        if steps is not None and tolerances.ulp:
            near |= compared & (steps <= tolerances.ulp)
        relative = np.where(np.isfinite(gap), gap / size, inf)
    beyond = unequal & ~near
    differing, first = int(np.count_nonzero(unequal)), beyond if beyond.any() else unequal
    return Deviation(
        differing=differing,
        beyond=int(np.count_nonzero(beyond)),
        nan=int(np.count_nonzero(one_nan)),
        max_abs=_largest(gap, compared),
        max_rel=_largest(relative, compared),
        max_ulp=None if steps is None else int(steps.max(where=compared, initial=0)),
    ), int(first.argmax()) if differing else None


_WHOLE = ("int", "uint", "bool")


def _largest(values: np.ndarray, where: np.ndarray) -> float:
    return float(values.max(where=where, initial=0.0))


def numbers(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """Elements as float64, or complex128 where they are complex; integers of 64 bits are rounded."""
    if dtype.itemsize == 1:
        return np.asarray(_table(dtype)[carriers])
    wide = np.complex128 if dtype.kind == "complex" else np.float64
    # Some NaN make numpy complain.
    with np.errstate(invalid="ignore"):
        if dtype.name == "bfloat16":
            # Several times as fast as ml_dtypes' own.
            return (carriers.astype(np.uint32) << 16).view(np.float32).astype(wide)
        return carriers.view(dtype.numpy).astype(wide)


@cache
def _table(dtype: DType) -> np.ndarray:
    """The number that every byte stands for; bits that an element lacks do not count."""
    carriers = np.arange(256, dtype=np.uint8)
    if dtype.packed:
        carriers &= np.uint8((1 << dtype.bits) - 1)
    if dtype.kind == "bool":
        return carriers.astype(bool).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return carriers.view(dtype.numpy).astype(np.float64)


def coarser(a: DType, b: DType) -> DType:
    """Of two floating-point dtypes the one that rounds more; `a` where they do alike."""
    return b if epsilon(b) > epsilon(a) else a


@cache
def epsilon(dtype: DType) -> float:
    """The distance from 1 to the next number of a floating-point dtype."""
    from ml_dtypes import finfo

    return float(finfo(dtype.numpy).eps)  # type: ignore[no-untyped-call]


def _steps(a: np.ndarray, b: np.ndarray, dtypes: tuple[DType, DType]) -> np.ndarray | None:
    """How many numbers of the dtype lie between the elements; NaN counts as any number."""
    kinds = {"int" if dtype.kind in _WHOLE else dtype.kind for dtype in dtypes}
    if kinds == {"float"}:
        dtype = coarser(*dtypes)
        sides = (_rounded(each, own, dtype) for each, own in zip((a, b), dtypes, strict=True))
        return _between(*(_ranks(each, dtype) for each in sides))
    if kinds == {"int"} and (dtypes[0] == dtypes[1] or "uint64" not in (d.name for d in dtypes)):
        return _between(*(_integers(each, own) for each, own in zip((a, b), dtypes, strict=True)))
    if kinds == {"complex"} and dtypes[0] == dtypes[1]:
        part = DTYPES["float32" if dtypes[0].name == "complex64" else "float64"]
        halves = [_ranks(each.view(part.carrier).reshape(-1, 2), part) for each in (a, b)]
        return np.asarray(_between(*halves).max(axis=-1))
    return None


def _ranks(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    """The places of floating-point numbers in their order, counted from 0, which -0 has as well."""
    if dtype.bits == 64:
        signed, lowest = carriers.view(np.int64), np.iinfo(np.int64).min
        return np.asarray(np.where(signed < 0, lowest - signed, signed))
    places: np.ndarray = carriers.astype(np.int64)
    if dtype.name == "float8_e8m0fnu":  # the one without a sign
        return places
    sign = 1 << (dtype.bits - 1)
    return np.asarray(np.where(places >= sign, sign - places, places))


def _integers(carriers: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.kind == "bool":
        return np.asarray(carriers != 0).astype(np.int64)
    values = carriers.view(dtype.numpy)
    return np.asarray(values if dtype.name == "uint64" else values.astype(np.int64))


def _between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| as unsigned numbers, which have room for it where signed ones overflow."""
    apart: np.ndarray = np.where(a > b, a - b, b - a)
    return apart.view(np.uint64)


def _rounded(carriers: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    if dtype == to:
        return carriers
    from ckpttools.mapping.values import rounded

    return rounded(carriers.view(dtype.numpy), to).view(to.carrier)
