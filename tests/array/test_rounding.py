"""Rounding by whole numbers, against ml_dtypes."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import DTYPES
from ckpttools.array.rounding import as_float32, round_to

BFLOAT16 = DTYPES["bfloat16"]
# Bits around which rounding changes: ties, both zeros, the edges of exponents, infinity and NaN.
_EDGES = [high | low for high in (0, 0x3F800000, 0x7F7F0000, 0x7F800000) for low in (0, 1, 0x7FFF, 0x8000)]
_bits = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([sign | odd | edge for edge in _EDGES for sign in (0, 1 << 31) for odd in (0, 0x10000)]),
)
_arrays = hnp.arrays(np.uint32, st.integers(0, 40), elements=_bits)


@given(_arrays, st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn"]))
def test_rounding_matches_ml_dtypes(bits: np.ndarray, name: str) -> None:
    dtype, numbers = DTYPES[name], bits.view(np.float32)
    built = np.empty(bits.shape, dtype.carrier)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        round_to(dtype, numbers, built)
        expected = numbers.astype(dtype.numpy).view(dtype.carrier)
    assert np.array_equal(built, expected)


@pytest.mark.parametrize("spare", [False, True])
def test_every_tie_and_exponent_is_rounded(spare: bool) -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = (high[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    numbers = bits.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    built = np.empty(numbers.size, np.uint16)
    round_to(BFLOAT16, numbers, built, np.empty(numbers.size, np.uint32) if spare else None)
    assert np.array_equal(built, numbers.astype(BFLOAT16.numpy).view(np.uint16))


def test_every_bfloat16_keeps_its_bits_in_float32() -> None:
    carriers = np.arange(1 << 16, dtype=np.uint16)
    wide = as_float32(carriers.view(BFLOAT16.numpy))
    assert np.array_equal(wide.view(np.uint32), carriers.astype(np.uint32) << 16)
    assert as_float32(wide) is wide
