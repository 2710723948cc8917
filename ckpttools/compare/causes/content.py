"""One side has no content, or the same content in another encoding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpttools.array.nodes import Constant, elementwise, window
from ckpttools.compare.causes.base import MIN_EVIDENCE, Case, Cause, Claim, Hypothesis, detector, zeros_like
from ckpttools.compare.measure import coarser
from ckpttools.compare.samples import as_dtype
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.region import Region, Shape


@detector("zeros", Claim.ONE_SIDE_EMPTY)
def all_zeros(case: Case) -> Iterator[Hypothesis]:
    """Detect that one side is all zeros, as in arrays that were allocated and never filled."""
    for side in case.sides:
        if side.array.dtype.has_zero:
            advice = f"{side.name} was not written, or never initialized"
            cause = Cause("zeros", f"{side.name} is all zeros", advice)
            yield Hypothesis(cause, ((side.array, zeros_like(side.array)),))


@detector("nan", Claim.ONE_SIDE_EMPTY)
def all_nan(case: Case) -> Iterator[Hypothesis]:
    """Detect that one side is all NaN."""
    for side, array, _, _ in case.sides:
        if array.dtype.is_float and array.dtype.has_nan:
            nan = np.array(np.nan).astype(array.dtype.numpy).tobytes()
            cause = Cause("nan", f"{side} is all NaN", f"take an earlier step of {side}")
            yield Hypothesis(cause, ((array, Constant(array.shape, array.dtype, nan)),))


@detector("truncated", Claim.REST_EMPTY)
def truncated(case: Case) -> Iterator[Hypothesis]:
    """Detect truncation: one side is zero after some element, as in an incompletely written file."""
    tail = list(_tail(case.a.shape, case.first)) if case.first else []
    if not case.first or sum(part.size for part in tail) < MIN_EVIDENCE:
        return
    for side, array, _, _ in case.sides:
        windows = [window(array, part.start, part.shape) for part in tail]
        text = f"{side} is zeros from [{', '.join(map(str, case.first))}] on"
        cause = Cause("truncated", text, f"the file of {side} was truncated, or not written completely")
        yield Hypothesis(cause, tuple((item, zeros_like(item)) for item in windows))


def _tail(shape: Shape, first: Shape) -> Iterator[Region]:
    """Yield all elements starting from one, in C order, as boxes."""
    for axis in reversed(range(len(shape))):
        start = first[axis] + (axis < len(shape) - 1)
        if start < shape[axis]:
            lead = first[:axis]
            yield Region(
                (*lead, start, *(0 for _ in shape[axis + 1 :])),
                (*(i + 1 for i in lead), shape[axis], *shape[axis + 1 :]),
            )


_INTERMEDIATE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@detector("cast", Claim.OTHER_ENCODING)
def cast(case: Case) -> Iterator[Hypothesis]:
    """Detect that one side is the other rounded to a coarser dtype, and possibly converted back."""
    a, b = case.a, case.b
    if not case.are_floats:
        return
    if a.dtype != b.dtype:
        to = coarser(a.dtype, b.dtype)
        other, one = ("A", "B") if to == b.dtype else ("B", "A")
        yield Hypothesis(_rounding_cause(one, other, to), (case.alike,))
        # Neither bfloat16 nor float16 represents all numbers of the other.
        for one, array, other, source in case.sides:
            if array.dtype != to:
                result = as_dtype(source, array.dtype)
                yield Hypothesis(_rounding_cause(one, other, array.dtype), ((result, array),))
        return
    for via in (DTYPES[name] for name in _INTERMEDIATE_DTYPES):
        if via.bits <= a.dtype.bits and via != a.dtype:
            for one, array, other, source in case.sides:
                cast = as_dtype(as_dtype(source, via), array.dtype)
                yield Hypothesis(_rounding_cause(one, other, via), ((cast, array),))


def _rounding_cause(one: str, other: str, to: DType) -> Cause:
    text = f"{one} is {other} rounded to {to}"
    return Cause("cast", text, f"this is fine if {one} was meant to be cast; otherwise convert it again")


@detector("byte-order", Claim.OTHER_ENCODING)
def byte_order(case: Case) -> Iterator[Hypothesis]:
    """Detect that the bytes of every element are in reverse order."""
    if case.a.dtype == case.b.dtype and case.a.dtype.kind != "complex" and case.a.dtype.itemsize > 1:
        cause = Cause("byte-order", "bytes are swapped: one side is big-endian", "write it little-endian")
        yield Hypothesis(cause, ((elementwise(case.a, _SwapBytes()), case.b),))


@dataclass(frozen=True, slots=True)
class _SwapBytes:
    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        target[...] = source.byteswap()
