"""What a cause of a difference is, and what looks for one.

A detector yields hypotheses: arrays that would be the same if its cause were the one. Whether they are is
found out in `ckpttools.compare.explain`, first on a few elements, then on all. To add a cause, decorate a
function with `detector` and enter it in `ckpttools.compare.causes`, anywhere: of several causes that fit, the
one that claims least holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.compare.samples import in_one_dtype
from ckpttools.core.region import Shape

if TYPE_CHECKING:
    from ckpttools.compare.renames import Candidates

# Fewer elements than this are no evidence.
ENOUGH = 8
REMAP = "convert again with the right rows, or rearrange the axes with ckpt remap"


class Claim(IntEnum):
    """What a cause has to be told to fit: the less, the stronger its evidence."""

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
    """Why two arrays differ.

    Attributes:
        name: a short name that stays the same, such as "rope-layout".
        text: what is the matter, in words.
        advice: what to do; empty where there is nothing to say.
    """

    name: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Hypothesis:
    """What would be so if this were the cause.

    Attributes:
        cause: the cause.
        pairs: arrays that would be the same, two by two.
        ulps: units in the last place that they may be apart.
        origin: name under which A has what B has under this one; None where nothing was renamed.
    """

    cause: Cause
    pairs: tuple[tuple[LazyArray, LazyArray], ...]
    ulps: int = 0
    origin: str | None = None


class Sides(NamedTuple):
    """An array, and the one of the other checkpoint."""

    name: str
    array: LazyArray
    other: str
    source: LazyArray


@dataclass(frozen=True)
class Case:
    """Two arrays that are not the same.

    Attributes:
        name: of both.
        a, b: the arrays.
        first: index of the first element that differs; None where shapes do.
        sizes: lengths of the model's axes, as far as they are known.
        candidates: all arrays of A, to be looked up by content.
    """

    name: str
    a: LazyArray
    b: LazyArray
    first: Shape | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    candidates: Candidates | None = None

    @cached_property
    def alike(self) -> tuple[LazyArray, LazyArray]:
        """Both in one dtype."""
        return in_one_dtype(self.a, self.b)

    @cached_property
    def sides(self) -> tuple[Sides, Sides]:
        """Each side with the other: what is one's cause may be the other's."""
        return Sides("A", self.a, "B", self.b), Sides("B", self.b, "A", self.a)

    @property
    def are_floats(self) -> bool:
        """Whether both are floating-point numbers."""
        return self.a.dtype.is_float and self.b.dtype.is_float


Look = Callable[[Case], Iterator[Hypothesis]]


@dataclass(frozen=True, slots=True)
class Detector:
    """Looks for one cause.

    Attributes:
        name: of its causes, mostly.
        claim: how much it says; with the name it decides between causes that fit.
        hypotheses: what would be so, the likeliest first.
        shapes: whether it looks at arrays of one shape, of two, or of both kinds.
        of_single_arrays: whether one layer may have it alone: it is looked for in all, not in probes only.
    """

    name: str
    claim: Claim
    hypotheses: Look
    shapes: Literal["equal", "unequal", "any"] = "equal"
    of_single_arrays: bool = False

    @property
    def rank(self) -> tuple[Claim, str]:
        """Of several detectors whose causes fit, the least of these holds."""
        return self.claim, self.name

    def looks_at(self, case: Case) -> bool:
        """Whether the cause is one for arrays of these shapes."""
        return self.shapes == "any" or (self.shapes == "equal") == (case.a.shape == case.b.shape)


def detector(
    name: str,
    claim: Claim,
    *,
    shapes: Literal["equal", "unequal", "any"] = "equal",
    of_single_arrays: bool = False,
) -> Callable[[Look], Detector]:
    """Makes a detector of the function that yields its hypotheses."""
    return lambda look: Detector(name, claim, look, shapes, of_single_arrays)


def head_dims(case: Case, axis: int) -> list[int]:
    """Widths that heads on an axis may have, the likeliest first."""
    length = case.a.shape[axis]
    known = [n for name, n in case.sizes.items() if "head_dim" in name or name in ("query", "rope")]
    last = [length] if axis == len(case.a.shape) - 1 and length <= max(_HEAD_DIMS) else []
    dims = dict.fromkeys([*known, *last, *(() if known else _HEAD_DIMS)])
    return [dim for dim in dims if dim > 2 and dim % 2 == 0 and length % dim == 0]


# Widths of heads in released models, tried where nothing tells the model's own.
_HEAD_DIMS = (64, 128, 256, 96, 80, 112, 192, 32)


def zeros_like(array: LazyArray) -> LazyArray:
    """Zeros of an array's shape and dtype."""
    return Constant(array.shape, array.dtype, bytes(array.dtype.itemsize))
