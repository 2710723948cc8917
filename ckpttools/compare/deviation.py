"""The deviation of two arrays, element by element: as numbers, and in units in the last place.

Elements are equal if they are the same number, or both NaN. The sign of a zero and the payload of a NaN are
counted as different bits, and as a difference without tolerances.
"""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Shape


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Differences that do not count: those within any of these.

    Attributes:
        atol, rtol: |a - b| <= atol + rtol * max(|a|, |b|).
        ulp: maximum units in the last place.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0

    def __post_init__(self) -> None:
        # No difference is within NaN, and none is beyond it.
        if not (self.atol >= 0 and self.rtol >= 0 and self.ulp >= 0):
            raise UsageError("a tolerance is a number, and not below zero", got=self)

    @property
    def any(self) -> bool:
        return bool(self.atol or self.rtol or self.ulp)


EXACT = Tolerances()


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of two arrays. Deviations of parts of an array can be added.

    Attributes:
        elements: how many were compared.
        differing: how many are not equal.
        beyond: how many of those exceed all tolerances.
        other_bits: how many are equal but have different bits.
        nan: how many are NaN on one side only; they count as differing and in nothing below.
        max_abs: largest |a - b|; infinite where one is infinite and the other is not the same.
        max_rel: largest |a - b| / max(|a|, |b|): at most 2, infinite where max_abs is.
        max_ulp: most steps between the two among the numbers of the dtype, infinity being the one after the
            largest; in the coarser of two dtypes. None between numbers of different kinds.
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
    """Return the first index of both; one within the tolerances only where none is beyond them."""
    ranked = [(not item.beyond, item.first) for item in (one, other) if item.first is not None]
    return min(ranked)[1] if ranked else None
