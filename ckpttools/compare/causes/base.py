"""Causes of differences, and detectors for them.

A detector yields hypotheses: pairs of arrays that would be equal if its cause applied.
`ckpttools.compare.explain` tests them, first on a few elements, then on all. To add a cause, decorate a
function with `detector` and add it to `ckpttools.compare.causes`, at any position: if several causes fit, the
one with the weakest claim wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.compare.samples import to_common_dtype
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape

if TYPE_CHECKING:
    from ckpttools.compare.renames import Candidates

# Fewer elements than this are not sufficient evidence.
MIN_EVIDENCE = 8
REMAP = f"convert again with the right rows, or rearrange the axes with {action('remap')}"


class Claim(IntEnum):
    """The assumptions that a cause needs to fit. Fewer assumptions are stronger evidence."""

    ONE_SIDE_EMPTY = 0
    REST_EMPTY = 1
    OTHER_ENCODING = 2
    AXES_MOVED = 3
    AXES_CHANGED = 4
    KNOWN_NUMBER = 5
    FITTED_NUMBER = 6
    OTHER_ARRAY = 7
    FITTED_ORDER = 8
    TWO_AT_ONCE = 9


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why two arrays differ.

    Attributes:
        name: Short, stable name, such as "rope-layout".
        text: Description of the difference.
        advice: Suggested action; may be empty.
    """

    name: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause and its predictions.

    Attributes:
        cause: The cause.
        pairs: Pairs of arrays that would be equal.
        ulps: Allowed difference in units in the last place.
        origin: A's name for the array that has this name in B; None if nothing was renamed.
    """

    cause: Cause
    pairs: tuple[tuple[LazyArray, LazyArray], ...]
    ulps: int = 0
    origin: str | None = None


class Sides(NamedTuple):
    """An array, and its counterpart in the other checkpoint."""

    name: str
    array: LazyArray
    other: str
    source: LazyArray


@dataclass(frozen=True)
class Case:
    """Two arrays that differ.

    Attributes:
        name: Name of both arrays.
        a, b: The arrays.
        first: Index of the first differing element; None if the shapes differ.
        sizes: Known lengths of the model's axes.
        candidates: All arrays of A, to find arrays by content.
    """

    name: str
    a: LazyArray
    b: LazyArray
    first: Shape | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    candidates: Candidates | None = None

    @cached_property
    def alike(self) -> tuple[LazyArray, LazyArray]:
        """Return both arrays in the same dtype."""
        return to_common_dtype(self.a, self.b)

    @cached_property
    def sides(self) -> tuple[Sides, Sides]:
        """Both orders of the sides, because a cause may apply to either."""
        return Sides("A", self.a, "B", self.b), Sides("B", self.b, "A", self.a)

    @property
    def are_floats(self) -> bool:
        """Whether both are floating-point arrays."""
        return self.a.dtype.is_float and self.b.dtype.is_float


Look = Callable[[Case], Iterator[Hypothesis]]


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector for one cause.

    Attributes:
        name: Name of its cause, usually.
        claim: How much the cause assumes; the claim, then the name, decides between causes that fit.
        hypotheses: Yields hypotheses, most likely first.
        shapes: Whether the cause applies to arrays of equal shapes, unequal shapes, or both.
        of_single_arrays: Whether the cause may apply to single layers, so that it is tried on all arrays and
            not only on probes.
    """

    name: str
    claim: Claim
    hypotheses: Look
    shapes: Literal["equal", "unequal", "any"] = "equal"
    of_single_arrays: bool = False

    @property
    def rank(self) -> tuple[Claim, str]:
        """Sort key: the detector with the lowest rank wins if several causes fit."""
        return self.claim, self.name

    def applies_to(self, case: Case) -> bool:
        """Return whether the cause applies to arrays of these shapes."""
        return self.shapes == "any" or (self.shapes == "equal") == (case.a.shape == case.b.shape)


def detector(
    name: str,
    claim: Claim,
    *,
    shapes: Literal["equal", "unequal", "any"] = "equal",
    of_single_arrays: bool = False,
) -> Callable[[Look], Detector]:
    """Create a detector from the function that yields its hypotheses."""
    return lambda detect: Detector(name, claim, detect, shapes, of_single_arrays)


def head_dims(case: Case, axis: int) -> list[int]:
    """Return possible widths of the heads on an axis, most likely first."""
    length = case.a.shape[axis]
    known = [n for name, n in case.sizes.items() if "head_dim" in name or name in ("query", "rope")]
    last = [length] if axis == len(case.a.shape) - 1 and length <= max(_HEAD_DIMS) else []
    dims = dict.fromkeys([*known, *last, *(() if known else _HEAD_DIMS)])
    return [dim for dim in dims if dim > 2 and dim % 2 == 0 and length % dim == 0]


# Head widths in released models, tried if the model's own is unknown.
_HEAD_DIMS = (64, 128, 256, 96, 80, 112, 192, 32)


def zeros_like(array: LazyArray) -> LazyArray:
    """Return zeros of an array's shape and dtype."""
    return Constant(array.shape, array.dtype, bytes(array.dtype.itemsize))
