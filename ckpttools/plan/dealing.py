"""Dealing the tasks of a plan out: contiguous parts, so that each reads few files, as even as can be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a plan.

    Attributes:
        number: from 0 on.
        count: how many there are.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(
                f"there is no part {self.number} of {self.count}",
                expected=f"0 to {self.count - 1}" if self.count > 0 else "at least one part",
                hint="parts are counted from 0: 0/4, 1/4, 2/4, 3/4",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str) -> Part:
    """The part that a user means by "3/8".

    Raises:
        UsageError: not a part.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
        raise UsageError(f"{text!r} is no part", expected="such as 3/8: number 3, counted from 0, of 8")
    return Part(int(number), int(count))


def dealt(sizes: Sequence[int], count: int) -> list[int]:
    """Where parts begin and end: `count + 1` numbers, from 0 to how many sizes there are.

    No other way to cut a sequence into so many stretches makes the largest of them smaller; the others are as
    even as that allows.

    Args:
        sizes: bytes of what is dealt out, in order.
        count: how many parts; some are empty where there is less to do.
    """
    ends = list(accumulate(sizes, initial=0))
    limit = _least_most(ends, max(sizes, default=0), count)
    # Where a part may begin at the earliest, with so many parts from there on.
    earliest = [len(sizes)]
    for _ in range(count):
        earliest.append(bisect_left(ends, ends[earliest[-1]] - limit))
    cuts = [0]
    for left in range(count, 0, -1):
        start = cuts[-1]
        expected = ends[start] + (ends[-1] - ends[start]) / left
        after = bisect_left(ends, expected, start)
        nearest = (
            after - 1 if after > start and expected - ends[after - 1] < ends[after] - expected else after
        )
        latest = bisect_right(ends, ends[start] + limit) - 1
        cuts.append(min(max(nearest, earliest[left - 1]), latest))
    return cuts


def _least_most(ends: Sequence[int], largest: int, count: int) -> int:
    """The least that the largest of so many parts can have."""
    low, high = max(largest, -(-ends[-1] // count)) - 1, ends[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if _is_enough(ends, middle, count):
            high = middle
        else:
            low = middle
    return high


def _is_enough(ends: Sequence[int], limit: int, count: int) -> bool:
    """Whether so many parts of so much each take all."""
    position = 0
    for _ in range(count):
        position = bisect_right(ends, ends[position] + limit) - 1
    return position == len(ends) - 1
