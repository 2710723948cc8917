from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.core.region import grid_shape
from ckpttools.formats.zarr.chunking import LARGEST, MIB, SMALLEST, chunk_shape

ITEMSIZES = st.sampled_from((1, 2, 4, 8))
SIDES = st.integers(1, 300) | st.sampled_from(
    (512, 2048, 4096, 6144, 14336, 53248, 128256, 151936, 10007, 1 << 26)
)


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(SIDES, max_size=5)))
    single = tuple(sorted(draw(st.sets(st.integers(0, max(0, len(shape) - 1)), max_size=2)))) if shape else ()
    return shape, draw(ITEMSIZES), single


@settings(max_examples=500)
@given(cases())
def test_chunk_shape_respects_size_limits_and_single_axes(case):
    shape, itemsize, single = case
    chunk = chunk_shape(shape, itemsize, single)
    nbytes = prod(chunk) * itemsize
    assert len(chunk) == len(shape)
    assert all(1 <= c <= n for c, n in zip(chunk, shape, strict=True))
    if prod(shape) * itemsize <= SMALLEST:
        assert chunk == shape
        return
    assert all(chunk[axis] == 1 for axis in single)
    assert nbytes <= LARGEST
    layer = prod(n for axis, n in enumerate(shape) if axis not in single) * itemsize
    assert nbytes >= min(layer, SMALLEST) // 2


@settings(max_examples=300)
@given(cases())
def test_padding_never_doubles_an_axis(case):
    shape, itemsize, single = case
    chunk = chunk_shape(shape, itemsize, single)
    stored = prod(n * c for n, c in zip(grid_shape(shape, chunk), chunk, strict=True))
    assert stored <= 2 ** len(shape) * max(1, prod(shape))


@given(st.integers(0, 8), st.integers(1, 64), st.sampled_from((1024, 3072, 4096)), st.sampled_from((1, 2, 4)))
def test_divisible_first_axis_is_split_evenly(power, odd, columns, itemsize):
    shape = (odd << power, columns)
    chunk = chunk_shape(shape, itemsize, ())
    nbytes = prod(shape) * itemsize
    if chunk != shape and nbytes <= LARGEST:
        assert shape[0] % chunk[0] == 0
        assert chunk[1:] == shape[1:]
        pieces = shape[0] // chunk[0]
        assert pieces & (pieces - 1) == 0


@pytest.mark.parametrize(
    ("shape", "itemsize", "single", "expected"),
    [
        ((), 8, (), ()),
        ((4096,), 2, (), (4096,)),
        ((2 * MIB,), 2, (), (2 * MIB,)),
        ((4096, 4096), 2, (), (512, 4096)),
        ((4096, 32, 14336), 2, (1,), (256, 1, 14336)),
        ((32, 4096, 4096), 2, (0,), (1, 512, 4096)),
        ((128256, 4096), 2, (), (8016, 4096)),
        ((4096, 2), 2, (1,), (4096, 2)),
    ],
)
def test_chunk_shape_returns_known_grids(shape, itemsize, single, expected):
    assert chunk_shape(shape, itemsize, single) == expected


@given(st.integers(1, 200), st.integers(1, 64))
def test_every_layer_and_expert_of_a_large_stack_has_its_own_chunks(layers, experts):
    shape = (layers, 512, experts, 300)
    chunk = chunk_shape(shape, 4, (0, 2))
    if prod(shape) * 4 > SMALLEST:
        assert (chunk[0], chunk[2]) == (1, 1)
        assert chunk == (1, 512, 1, 300)


def test_shape_at_chunk_limit_is_not_cut():
    assert chunk_shape((3, LARGEST), 1, ()) == (1, LARGEST)
    assert chunk_shape((3, LARGEST + 1), 1, ())[1] < LARGEST
