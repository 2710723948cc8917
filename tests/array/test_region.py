import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import count_runs, grid_cell, grid_indices

from ckpttools import Region
from ckpttools.core.region import contiguous_runs, grid_shape, intersecting_cells, split_evenly
from ckpttools.testing.strategies import chunk_shapes, regions, shapes


def numbered(shape):
    return np.arange(prod(shape)).reshape(shape)


@st.composite
def shaped_regions(draw, count=1, empty=False):
    shape = draw(shapes())
    return shape, *(draw(regions(shape, empty)) for _ in range(count))


@given(shaped_regions(empty=True))
def test_size_and_shape_are_those_of_the_slice(case):
    shape, region = case
    cut = numbered(shape)[region.slices]
    assert region.shape == cut.shape
    assert region.size == cut.size
    assert region.rank == cut.ndim


@given(shaped_regions(count=2))
def test_intersection_has_the_common_elements(case):
    shape, one, other = case
    array = numbered(shape)
    common = np.intersect1d(array[one.slices], array[other.slices])
    met = one.intersect(other)
    assert met == other.intersect(one)
    if met is None:
        assert common.size == 0
    else:
        assert array[met.slices].reshape(-1).tolist() == common.tolist()


@given(shaped_regions(count=2))
def test_relative_region_selects_the_same_elements(case):
    shape, outer, other = case
    inner = outer.intersect(other)
    if inner is not None:
        array = numbered(shape)
        np.testing.assert_array_equal(
            array[outer.slices][inner.relative_to(outer).slices], array[inner.slices]
        )


@given(shaped_regions(), st.data())
def test_axis_removal_and_insertion_are_inverse(case, data):
    _, region = case
    axis = data.draw(st.integers(0, region.rank))
    wider = region.inserted(axis, 2, 5)
    assert wider.shape == (*region.shape[:axis], 3, *region.shape[axis:])
    assert wider.without(axis) == region
    assert wider.replaced(axis, 7, 9).without(axis) == region


@given(shaped_regions())
def test_swapped_region_selects_the_same_elements_of_the_transpose(case):
    shape, region = case
    if region.rank > 1:
        array = numbered(shape)
        cut = array[region.slices]
        np.testing.assert_array_equal(array.swapaxes(-1, -2)[region.swapped().slices], cut.swapaxes(-1, -2))
        assert region.swapped().swapped() == region


@given(shaped_regions(), st.data())
def test_pieces_are_consecutive(case, data):
    shape, region = case
    if region.rank == 0:
        return
    axis = data.draw(st.integers(0, region.rank - 1))
    step = data.draw(st.integers(1, 9))
    pieces = list(region.pieces(axis, step))
    assert all(piece.shape[axis] <= step for piece in pieces)
    array = numbered(shape)
    joined = np.concatenate([array[piece.slices] for piece in pieces], axis)
    np.testing.assert_array_equal(joined, array[region.slices])


@given(shaped_regions(empty=True))
def test_runs_are_ordered_and_maximal(case):
    shape, region = case
    runs = list(contiguous_runs(shape, region))
    flat = [i for start, length in runs for i in range(start, start + length)]
    assert flat == numbered(shape)[region.slices].reshape(-1).tolist()
    assert all(length > 0 for _, length in runs)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))
    assert count_runs(shape, region) == len(runs)


@given(shaped_regions(empty=True), st.integers(1, 40))
def test_split_yields_ordered_slabs_within_the_limit(case, limit):
    shape, region = case
    array = numbered(shape)
    parts = list(split_evenly(region, limit))
    flat = [i for part in parts for i in array[part.slices].reshape(-1).tolist()]
    assert flat == array[region.slices].reshape(-1).tolist()
    for part in parts:
        assert 0 < part.size <= limit
        assert is_slab(part, region)


def is_slab(part, region):
    """Whether the part is contiguous in a C-ordered buffer of the region."""
    return count_runs(region.shape, part.relative_to(region)) == 1


@given(shaped_regions())
def test_split_returns_one_part_if_it_fits(case):
    _, region = case
    assert list(split_evenly(region, region.size)) == [region]


@pytest.mark.parametrize(("limit", "count"), [(70, 1), (69, 2), (20, 4), (10, 7), (9, 14), (3, 28), (1, 70)])
def test_split_makes_the_fewest_parts(limit, count):
    assert len(list(split_evenly(Region.whole((7, 10)), limit))) == count


@given(st.data())
def test_grid_cells_tile_the_array(data):
    shape = data.draw(shapes(limit=300))
    chunk = data.draw(chunk_shapes(shape, max_excess=2))
    seen = np.zeros(shape, int)
    indices = list(grid_indices(shape, chunk))
    for index in indices:
        cell = grid_cell(shape, chunk, index)
        assert all(0 < n <= c for n, c in zip(cell.shape, chunk, strict=True))
        assert all(stop <= n for stop, n in zip(cell.stop, shape, strict=True))
        assert cell.start == tuple(i * c for i, c in zip(index, chunk, strict=True))
        seen[cell.slices] += 1
    assert (seen == 1).all()
    assert indices == list(np.ndindex(*grid_shape(shape, chunk)))


def test_scalar_region_has_one_element():
    whole = Region.whole(())
    assert (whole.size, whole.shape, str(whole)) == (1, (), "[]")
    assert list(contiguous_runs((), whole)) == [(0, 1)]
    assert list(split_evenly(whole, 1)) == [whole]
    assert list(grid_indices((), ())) == [()]


def test_text_is_a_python_index():
    assert str(Region((1, 0), (3, 4))) == "[1:3, 0:4]"


@given(shaped_regions(), st.data())
def test_intersecting_cells_overlap_the_box(case, data):
    shape, region = case
    chunk = data.draw(chunk_shapes(shape))
    meeting = [
        index for index in grid_indices(shape, chunk) if grid_cell(shape, chunk, index).intersect(region)
    ]
    assert list(intersecting_cells(chunk, region)) == meeting
