"""Causes that multiply all elements by one number, or increase them by 1."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, sqrt

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import elementwise
from ckpttools.compare.causes.base import MIN_EVIDENCE, Case, Cause, Claim, Hypothesis, detector
from ckpttools.compare.samples import as_dtype, read_sample_values
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.mapping.values import Add, blockwise, round_constant


@detector("norm-offset", Claim.KNOWN_NUMBER)
def norm_offset(case: Case) -> Iterator[Hypothesis]:
    """Detect that the scale of a norm is stored minus one on one side."""
    if not case.are_floats or _one_is_nothing(*case.alike):
        return
    for offset, text in ((1.0, "+ 1"), (-1.0, "- 1")):
        for one, array, other, source in case.sides:
            result = as_dtype(elementwise(source, Add(offset)), array.dtype)
            less, larger = (other, one) if offset > 0 else (one, other)
            advice = (
                f"{less} stores the difference from 1 (as Gemma does), {larger} the sum (as MaxText does): "
                "convert with the family's own rows"
            )
            cause = Cause("norm-offset", f"{one} is {other} {text}", advice)
            yield Hypothesis(cause, ((result, array),), ulps=1)


def _one_is_nothing(a: LazyArray, b: LazyArray) -> bool:
    """Return whether adding 1 is lost to rounding, because the values are very large or equal."""
    x, y = read_sample_values(a), read_sample_values(b)
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.any(np.abs(x - y) > 4 * a.dtype.epsilon * np.maximum(np.abs(x), np.abs(y)))


@detector("factor", Claim.FITTED_NUMBER)
def factor(case: Case) -> Iterator[Hypothesis]:
    """Detect that all elements are multiplied by one number."""
    if not case.are_floats:
        return
    a, b = case.alike
    x, y = read_sample_values(a), read_sample_values(b)
    good = np.isfinite(x) & np.isfinite(y) & (x != 0)
    if np.count_nonzero(good & (y != 0)) < MIN_EVIDENCE:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = _ratio(x[good], y[good], a.dtype)
    # Rounding alone can result in a factor of nearly one.
    if np.isfinite(ratio) and ratio != 0 and abs(ratio - 1) >= 2 * a.dtype.epsilon:
        result = as_dtype(elementwise(a, _ByFactor(ratio)), b.dtype)
        yield Hypothesis(_factor_cause(case, ratio), ((result, b),), ulps=2)


def _ratio(x: np.ndarray, y: np.ndarray, dtype: DType) -> float:
    """Return the factor from x to y that fits best. Coarse values determine it only together."""
    if dtype.bits == 64:
        return float(np.median(y / x))
    return float(np.dot(x, y) / np.dot(x, x))


@dataclass(frozen=True, slots=True)
class _ByFactor:
    """Computes x * factor in float64, rounded to x's dtype."""

    factor: float

    def result(self, dtype: DType) -> DType:
        return dtype

    def apply(self, source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
        def scaled(block: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                return round_constant(block.astype(np.float64) * self.factor, dtype)

        blockwise(source, target, dtype, dtype, scaled)


def _factor_cause(case: Case, ratio: float) -> Cause:
    tolerance = max(1e-4, case.alike[0].dtype.epsilon)
    lengths = {n: f"axis {k}" for k, n in reversed(list(enumerate(case.a.shape)))}
    lengths |= {n: axis for axis, n in case.sizes.items()}
    for length, name in lengths.items():
        # An axis that the model does not use has length 0.
        for value, text in _roots(length) if length > 1 else ():
            if isclose(abs(ratio), value, rel_tol=tolerance):
                return _root_cause(case.name.lower(), "-" * (ratio < 0) + text, name)
    return Cause("factor", f"B is A times {ratio:.6g}")


def _roots(length: int) -> tuple[tuple[float, str], ...]:
    return (sqrt(length), f"sqrt({length})"), (1 / sqrt(length), f"1/sqrt({length})")


def _root_cause(name: str, text: str, subject: str) -> Cause:
    if "query" in name or "q_proj" in name:
        advice = (
            "one side has 1/sqrt(head_dim) in the query's weights, as MaxText expects for some "
            "families, and the other does not, or has it twice: convert with the family's own rows"
        )
        return Cause("query-scale", f"B is A times {text}, the scale of the query", advice)
    if "embed" in name:
        advice = "one side has sqrt(hidden size) in the embedding, as MaxText's Gemma models expect"
        return Cause("embedding-scale", f"B is A times {text}, the scale of the embedding", advice)
    return Cause("factor", f"B is A times {text}, where {subject} has that length")
