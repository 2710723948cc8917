from functools import cache
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.internals import Scratch

from ckpttools.array import copy as copying
from ckpttools.array.copy import copy, scratch_bytes
from ckpttools.testing.strategies import shapes

CARRIERS = [np.dtype(code) for code in ("u1", "<u2", "<u4", "<u8", "<c16")]
TILES = (64, 256, 4096, 256 * 1024)


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def random_bits(shape, dtype, seed):
    raw = np.random.default_rng(seed).integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


STEPS = st.sampled_from((1, 1, 1, 2))
RARELY = st.sampled_from((False, False, False, True))
SHAPES = shapes(limit=3000) | st.lists(st.integers(1, 40), max_size=3).map(tuple)
orders = cache(st.permutations)


def a_view(draw, shape, dtype, source):
    """A view of `shape` into a larger array, its axes in any memory order; a source may also be reversed
    or broadcast."""
    order = draw(orders(range(len(shape))))
    extra = [draw(st.integers(0, 2)) for _ in shape]
    steps = [draw(STEPS) for _ in shape]
    flips = [source and draw(RARELY) for _ in shape]
    spread = [source and draw(RARELY) for _ in shape]
    sides = [1 if spread[k] else shape[k] * steps[k] + extra[k] for k in order]
    base = random_bits(sides, dtype, draw(st.integers(0, 9)))
    view = base.transpose(np.argsort(order)) if shape else base
    for k, length in enumerate(shape):
        if not spread[k]:
            cut = slice(0, length * steps[k], steps[k])
            view = view[(slice(None),) * k + (cut,)]
            view = np.flip(view, k) if flips[k] else view
    return base, np.broadcast_to(view, shape) if source else view


def check(target_base, target, source, tile):
    before = target_base.copy()
    expected_base = before.copy()
    offset = target.__array_interface__["data"][0] - target_base.__array_interface__["data"][0]
    same = np.ndarray(target.shape, target.dtype, expected_base, offset, target.strides)
    same[...] = source
    source_before = bits(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_TILE_BYTES", tile)
        patch.setattr(copying, "_FAR_BYTES", tile)
        copy(target, source, Scratch(scratch_bytes()))
    assert bits(target_base) == bits(expected_base)
    assert bits(source) == source_before


@settings(max_examples=200)
@given(st.data())
def test_copy_is_assignment(data):
    shape = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from(CARRIERS))
    base, target = a_view(data.draw, shape, dtype, source=False)
    _, source = a_view(data.draw, shape, dtype, source=True)
    check(base, target, source, data.draw(st.sampled_from(TILES)))


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 50), min_size=2, max_size=4).filter(lambda s: prod(s) < 60_000),
    data=st.data(),
)
def test_copy_transposes_between_complete_arrays(shape, data):
    dtype = data.draw(st.sampled_from(CARRIERS))
    order = data.draw(orders(range(len(shape))))
    source = random_bits([shape[k] for k in order], dtype, 0).transpose(np.argsort(order))
    target = np.zeros(shape, dtype)
    check(target, target, source, data.draw(st.sampled_from(TILES)))


@settings(max_examples=8)
@given(st.integers(300, 700), st.integers(300, 700), st.sampled_from(CARRIERS))
@example(512, 512, np.dtype("<u2"))
@example(363, 725, np.dtype("<u2"))
def test_copy_handles_sizes_across_tile_borders(rows, columns, dtype):
    source = random_bits((rows, columns), dtype, 0).T
    target = np.zeros((columns, rows), dtype)
    check(target, target, source, 256 * 1024)


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_copy_writes_to_unaligned_targets(dtype, odd):
    base = np.zeros(37 * 53 + odd, dtype)
    target = base[odd:].reshape(37, 53)
    check(base, target, random_bits((53, 37), dtype, 1).T, 1024)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0,), (3, 0), (0, 3), (3, 0, 5)])
@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
def test_copy_handles_arrays_of_one_or_no_element(shape, dtype):
    target = np.zeros(shape, dtype)
    check(target, target, random_bits(shape[::-1], dtype, 0).T, 4096)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_copy_interleaves_rotary_pairs(heads):
    source = random_bits((heads, 2, 64, 300), CARRIERS[1], 0)
    target = np.zeros((300, heads, 64, 2), CARRIERS[1])
    check(target, target, source.transpose(3, 0, 2, 1), 256 * 1024)


def test_copy_keeps_every_bit_pattern():
    nans = np.array([0x7FF0000000000001, 0xFFF8DEADBEEF0000], "<u8").view("<c16")
    source = np.repeat(nans, 12).reshape(3, 4)
    target = np.zeros((4, 3), "<c16")
    check(target, target, source.T, 4096)


@pytest.mark.parametrize(
    ("code", "shape", "order"), [("u1", (725, 3, 723), (2, 1, 0)), ("<u8", (3, 282, 255), (2, 1, 0))]
)
def test_scratch_fits_three_full_tiles(code, shape, order):
    """Gathered, interleaved, and turned for rows that are not aligned: three tiles at once."""
    dtype = np.dtype(code)
    source = random_bits([shape[k] for k in order], dtype, 1).transpose(np.argsort(order))
    base = random_bits((*shape[:-1], shape[-1] + 2), dtype, 2)
    check(base, base[..., : shape[-1]], source, copying._TILE_BYTES)
