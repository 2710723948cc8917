"""Arrays of MaxText's that multiply others, and that Hugging Face's models have in the products alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Size, Table, row
from support.trees import lazy

from ckpttools import DTYPES, MappingError, Region
from ckpttools.mapping.factor import times
from ckpttools.mapping.row_conversion import with_parts

SIZES = {axis: Size(length, "test") for axis, length in {"n": 3, "m": 4, "k": 2}.items()}
DTYPE = st.sampled_from(("bfloat16", "float32", "float64"))


def table(*texts):
    return Table(with_parts(map(row, texts)), SIZES)


def numbers(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype].numpy)


@st.composite
def products(draw):
    """An array, a factor that has length 1 on some of its axes, and a region of both."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    lengths = tuple(draw(st.sampled_from((1, n))) for n in shape)
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    return numbers(shape, draw(DTYPE), 0), numbers(lengths, draw(DTYPE), 1), Region(start, stop)


@settings(max_examples=40)
@given(products())
def test_factor_rounds_each_region_once(drawn):
    array, factor, region = drawn
    wide = np.float64 if array.dtype.itemsize == 8 else np.float32
    expected = (array.astype(wide) * factor.astype(wide)).astype(array.dtype)[region.slices]
    np.testing.assert_array_equal(times(lazy(array), lazy(factor)).read(region), expected)


@pytest.mark.parametrize("axes", ["n", "k", "n k"])
def test_factor_has_no_reverse_conversion(axes):
    """The array behind it has two parts, and merged axes."""
    both = table(
        "w: n k m <-> fn: +(m k) n",
        "v: n k   <-> fn: +k n",
        f"s: {axes} <-> fn.norm: {axes}, factor",
    )
    fn = numbers((10, 3), "float32", 0)
    there = both.to_left({"fn": lazy(fn)})
    assert set(there.arrays["s"].read().flat) == {1}
    np.testing.assert_array_equal(both.to_right(there.arrays).arrays["fn"].read(), fn)

    factor = numbers([SIZES[axis].length for axis in axes.split()], "float32", 1)
    built = both.to_right({**there.arrays, "s": lazy(factor)})
    on_all = np.broadcast_to(factor[:, None] if axes == "n" else factor, (3, 2))
    expected = fn * np.concatenate([np.tile(on_all, (1, 4)), on_all], axis=1).T
    np.testing.assert_array_equal(built.arrays["fn"].read(), expected)
    (note,) = built.values
    assert (note.key, note.exact) == ("fn", False)
    assert not built.filled


def test_mismatched_factor_axes_are_refused():
    arrays = {"w": lazy(numbers((3, 4), "float32", 0)), "s": lazy(numbers((2,), "float32", 1))}
    with pytest.raises(MappingError, match="has axes that"):
        table("w: n m <-> fn: m n", "s: k <-> fn.norm: k, factor").to_right(arrays)
    with pytest.raises(MappingError, match="no row produces"):
        table("w: n m <-> fn: m n", "s: k <-> gn.norm: k, factor").to_right(arrays)
