"""Why two arrays of one name may differ: one small function for each cause, and the tables of them.

A cause is a function of a `Case` that yields hypotheses: arrays that would be the same if this were the
cause. Whether they are is found out elsewhere (`ckpttools.compare.explain`), first on a few elements, then on
all. To add a cause, write such a function and enter it in one of the tables at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isclose, sqrt
from typing import TYPE_CHECKING

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, elementwise, relayout, stack, take, window
from ckpttools.compare.distances import coarser
from ckpttools.compare.reshape import reshaped, transposes
from ckpttools.compare.samples import as_dtype, in_one_dtype, sampled_numbers
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Region, Shape
from ckpttools.core.wording import option
from ckpttools.mapping.values import Add, blockwise, rounded

if TYPE_CHECKING:
    from ckpttools.compare.relatives import Relatives

# Fewer elements than this are no evidence.
ENOUGH = 8
# Widths of heads in released models, tried where nothing tells the model's own.
_HEAD_DIMS = (64, 128, 256, 96, 80, 112, 192, 32)
# An embedding and a head have few arrays of their shape beside them; projections have many.
_MOST_ALIKE = 8
# An axis with more entries is not searched for another order.
_MOST_ENTRIES = 512


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


@dataclass(frozen=True)
class Case:
    """Two arrays that are not the same.

    Attributes:
        name: of both.
        a, b: the arrays.
        first: index of the first element that differs; None where shapes do.
        sizes: lengths of the model's axes, as far as they are known.
        relatives: all other arrays of both sides.
    """

    name: str
    a: LazyArray
    b: LazyArray
    first: Shape | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    relatives: Relatives | None = None

    @cached_property
    def alike(self) -> tuple[LazyArray, LazyArray]:
        """Both in one dtype."""
        return in_one_dtype(self.a, self.b)

    @cached_property
    def sides(self) -> tuple[tuple[str, LazyArray, str, LazyArray], ...]:
        """Each side with the other: what is one's cause may be the other's."""
        return (("A", self.a, "B", self.b), ("B", self.b, "A", self.a))


Causes = Callable[[Case], Iterator[Hypothesis]]


def all_zeros(case: Case) -> Iterator[Hypothesis]:
    """One side is zeros, as arrays are that were made and never filled."""
    for side, array, _, _ in case.sides:
        if array.dtype.has_zero:
            cause = Cause("zeros", f"{side} is all zeros", f"{side} was not written, or never initialised")
            yield Hypothesis(cause, ((array, _constant(array, bytes(array.dtype.itemsize))),))


def all_nan(case: Case) -> Iterator[Hypothesis]:
    """One side is NaN throughout."""
    for side, array, _, _ in case.sides:
        if array.dtype.is_float and array.dtype.has_nan:
            nan = np.array(np.nan).astype(array.dtype.numpy).tobytes()
            cause = Cause("nan", f"{side} is all NaN", f"take an earlier step of {side}")
            yield Hypothesis(cause, ((array, _constant(array, nan)),))


def _constant(like: LazyArray, element: bytes) -> LazyArray:
    return Constant(like.shape, like.dtype, element)


def truncated(case: Case) -> Iterator[Hypothesis]:
    """From some element on one side is zeros, as a file is that was not written to its end."""
    if not case.first:
        return
    tail = list(_tail(case.a.shape, case.first))
    if sum(part.size for part in tail) < ENOUGH:
        return
    for side, array, _, _ in case.sides:
        windows = [window(array, part.start, part.shape) for part in tail]
        zeros = [_constant(each, bytes(array.dtype.itemsize)) for each in windows]
        text = f"{side} is zeros from [{', '.join(map(str, case.first))}] on"
        cause = Cause("truncated", text, f"the file of {side} was cut off, or not written to its end")
        yield Hypothesis(cause, tuple(zip(windows, zeros, strict=True)))


def _tail(shape: Shape, first: Shape) -> Iterator[Region]:
    """All elements from one on, in C order, as boxes."""
    for axis in reversed(range(len(shape))):
        start = first[axis] + (axis < len(shape) - 1)
        if start < shape[axis]:
            lead = first[:axis]
            yield Region(
                (*lead, start, *(0 for _ in shape[axis + 1 :])),
                (*(i + 1 for i in lead), shape[axis], *shape[axis + 1 :]),
            )


def cast(case: Case) -> Iterator[Hypothesis]:
    """One side is the other, rounded to a coarser dtype; it may have come back from that since."""
    a, b = case.a, case.b
    if not (a.dtype.is_float and b.dtype.is_float):
        return
    if a.dtype != b.dtype:
        to = coarser(a.dtype, b.dtype)
        other, one = ("A", "B") if to == b.dtype else ("B", "A")
        yield Hypothesis(_rounded(one, other, to), (case.alike,))
        # Of bfloat16 and float16 neither holds all numbers of the other.
        for one, target, other, source in case.sides:
            if target.dtype != to:
                yield Hypothesis(
                    _rounded(one, other, target.dtype), ((as_dtype(source, target.dtype), target),)
                )
        return
    for via in (DTYPES[name] for name in _PASSED_THROUGH):
        if via.bits <= a.dtype.bits and via != a.dtype:
            for one, target, other, source in case.sides:
                back = as_dtype(as_dtype(source, via), target.dtype)
                yield Hypothesis(_rounded(one, other, via), ((back, target),))


_PASSED_THROUGH = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _rounded(one: str, other: str, to: DType) -> Cause:
    text = f"{one} is {other} rounded to {to}"
    return Cause("cast", text, f"nothing is wrong if {one} was meant to be cast; else convert it again")


def byte_swapped(case: Case) -> Iterator[Hypothesis]:
    """The bytes of every element are in the other order."""
    if case.a.dtype == case.b.dtype and case.a.dtype.kind != "complex" and case.a.dtype.itemsize > 1:
        cause = Cause("byte-order", "bytes are swapped: one side is big-endian", "write it little-endian")
        yield Hypothesis(cause, ((elementwise(case.a, _SwapBytes()), case.b),))


@dataclass(frozen=True, slots=True)
class _SwapBytes:
    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        target[...] = source.byteswap()


def rope_layout(case: Case) -> Iterator[Hypothesis]:
    """Rotary pairs lie side by side on one side, half a head apart on the other."""
    a, b = case.alike
    if a.shape != b.shape:
        return
    for axis, length in enumerate(a.shape):
        for dim in _head_dims(case, axis):
            heads, pairs = length // dim, dim // 2
            for atoms, layout in ((("half", 2, pairs), "interleaved"), (("pair", pairs, 2), "halves")):
                made = _swapped_atoms(a, axis, (heads, *atoms[1:]))
                was = "halves" if layout == "interleaved" else "interleaved"
                text = f"rotary pairs of heads of {dim} are {_WORDS[was]} in A, {_WORDS[layout]} in B"
                cause = Cause("rope-layout", text, _again(was))
                yield Hypothesis(cause, ((made, b),))


_WORDS = {"halves": "in halves", "interleaved": "interleaved"}


def _again(layout: str) -> str:
    """Only a conversion from Hugging Face lays pairs out."""
    return (
        "to get what A has, convert the Hugging Face model that B came from (or is) again, with "
        f"{option('rope_layout', layout)}"
    )


def _head_dims(case: Case, axis: int) -> list[int]:
    """Widths that heads on an axis may have, the likeliest first."""
    length = case.a.shape[axis]
    known = [n for name, n in case.sizes.items() if "head_dim" in name or name in ("query", "rope")]
    last = [length] if axis == len(case.a.shape) - 1 and length <= max(_HEAD_DIMS) else []
    dims = dict.fromkeys([*known, *last, *(() if known else _HEAD_DIMS)])
    return [dim for dim in dims if dim > 2 and dim % 2 == 0 and length % dim == 0]


def _swapped_atoms(array: LazyArray, axis: int, atoms: tuple[int, int, int]) -> LazyArray:
    """The last two of three parts of an axis in the other order."""
    split: list[Shape] = [(length,) for length in array.shape]
    split[axis] = atoms
    numbers = list(range(len(array.shape) + 2))
    numbers[axis + 1], numbers[axis + 2] = axis + 2, axis + 1
    merge = [3 if k == axis else 1 for k in range(len(array.shape))]
    return relayout(array, split, numbers, merge)


def transposed(case: Case) -> Iterator[Hypothesis]:
    """The axes are in another order; several axes may count as one."""
    a, b = case.alike
    for made, how in transposes(a, b.shape):
        yield Hypothesis(Cause("transposed", f"B is A transposed ({how})", _REMAP), ((made, b),))


_REMAP = "convert again with the right rows, or rearrange the axes with ckpt remap"


def other_shape(case: Case) -> Iterator[Hypothesis]:
    """The same elements in the same order, under another shape."""
    a, b = case.alike
    made = reshaped(a, b.shape) if a.shape != b.shape else None
    if made is not None:
        yield Hypothesis(
            Cause("reshaped", "the same elements in the same order, with other axes", _REMAP), ((made, b),)
        )


def padded(case: Case) -> Iterator[Hypothesis]:
    """One side goes on where the other ends, on one axis: a vocabulary that was filled up."""
    a, b = case.alike
    if len(a.shape) != len(b.shape):
        return
    axes = [k for k, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
    if len(axes) != 1:
        return
    (axis,) = axes
    side, long, short = ("A", a, b) if a.shape[axis] > b.shape[axis] else ("B", b, a)
    start = tuple(short.shape[axis] if k == axis else 0 for k in range(len(long.shape)))
    tail = window(long, start, tuple(n - s for n, s in zip(long.shape, start, strict=True)))
    head = (window(long, (0,) * len(start), short.shape), short)
    more = f"{side} has {tail.shape[axis]} more entries on axis {axis}"
    advice = f"{option('pad_vocab')} fills a vocabulary up, and the way back to Hugging Face cuts it again"
    zeros = (tail, _constant(tail, bytes(tail.dtype.itemsize)))
    yield Hypothesis(Cause("padded", f"{more}, all zeros", advice), (head, zeros))
    yield Hypothesis(Cause("padded", f"{more}, the others are equal", advice), (head,))


def plus_one(case: Case) -> Iterator[Hypothesis]:
    """A norm's scale is stored as it is on one side, less one on the other."""
    if not (case.a.dtype.is_float and case.b.dtype.is_float) or _one_is_nothing(*case.alike):
        return
    for offset, text in ((1.0, "+ 1"), (-1.0, "- 1")):
        for one, target, other, source in case.sides:
            made = as_dtype(elementwise(source, Add(offset)), target.dtype)
            less, whole = (other, one) if offset > 0 else (one, other)
            advice = (
                f"{less} holds what is added to 1 (as Gemma's files do), {whole} the sum (as MaxText does): "
                "convert with the family's own rows"
            )
            cause = Cause("norm-offset", f"{one} is {other} {text}", advice)
            yield Hypothesis(cause, ((made, target),), ulps=1)


def _one_is_nothing(a: LazyArray, b: LazyArray) -> bool:
    """Whether numbers are so large, or so near each other, that 1 more cannot be told from rounding."""
    if a.shape != b.shape:
        return False
    x, y = sampled_numbers(a), sampled_numbers(b)
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.any(np.abs(x - y) > 4 * a.dtype.epsilon * np.maximum(np.abs(x), np.abs(y)))


def factor(case: Case) -> Iterator[Hypothesis]:
    """All elements are multiplied by one number."""
    a, b = case.alike
    if not (a.dtype.is_float and b.dtype.is_float) or a.shape != b.shape:
        return
    x, y = sampled_numbers(a), sampled_numbers(b)
    good = np.isfinite(x) & np.isfinite(y) & (x != 0)
    if np.count_nonzero(good & (y != 0)) < ENOUGH:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = _ratio(x[good], y[good], a.dtype)
    # Rounding alone makes a factor that is nearly one.
    if not np.isfinite(ratio) or ratio == 0 or abs(ratio - 1) < 2 * a.dtype.epsilon:
        return
    made = as_dtype(elementwise(a, _Times(ratio)), b.dtype)
    yield Hypothesis(_of_factor(case, ratio), ((made, b),), ulps=2)


def _ratio(x: np.ndarray, y: np.ndarray, dtype: DType) -> float:
    """The factor from x to y that fits best: coarse numbers tell it together better than each of them."""
    if dtype.bits == 64:
        return float(np.median(y / x))
    return float(np.dot(x, y) / np.dot(x, x))


@dataclass(frozen=True, slots=True)
class _Times:
    """x * factor in float64, rounded to x's dtype."""

    factor: float

    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        def scaled(block: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                return rounded(block.astype(np.float64) * self.factor, dtype)

        blockwise(source, target, dtype, dtype, scaled)


def _of_factor(case: Case, ratio: float) -> Cause:
    name = case.name.lower()
    tolerance = max(1e-4, case.alike[0].dtype.epsilon)
    lengths = {n: f"axis {k}" for k, n in reversed(list(enumerate(case.a.shape)))}
    lengths |= {n: axis for axis, n in case.sizes.items()} if case.sizes else {}
    # An axis that a model does without has the length 0.
    for length, what in ((length, what) for length, what in lengths.items() if length > 1):
        for value, text in ((sqrt(length), f"sqrt({length})"), (1 / sqrt(length), f"1/sqrt({length})")):
            if isclose(abs(ratio), value, rel_tol=tolerance):
                return _of_root(name, "-" * (ratio < 0) + text, what)
    return Cause("factor", f"B is A times {ratio:.6g}")


def _of_root(name: str, text: str, what: str) -> Cause:
    if "query" in name or "q_proj" in name:
        advice = (
            "one side has 1/sqrt(head_dim) in the query's weights, as MaxText's models of some families want "
            "it, and the other has not, or twice: convert with the family's own rows"
        )
        return Cause("query-scale", f"B is A times {text}, the scale of the query", advice)
    if "embed" in name:
        advice = "one side has sqrt(hidden size) in the embedding, as MaxText's Gemma models want it"
        return Cause("embedding-scale", f"B is A times {text}, the scale of the embedding", advice)
    return Cause("factor", f"B is A times {text}, where {what} has that length")


def other_order(case: Case) -> Iterator[Hypothesis]:
    """The entries of an axis, or whole heads on it, are in another order."""
    a, b = case.alike
    if a.shape != b.shape:
        return
    for axis, length in enumerate(a.shape):
        for width in (1, *_head_dims(case, axis)):
            count = length // width
            if 1 < count <= _MOST_ENTRIES:
                order = _order(a, b, axis, width)
                if order is not None:
                    yield _in_other_order(a, b, axis, width, order)


def _order(a: LazyArray, b: LazyArray, axis: int, width: int) -> tuple[int, ...] | None:
    """For every entry of B which of A's it is; None where that cannot be told, or where all are in place."""
    room = max(1, 4096 // a.shape[axis])
    stop = list(a.shape)
    for k in reversed(range(len(stop))):
        if k != axis:
            stop[k] = min(stop[k], room)
            room = max(1, room // stop[k])
    region = Region((0,) * len(stop), tuple(stop))
    sides = [np.moveaxis(each.read(region).view(each.dtype.carrier), axis, 0) for each in (a, b)]
    count = a.shape[axis] // width
    entries = [[part.tobytes() for part in np.split(np.ascontiguousarray(each), count)] for each in sides]
    places = {entry: number for number, entry in enumerate(entries[0])}
    if len(places) < count or set(places) != set(entries[1]):
        return None
    order = tuple(places[entry] for entry in entries[1])
    return None if order == tuple(range(count)) else order


def _in_other_order(a: LazyArray, b: LazyArray, axis: int, width: int, order: Sequence[int]) -> Hypothesis:
    split: list[Shape] = [(n,) for n in a.shape]
    split[axis] = (len(order), width)
    loose = relayout(a, split, range(len(a.shape) + 1), [1] * (len(a.shape) + 1))
    moved = stack([take(loose, axis, number) for number in order], axis)
    merge = [2 if k == axis else 1 for k in range(len(a.shape))]
    made = relayout(moved, [(n,) for n in moved.shape], range(len(moved.shape)), merge)
    what = f"entries of axis {axis}" if width == 1 else f"heads of {width} on axis {axis}"
    shown = ", ".join(map(str, order[:8])) + (", …" if len(order) > 8 else "")
    cause = Cause("order", f"the {what} are in another order in B: A's {shown}", _REMAP)
    return Hypothesis(cause, ((made, b),))


def another_array(case: Case) -> Iterator[Hypothesis]:
    """B has under this name what A has under another: names were swapped, layers shifted."""
    if case.relatives is not None:
        for name in case.relatives.like(case.name):
            cause = Cause("renamed", f"B has here what A has in {name}")
            yield Hypothesis(cause, (in_one_dtype(case.relatives.a[name], case.b),), origin=name)


def moved_and_changed(case: Case) -> Iterator[Hypothesis]:
    """Elements are both moved and multiplied, as a query is that was converted with other rows."""
    if case.a.shape != case.b.shape:
        return
    for moves, values in itertools.product((rope_layout, transposed), (factor, plus_one)):
        for move in moves(case):
            ((made, _),) = move.pairs
            inner = Case(case.name, made, case.b, case.first, case.sizes)
            for change in values(inner):
                text = f"{move.cause.text}, and then {change.cause.text}"
                advice = "; ".join(filter(None, (move.cause.advice, change.cause.advice)))
                cause = Cause(f"{move.cause.name}+{change.cause.name}", text, advice)
                yield Hypothesis(cause, change.pairs, change.ulps)


def tied(name: str, array: LazyArray, side: str, own: Mapping[str, LazyArray]) -> Iterator[Hypothesis]:
    """An array that only one side has is another of that side: an output head stored with its embedding."""
    shapes = (array.shape, array.shape[::-1])
    alike = {other: each for other, each in own.items() if other != name and each.shape in shapes}
    if len(array.shape) != 2 or len(alike) > _MOST_ALIKE:
        return
    some = sampled_numbers(array)
    if np.all(some == some[:1]):
        # Constants, as adapters begin with, are alike without anything to do with each other.
        return
    for other, same in alike.items():
        if same.dtype != array.dtype:
            continue
        ways = " or ".join(option("tied", way) for way in ("drop", "materialize"))
        advice = f"the other side ties them: {ways} makes both alike"
        cause = Cause("tied", f"it is {side}'s {other}", advice)
        if same.shape == array.shape:
            yield Hypothesis(cause, ((same, array),))
        else:
            yield Hypothesis(cause, ((relayout(same, [(n,) for n in same.shape], (1, 0), (1, 1)), array),))


CAUSES: tuple[Causes, ...] = (
    all_zeros,
    all_nan,
    truncated,
    cast,
    byte_swapped,
    rope_layout,
    transposed,
    plus_one,
    factor,
    another_array,
    other_order,
    moved_and_changed,
)
"""For arrays of one shape; those before go before."""
CAUSES_OF_SHAPES: tuple[Causes, ...] = (transposed, other_shape, padded)
"""For arrays of two shapes."""
