"""Products of factors and sums: every region is the one that numpy computes, however it is cut."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Constant, Multiply, Scratch, elementwise, relayout, stack
from support.trees import lazy

from ckpttools import DTYPES, Region, ShapeError
from ckpttools.array.lowrank import add_arrays, dora_update, low_rank
from ckpttools.array.nodes import swap_last_axes
from ckpttools.testing.strategies import regions

SIDES = st.integers(1, 40)
DTYPE = st.sampled_from(("bfloat16", "float16", "float32"))


def read(array, region):
    """A region, with scratch for exactly what the array says that it needs."""
    out = np.empty(region.shape, array.dtype.carrier)
    array.read_into(region, out, Scratch(array.scratch_bytes))
    return out.view(array.dtype.numpy)


def whole_numbers(draw, shape, dtype):
    """Numbers whose products and sums are exact in any order."""
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return random.integers(-8, 9, shape).astype(DTYPES[dtype].numpy)


def stored(draw, matrices):
    """Matrices that are stored as they are, or with rows and columns exchanged."""
    if draw(st.booleans()):
        return lazy(matrices)
    return swap_last_axes(lazy(np.ascontiguousarray(matrices.swapaxes(-1, -2))))


@settings(max_examples=60)
@given(st.data())
def test_product_regions_match_numpy(data):
    outer = data.draw(st.sampled_from(((), (3,), (2, 2))))
    rows, rank, columns = data.draw(SIDES), data.draw(st.integers(0, 70)), data.draw(SIDES)
    left = whole_numbers(data.draw, (*outer, rows, rank), data.draw(DTYPE))
    right = whole_numbers(data.draw, (*outer, rank, columns), data.draw(DTYPE))
    array = low_rank(stored(data.draw, left), stored(data.draw, right), 0.5)
    expected = 0.5 * (left.astype(np.float64) @ right.astype(np.float64))
    region = data.draw(regions(array.shape))
    assert np.array_equal(read(array, region), expected.astype(np.float32)[region.slices])


@pytest.mark.parametrize("scale", [1 / 3, -16 / 7, 2.0, 0.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_halfway_between_two_values_round_correctly(dtype, scale):
    """Those of half the width are exact, in any order: a scale that rounds comes behind them."""
    random = np.random.default_rng(3)
    left, right = (random.normal(0, 0.3, item).astype(DTYPES[dtype].numpy) for item in ((151, 7), (7, 163)))
    sums = left.astype(np.float64) @ right.astype(np.float64)
    product, region = low_rank(lazy(left), lazy(right), scale), Region((3, 5), (150, 160))
    assert np.array_equal(read(product, region), (scale * sums).astype(np.float32)[region.slices])
    other = swap_last_axes(low_rank(swap_last_axes(lazy(right)), swap_last_axes(lazy(left)), scale))
    assert np.array_equal(read(other, region), (scale * sums).astype(np.float32)[region.slices])


def test_large_products_computed_in_parts_have_the_same_bits():
    random = np.random.default_rng(0)
    left = random.standard_normal((3000, 33)).astype(np.float32)
    right = random.standard_normal((33, 9000)).astype(np.float32)
    array = low_rank(lazy(left), lazy(right), 1 / 3)
    # A scratch in proportion to read blocks, not to the array.
    assert array.scratch_bytes < 9 << 20 < array.nbytes // 8
    expected = (left.astype(np.float64) / 3 @ right).astype(np.float32)
    whole = read(array, Region.whole(array.shape))
    assert np.max(np.abs(whole - expected)) <= np.spacing(np.float32(np.max(np.abs(expected))))
    for region in (Region((0, 0), (3000, 1)), Region((17, 5), (18, 8000)), Region((1, 31), (99, 77))):
        assert np.array_equal(read(array, region), whole[region.slices])


@settings(max_examples=60)
@given(st.data())
def test_sum_is_rounded_once(data):
    dtype = data.draw(st.sampled_from(("bfloat16", "float16", "float32", "float64")))
    shape = data.draw(st.sampled_from(((7,), (5, 9), (2, 3, 4))))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    array = random.standard_normal(shape).astype(DTYPES[dtype].numpy)
    addend = random.standard_normal(shape).astype(np.float32)
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (array.astype(wide) + addend).astype(DTYPES[dtype].numpy)
    region = data.draw(regions(shape))
    summed = add_arrays(lazy(array), lazy(addend))
    assert np.array_equal(read(summed, region), expected[region.slices])
    # Also into memory of another order.
    out = np.empty(region.shape[::-1], summed.dtype.carrier).T
    summed.read_into(region, out, Scratch(summed.scratch_bytes))
    assert np.array_equal(out.view(array.dtype), expected[region.slices])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
def test_scratch_fits_addends_of_any_dtype(dtype):
    addend = np.ones((700, 3000), DTYPES[dtype].numpy)
    for array in (np.ones((3000, 700), item) for item in (DTYPES["bfloat16"].numpy, np.float64)):
        assert (
            read(add_arrays(lazy(array), swap_last_axes(lazy(addend))), Region.whole(array.shape)) == 2
        ).all()


def test_adding_negative_zero_changes_no_bit():
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bfloat16"].numpy)
    array = every[~np.isnan(every.astype(np.float32))]
    nothing = Constant(array.shape, DTYPES["float32"], b"\0\0\0\x80")
    built = add_arrays(lazy(array), nothing).read()
    assert np.array_equal(built.view(np.uint16), array.view(np.uint16))


@settings(max_examples=40)
@given(st.data())
def test_rows_get_the_requested_norms(data):
    rows, columns = data.draw(SIDES), data.draw(SIDES)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    matrix, addend = random.standard_normal((2, rows, columns)).astype(np.float32)
    lengths = random.uniform(0.5, 2, rows).astype(np.float32)
    array = dora_update(lazy(matrix), lazy(addend), lazy(lengths))
    total = (matrix + addend).astype(np.float64)
    expected = total * (lengths / np.sqrt((total**2).sum(1)))[:, None] - matrix
    region = data.draw(regions(array.shape))
    assert np.allclose(read(array, region), expected[region.slices], atol=1e-5)
    # Read through a transpose, too, as bases that are MaxText's do.
    across = relayout(array, ((rows,), (columns,)), (1, 0), (1, 1))
    assert np.array_equal(across.read().T, array.read())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_infinite_sums_are_counted(dtype):
    """What was no number before is not."""
    numpy = DTYPES[dtype].numpy
    array = np.array([[np.inf, np.nan, ml_dtypes.finfo(numpy).max, 1]] * 3, np.float64).astype(numpy)
    summed = add_arrays(
        lazy(array), low_rank(lazy(np.full((3, 1), 2e19, "f4")), lazy(np.full((1, 4), 1e19, "f4")))
    )
    scratch, out = Scratch(summed.scratch_bytes), np.empty(array.shape, summed.dtype.carrier)
    summed.read_into(Region.whole(array.shape), out, scratch)
    assert scratch.counts == {"overflowed": 6 if dtype == "float16" else 3}
    assert out.view(numpy).astype("f4")[0, 2] == np.inf


def test_mismatched_factors_are_refused():
    matrix, other = lazy(np.zeros((3, 2), np.float32)), lazy(np.zeros((3, 4), np.float32))
    with pytest.raises(ShapeError, match="not the factors of one product"):
        low_rank(matrix, other)
    with pytest.raises(ShapeError, match="cannot be added"):
        add_arrays(matrix, other)
    with pytest.raises(ShapeError, match="one norm per row are needed"):
        dora_update(matrix, matrix, lazy(np.zeros(2, np.float32)))
    with pytest.raises(ShapeError, match="not the factors"):
        low_rank(matrix, lazy(np.zeros((2, 3), np.int32)))


@settings(max_examples=80)
@given(st.data())
def test_permuted_product_uses_permuted_factors(data):
    """Transposed, split, rotary pairs exchanged, scaled: what is made is what numpy makes of the whole."""
    heads, half, pair, inner, rank = (data.draw(st.integers(1, 4)) for _ in range(5))
    left = whole_numbers(data.draw, (heads * half * pair, rank), "float32")
    right = whole_numbers(data.draw, (rank, inner * 2), "float32")
    array, truth = low_rank(lazy(left), lazy(right)), (left @ right).astype(np.float32)
    if data.draw(st.booleans()):
        array, truth = elementwise(array, Multiply(0.5)), truth / 2
    order = data.draw(st.permutations(range(5)))
    atoms = (heads, half, pair, inner, 2)
    merge = data.draw(st.sampled_from(((1, 1, 1, 1, 1), (2, 3), (3, 2), (5,), (1, 3, 1))))
    built = relayout(array, (atoms[:3], atoms[3:]), order, merge)
    moved = truth.reshape(atoms).transpose(order)
    expected = moved.reshape(built.shape)
    region = data.draw(regions(built.shape))
    assert np.array_equal(read(built, region), expected[region.slices])


def test_sums_of_stacked_products_are_computed_by_layer():
    random = np.random.default_rng(0)
    layers = [random.standard_normal((2, 600, 3)).astype(np.float32) for _ in range(5)]
    products = [low_rank(lazy(a), lazy(b.T.copy())) for a, b in layers]
    base = random.standard_normal((600, 5, 600)).astype(np.float32)
    expected = base + np.stack([product.read() for product in products], 1)
    assert np.array_equal(
        read(add_arrays(lazy(base), stack(products, 1)), Region.whole(base.shape)), expected
    )
