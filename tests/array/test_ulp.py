"""Deviations through float32 are those through float64, also where something is decided by a hair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Scratch, Tolerances

from ckpttools import DTYPES, DType
from ckpttools.compare import measure
from ckpttools.compare.measure import (
    EXACT,
    IN_FLOAT32,
    SCRATCH_BYTES,
    Deviation,
    _measure_part,
    as_doubles,
    block_elements,
    coarser,
    deviation,
    deviation_in_float32,
    steps_between,
    steps_into,
)

DTYPE = st.sampled_from([DTYPES[name] for name in IN_FLOAT32])


def finite(dtype: DType, seed: int, size: int) -> np.ndarray:
    """Carriers of finite numbers of all magnitudes, zeros among them."""
    random = np.random.default_rng(seed)
    carriers = random.integers(0, 1 << dtype.bits, size, dtype=np.uint64).astype(dtype.carrier)
    if seed % 3 == 0:
        # Weights: of like magnitudes.
        carriers = random.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
        carriers = (
            (carriers >> (32 - dtype.bits)).astype(dtype.carrier)
            if dtype.name != "float16"
            else (random.normal(0, 0.02, size).astype(np.float16).view(np.uint16))
        )
    values = as_doubles(carriers, dtype)
    # Not too large either: differences of the largest numbers are infinite in float32.
    return np.where(np.isfinite(values) & (np.abs(values) < 2.0**126), carriers, 0)


def pair(dtype: DType, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two of them, in part equal, in part only a few steps apart."""
    random = np.random.default_rng(seed + 1)
    a, b = finite(dtype, seed, size), finite(dtype, seed + 3, size)
    near = a ^ random.integers(0, 8, size).astype(dtype.carrier)
    b = np.where(random.random(size) < 0.3, a, np.where(random.random(size) < 0.5, near, b))
    values = as_doubles(b, dtype)
    return a, np.where(np.isfinite(values) & (np.abs(values) < 2.0**126), b, a)


def through_float32(a: np.ndarray, b: np.ndarray, dtype: DType, tolerances: Tolerances) -> Deviation:
    result = deviation_in_float32((a, b), (dtype, dtype), tolerances, Scratch(32 * a.size + (1 << 16)))
    assert result is not None
    return result


@given(dtype=DTYPE, seed=st.integers(0, 999), size=st.integers(1, 400))
def test_exact_comparison_counts_every_difference(dtype: DType, seed: int, size: int):
    a, b = pair(dtype, seed, size)
    assert through_float32(a, b, dtype, EXACT) == _measure_part(a, b, (dtype, dtype), EXACT)


@given(
    dtype=DTYPE,
    seed=st.integers(0, 999),
    where=st.integers(0, 299),
    atol=st.sampled_from(["", "exact", "below", "above"]),
    rtol=st.sampled_from(["", "exact", "below", "above"]),
    ulp=st.sampled_from([0, 0, 1, 5, 1 << 40]),
)
def test_tolerance_boundaries_are_exact(dtype: DType, seed: int, where: int, atol: str, rtol: str, ulp: int):
    """Tolerances that are just what two of the elements are apart."""
    a, b = pair(dtype, seed, 300)
    x, y = (as_doubles(item[where : where + 1], dtype)[0] for item in (a, b))
    gap = abs(x - y)
    hair = {"": 0.0, "exact": 1.0, "below": 1 - 2.0**-40, "above": 1 + 2.0**-40}
    tolerances = Tolerances(gap * hair[atol], gap / max(abs(x), abs(y)) * hair[rtol] if gap else 0.0, ulp)
    assert through_float32(a, b, dtype, tolerances) == _measure_part(a, b, (dtype, dtype), tolerances)


@given(dtypes=st.tuples(DTYPE, DTYPE), seed=st.integers(0, 999), rtol=st.sampled_from([0.0, 2.0**-9, 0.1]))
def test_different_dtypes_are_compared(dtypes: tuple[DType, DType], seed: int, rtol: float):
    """The same numbers rounded to another dtype, and others."""
    a = finite(dtypes[0], seed, 300)
    with np.errstate(over="ignore"):
        same = as_doubles(a, dtypes[0]).astype(np.float32).astype(dtypes[1].numpy).view(dtypes[1].carrier)
    same = np.where(np.isfinite(as_doubles(same, dtypes[1])), same, 0)
    mixed = np.where(np.random.default_rng(seed).random(300) < 0.7, same, finite(dtypes[1], seed, 300))
    room = coarser(*dtypes).beyond_range
    fits = [np.abs(as_doubles(item, own)) < room for item, own in zip((a, mixed), dtypes, strict=True)]
    a, mixed = (np.where(np.logical_and(*fits), item, 0) for item in (a, mixed))
    for tolerances in (EXACT, Tolerances(rtol=rtol, ulp=1)):
        scratch = Scratch(32 * a.size + (1 << 16))
        result = deviation_in_float32((a, mixed), dtypes, tolerances, scratch)
        assert result == _measure_part(a, mixed, dtypes, tolerances)


@given(dtype=DTYPE, seed=st.integers(0, 999))
@pytest.mark.parametrize("tolerance", [1e-50, 1e-42, 1e-38, 1e39, 1e300])
def test_tolerances_beyond_float32_are_used(tolerance: float, dtype: DType, seed: int):
    a, b = pair(dtype, seed, 200)
    for tolerances in (Tolerances(atol=tolerance), Tolerances(rtol=tolerance), Tolerances(tolerance, 1e-3)):
        assert through_float32(a, b, dtype, tolerances) == _measure_part(a, b, (dtype, dtype), tolerances)


@given(dtype=DTYPE, seed=st.integers(0, 999), size=st.integers(1, 100))
def test_float32_steps_equal_float64_steps(dtype: DType, seed: int, size: int):
    a, b = pair(dtype, seed, size)
    out = np.empty(size, dtype.carrier)
    steps_into(out, a, b, dtype, Scratch(1 << 16))
    wide = steps_between(a, b, (dtype, dtype))
    assert wide is not None
    assert (out == wide).all()


@pytest.mark.parametrize(
    ("name", "number", "limit"),
    [("float16", 65520.0, 65504.0), ("bfloat16", 3.3961775292304601e38, 3.3895313892515355e38)],
)
def test_values_beyond_the_coarser_dtype_differ(name: str, number: float, limit: float):
    """A number rounded to infinity is not one step from the largest, but farther than any other."""
    dtypes = DTYPES["float32"], DTYPES[name]
    b = np.array([limit], dtypes[1].numpy).view(dtypes[1].carrier)
    for item, beyond in (
        (number, 1),
        (float(np.nextafter(np.float32(number), np.float32(0))), 0),
    ):
        a = np.array([item], np.float32).view(np.uint32)
        result = deviation_in_float32((a, b), dtypes, Tolerances(ulp=1), Scratch(1 << 16))
        assert (result is None) == bool(beyond)
        wide = _measure_part(a, b, dtypes, Tolerances(ulp=1))
        assert (wide.num_exceeding, wide.max_ulp) == (beyond, None if beyond else 0)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_non_finite_values_are_compared_in_float64(bits: int):
    a = np.array([0x3F80, bits], np.uint16)
    for other in (a, np.array([0x3F80, 0x3F80], np.uint16)):
        assert deviation_in_float32((a, other), (DTYPES["bfloat16"],) * 2, EXACT, Scratch(1 << 16)) is None


def test_differences_beyond_float32_are_compared_in_float64():
    a, b = (np.array([item], np.float32).view(np.uint32) for item in (3e38, -3e38))
    dtype = DTYPES["float32"]
    assert deviation_in_float32((a, b), (dtype, dtype), EXACT, Scratch(1 << 16)) is None
    assert deviation(a, b, (dtype, dtype)).max_abs == pytest.approx(6e38)


def test_too_many_equal_differences_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_MAX_CLOSE", 10)
    dtype = DTYPES["bfloat16"]
    a, b = (np.full(50, bits, np.uint16) for bits in (0x3F80, 0x3F81))
    assert deviation_in_float32((a, b), (dtype, dtype), EXACT, Scratch(1 << 16)) is None
    assert deviation(a, b, (dtype, dtype)).num_differing == 50


@pytest.mark.parametrize("names", list(itertools.product(IN_FLOAT32, IN_FLOAT32)))
def test_comparison_block_fits_the_scratch(names: tuple[str, str]):
    one, other = (DTYPES[name] for name in names)
    size = block_elements((one, other))
    a, b = np.full(size, 1, one.carrier), np.full(size, 2, other.carrier)
    result = deviation(a, b, (one, other), Tolerances(ulp=2), Scratch(SCRATCH_BYTES))
    assert (result.num_differing, result.elements) == (size, size)
