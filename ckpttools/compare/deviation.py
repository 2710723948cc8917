"""The deviation of two arrays, element by element, as numbers and in units in the last place.

Elements are equal if they are the same number, or both NaN. A different sign of zero or NaN payload counts as
different bits and, without tolerances, as a difference.
"""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.region import Shape


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


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of two arrays. Deviations of parts of an array can be added.

    Attributes:
        elements: Number of compared elements.
        differing: Number of elements that are not equal.
        beyond: Number of differing elements that exceed all tolerances.
        other_bits: Number of elements that are equal but have different bits.
        nan: Number of elements that are NaN on one side only; they count as differing and in no field below.
        max_abs: Largest |a - b|; infinite if one element is infinite and the other is different.
        max_rel: Largest |a - b| / max(|a|, |b|), which is at most 2; infinite if `max_abs` is.
        max_ulp: Largest number of steps between the two elements among the numbers of the coarser dtype, with
            infinity after the largest number. None between numbers of different kinds.
        first: Index of the first element that exceeds all tolerances, or otherwise of the first that differs.
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
    """Return the first index of both.

    An index within the tolerances is returned only if none is beyond them.
    """
    ranked = [(not item.beyond, item.first) for item in (one, other) if item.first is not None]
    return min(ranked)[1] if ranked else None
