"""Norms of two arrays and of their difference, against exact arithmetic and against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import hypot, inf, isfinite, ldexp, sqrt

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttools.array.lazy import LazyArray
from ckpttools.array.scratch import Scratch
from ckpttools.compare import norms
from ckpttools.compare.diff import ArrayDiff, diff
from ckpttools.compare.measure import as_doubles
from ckpttools.compare.norms import Distance, Sums, sums
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.digest.pairing import Pairing
from ckpttools.testing.strategies import chunk_shapes, chunked, dtypes, noise, shapes, stored

SCRATCH = Scratch(norms.SCRATCH_BYTES)
PLENTY = {"memory": 512 << 20, "jobs": 2}
CLOSE = 1e-12


def compared(a: LazyArray, b: LazyArray) -> ArrayDiff:
    (result,) = diff(Pairing({"a": a}, {"a": b}), **PLENTY)
    return result


def of_values(a: Sequence[float], b: Sequence[float], dtype: str = "float64") -> Distance:
    """The distance of arrays with these values."""
    kind = DTYPES[dtype]
    sides = (np.array(item).astype(kind.numpy).view(kind.carrier) for item in (a, b))
    return Distance.of(sums(*sides, (kind, kind), SCRATCH))


def numbers(values: np.ndarray, dtype: DType) -> list[tuple[float, ...]]:
    """Elements as Python numbers, complex ones as two of them."""
    if dtype.is_whole and dtype.bits == 64:
        return [(item, 0) for item in values.view(dtype.numpy).tolist()]
    return [(item.real, item.imag) for item in as_doubles(values, dtype).tolist()]


def expected(sides: Sequence[np.ndarray], pair: Sequence[DType]) -> Distance:
    """The distance in rational numbers, rounded at the end."""
    both = zip(*(numbers(v.reshape(-1), dtype) for v, dtype in zip(sides, pair, strict=True)), strict=True)
    finite = [(x, y) for x, y in both if all(map(isfinite, (*x, *y)))]
    exact = [[Fraction(item) for row in side for item in row] for side in zip(*finite, strict=True)] or [
        [],
        [],
    ]
    a, b, product, difference = (
        sum((left * right for left, right in zip(*two, strict=True)), Fraction())
        for two in (
            (exact[0], exact[0]),
            (exact[1], exact[1]),
            exact,
            ([p - q for p, q in zip(*exact, strict=True)],) * 2,
        )
    )
    count = len(finite)
    return Distance(
        count,
        root(a),
        root(b),
        root(difference),
        root(difference / a) if a else inf if difference else 0.0,
        root(difference / count) if count else 0.0,
        root(product**2 / (a * b)) * (-1 if product < 0 else 1) if a * b else None,
    )


def root(value: Fraction) -> float:
    """The square root, of numbers beyond float64, too."""
    if not value:
        return 0.0
    half = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    near_one = sqrt(value / Fraction(4) ** half if half >= 0 else value * Fraction(4) ** -half)
    try:
        return ldexp(near_one, half)
    except OverflowError:
        return inf


def assert_close(got: Distance, want: Distance) -> None:
    assert got.elements == want.elements
    for name in ("norm_a", "norm_b", "norm_difference", "rel_l2", "rms"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=CLOSE, abs=1e-320), name
    assert got.cosine == (None if want.cosine is None else pytest.approx(want.cosine, abs=CLOSE))


@given(data=st.data(), shape=shapes(limit=300), pair=st.tuples(dtypes(packed=True), dtypes(packed=True)))
def test_distance_matches_exact_arithmetic_for_any_bits(data: st.DataObject, shape, pair):
    """NaN, infinities, subnormal numbers, and every pair of dtypes."""
    pair = data.draw(st.sampled_from([pair, (pair[0], pair[0])]))
    seeds = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    sides = [noise(shape, dtype, seed) for dtype, seed in zip(pair, seeds, strict=True)]
    if pair[0] == pair[1]:
        keep = np.random.default_rng(seeds[0]).random(shape) < data.draw(st.sampled_from([0.0, 0.7, 0.99]))
        sides[1] = np.where(keep, sides[0], sides[1])
    arrays = [
        item if dtype.packed or not shape else chunked(values, dtype, data.draw(chunk_shapes(shape)))
        for values, dtype in zip(sides, pair, strict=True)
        for item in [stored(values, dtype)]
    ]
    result = compared(*arrays)
    if pair[0] == pair[1] and sides[0].tobytes() == sides[1].tobytes():
        assert result.distance is None
    else:
        assert result.distance is not None
        assert_close(result.distance, expected(sides, pair))


ORDINARY = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@given(
    size=st.sampled_from([1, 7, 1024, 5000, norms._PART + 3]),
    name=st.sampled_from(ORDINARY),
    other=st.sampled_from(ORDINARY),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    change=st.sampled_from([0.0, 1e-6, 1e-2, 10.0]),
)
def test_distance_matches_numpy(size: int, name: str, other: str, seed: int, scale: float, change: float):
    random = np.random.default_rng(seed)
    values = random.standard_normal(size) * scale
    pair = DTYPES[name], DTYPES[other]
    sides = [
        item.astype(np.float32).astype(dtype.numpy)
        for item, dtype in zip((values, values + change * random.standard_normal(size)), pair, strict=True)
    ]
    x, y = (side.astype(np.float64) for side in sides)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    got = Distance.of(sums(*(s.view(d.carrier) for s, d in zip(sides, pair, strict=True)), pair, SCRATCH))
    assert got.elements == x.size
    assert got.norm_a == pytest.approx(np.linalg.norm(x), rel=CLOSE)
    assert got.norm_b == pytest.approx(np.linalg.norm(y), rel=CLOSE)
    assert got.norm_difference == pytest.approx(np.linalg.norm(x - y), rel=CLOSE)
    if x.any() and y.any():
        assert got.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=CLOSE)
        assert got.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-9)
        assert got.rms == pytest.approx(np.sqrt(np.mean((x - y) ** 2)), rel=CLOSE)


@given(
    cuts=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    dtype=dtypes(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_order_of_parts_does_not_matter(cuts: list[int], dtype: DType, seed: int, data: st.DataObject):
    sides = [noise((sum(cuts),), dtype, seed + k) for k in range(2)]
    ends = np.cumsum([0, *cuts])
    parts = [
        sums(*(side[start:end].copy() for side in sides), (dtype, dtype), SCRATCH)
        for start, end in pairwise(ends)
    ]
    shuffled = data.draw(st.permutations(parts))
    totals = {Distance.of(sum(some, Sums())) for some in (parts, shuffled, parts[::-1])}
    assert len(totals) == 1
    assert_close(totals.pop(), expected(sides, (dtype, dtype)))


@given(data=st.data())
def test_chunks_and_workers_do_not_change_the_distance(data: st.DataObject):
    """Arrays of which most is equal: norms need the equal parts, too."""
    dtype, shape = DTYPES["bfloat16"], (40, 64, 33)
    values = np.random.default_rng(0).integers(0x3F00, 0x4100, shape).astype(np.uint16)
    changed = values.copy()
    start = data.draw(st.integers(0, 39))
    changed[start:, data.draw(st.integers(0, 63))] += 1
    sides = [
        chunked(item, dtype, data.draw(chunk_shapes(shape)))
        if data.draw(st.booleans())
        else stored(item, dtype)
        for item in (values, changed)
    ]
    (result,) = diff(
        Pairing({"a": sides[0]}, {"a": sides[1]}), memory=512 << 20, jobs=data.draw(st.integers(1, 3))
    )
    assert result.distance is not None
    wide = [as_doubles(item, dtype) for item in (values, changed)]
    assert result.distance.norm_a == pytest.approx(np.linalg.norm(wide[0]), rel=CLOSE)
    assert result.distance.norm_b == pytest.approx(np.linalg.norm(wide[1]), rel=CLOSE)
    assert result.distance.norm_difference == pytest.approx(np.linalg.norm(wide[0] - wide[1]), rel=CLOSE)


def test_equal_pieces_before_the_first_difference_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ckpttools.plan.pieces.PIECE_BYTES", 4096)
    dtype = DTYPES["float32"]
    values = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    for row in (0, 31, 63):
        changed = values.copy()
        changed[row, 5] += 1
        result = compared(*(stored(item.view(np.uint32), dtype) for item in (values, changed)))
        assert result.distance is not None
        assert result.distance.elements == values.size
        assert result.distance.norm_a == pytest.approx(np.linalg.norm(values.astype(float)), rel=CLOSE)
        assert result.distance.norm_difference == pytest.approx(1, rel=1e-6)


@example(1e300, 1e308)
@example(5e-324, 1e-320)
@example(1e-200, 1e200)
@example(1e154, 1.1e154)
@given(st.floats(5e-324, 1.7e308), st.floats(5e-324, 1.7e308))
def test_squares_beyond_float64_are_summed(a: float, b: float):
    for left, right in (([a, 0.0], [0.0, b]), ([a], [b]), ([a], [-b]), ([a] * 3, [a, b, a])):
        sides = [np.array(item).view(np.uint64) for item in (left, right)]
        dtype = DTYPES["float64"]
        assert_close(of_values(left, right), expected(sides, (dtype, dtype)))


def test_distance_of_zero_arrays_is_defined():
    zero, one = [0.0, 0.0], [3.0, 4.0]
    assert_close(of_values(zero, zero), Distance(2, 0, 0, 0, 0, 0, None))
    assert_close(of_values(zero, one), Distance(2, 0, 5, 5, inf, 5 / sqrt(2), None))
    assert_close(of_values(one, zero), Distance(2, 5, 0, 5, 1, 5 / sqrt(2), None))
    assert_close(of_values([], []), Distance(0, 0, 0, 0, 0, 0, None))
    assert_close(of_values(one, one), Distance(2, 5, 5, 0, 0, 0, 1))
    assert of_values(one, [-3.0, -4.0]).cosine == -1
    assert of_values([1.0, 0.0], [0.0, 1.0]).cosine == 0


def test_elements_that_are_not_finite_do_not_count():
    result = of_values([3, np.nan, 4, np.inf, -np.inf, 1], [3, 1, 0, np.inf, 2, np.nan], "bfloat16")
    assert_close(result, Distance(2, 5, 3, 4, 0.8, 4 / sqrt(2), 0.6))


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e9, 1e15])
def test_cosine_of_norms_of_different_sizes_is_exact(ratio: float):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((2, 4000))
    got = of_values(x * ratio, x + y / 10)
    want = x @ (x + y / 10) / np.linalg.norm(x) / np.linalg.norm(x + y / 10)
    assert got.cosine == pytest.approx(want, abs=1e-13)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 99))
def test_joined_distance_is_that_of_one_long_array(sizes: list[int], seed: int):
    random = np.random.default_rng(seed)
    sides = [[random.standard_normal(size) for size in sizes] for _ in range(2)]
    joined = Distance.joined([of_values(a, b) for a, b in zip(*sides, strict=True)])
    whole = of_values(*map(np.concatenate, sides))
    assert_close(joined, whole)
    assert joined.norm_a == pytest.approx(hypot(*map(np.linalg.norm, sides[0])))


def test_joined_distance_accepts_zero_arrays():
    zero, one = of_values([0.0], [0.0]), of_values([3.0], [4.0])
    assert_close(Distance.joined([zero, one]), Distance(2, 3, 4, 1, 1 / 3, 1 / sqrt(2), 1))
    assert_close(Distance.joined([zero, zero]), Distance(2, 0, 0, 0, 0, 0, None))
    assert_close(Distance.joined([of_values([0.0], [1.0])]), Distance(1, 0, 1, 1, inf, 1, None))


def test_joined_distance_of_norms_beyond_float64_is_bounded():
    large, small = of_values([1e308] * 4, [-1e308] * 4), of_values([1.0], [1.5])
    assert Distance.joined([large, small]).rel_l2 == 2
