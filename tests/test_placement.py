import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.dtypes import DTYPES
from ckpttools.formats.base import Placement
from ckpttools.region import Region, grid_cell, grid_indices
from ckpttools.testing.profile import use_profile
from ckpttools.testing.strategies import chunk_shapes, noise, regions, shapes, tilings

use_profile()
CARRIED = [DTYPES[name] for name in ("uint8", "bfloat16", "float32", "complex128")]


@st.composite
def placements(draw, most=300):
    shape = draw(shapes(most=most))
    dtype = draw(st.sampled_from(CARRIED))
    chunk = draw(chunk_shapes(shape))
    return Placement(shape, dtype.itemsize, chunk, "d/data", draw(st.sampled_from((0, 64, 4096)))), dtype


def buffer_of(truth, region, placement):
    """A task's buffer: the region's elements with the axes in the placement's order."""
    return np.ascontiguousarray(truth[region.slices].transpose(placement.order)).reshape(-1).view(np.uint8)


@settings(max_examples=200)
@given(placements(), st.data())
def test_tiles_written_in_any_order_make_the_chunks(case, data):
    placement, dtype = case
    truth = noise(placement.shape, dtype, 1)
    file = np.zeros(placement.offset + placement.nbytes, np.uint8)
    written = np.zeros_like(file)
    for region in data.draw(tilings(placement.shape)):
        buffer = buffer_of(truth, region, placement)
        for run in placement.runs(region):
            part = slice(run.offset, run.offset + run.nbytes)
            file[part] = buffer[run.position : run.position + run.nbytes]
            written[part] += 1
    assert written.max() == 1
    assert written.sum() == truth.nbytes
    for index in grid_indices(placement.shape, placement.chunk):
        cell = grid_cell(placement.shape, placement.chunk, index)
        padded = np.zeros(placement.chunk, dtype.carrier)
        padded[tuple(slice(0, n) for n in cell.shape)] = truth[cell.slices]
        start = placement.chunk_offset(index)
        assert file[start : start + placement.chunk_nbytes].tobytes() == padded.tobytes()


@given(placements(), st.data())
def test_runs_cover_the_buffer_once_and_are_maximal(case, data):
    placement, _ = case
    region = data.draw(regions(placement.shape))
    runs = list(placement.runs(region))
    assert all(run.nbytes > 0 for run in runs)
    in_buffer = sorted((run.position, run.nbytes) for run in runs)
    assert in_buffer[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(in_buffer))
    assert sum(in_buffer[-1]) == region.size * placement.itemsize
    in_file = sorted((run.offset, run.nbytes, run.position) for run in runs)
    for (a, n, here), (b, _, there) in itertools.pairwise(in_file):
        assert a + n < b or (a + n == b and here + n != there)


@given(placements(), st.data())
def test_runs_come_in_file_order(case, data):
    placement, _ = case
    offsets = [run.offset for run in placement.runs(data.draw(regions(placement.shape)))]
    assert offsets == sorted(offsets)


@given(placements())
def test_chunks_lie_side_by_side_without_gaps(case):
    placement, _ = case
    indices = list(grid_indices(placement.shape, placement.chunk))
    offsets = sorted(placement.chunk_offset(index) for index in indices)
    step = placement.chunk_nbytes
    assert offsets == [placement.offset + k * step for k in range(len(indices))]
    assert placement.nbytes == len(indices) * step
    assert sorted(placement.order) == list(range(len(placement.shape)))


@given(placements(), st.data())
def test_estimates_are_near_the_truth(case, data):
    placement, _ = case
    region = data.draw(regions(placement.shape))
    count = len(list(placement.runs(region)))
    estimate = placement.estimated_runs(region)
    assert 1 <= estimate <= region.size * 2 ** len(placement.shape)
    first = tuple(a // c for a, c in zip(region.start, placement.chunk, strict=True))
    if region.intersect(grid_cell(placement.shape, placement.chunk, first)) == region:
        assert estimate == count


@given(st.integers(1, 5), st.integers(2, 6), st.integers(2, 6), st.integers(1, 6))
def test_all_chunks_of_a_layer_are_one_run(layers, rows, columns, piece):
    """Stacked in the middle, cut on the first axis: a layer's chunks are neighbours in file and buffer."""
    placement = Placement((rows * piece, layers, columns), 2, (rows, 1, columns), "f", 0)
    for layer in range(layers):
        region = Region((0, layer, 0), (rows * piece, layer + 1, columns))
        (run,) = placement.runs(region)
        assert run.nbytes == region.size * 2
        assert placement.estimated_runs(region) == 1
    assert len(list(placement.runs(Region.whole(placement.shape)))) == 1


def test_a_scalar_is_one_chunk():
    placement = Placement((), 8, (), "f", 128)
    (run,) = placement.runs(Region.whole(()))
    assert (run.offset, run.position, run.nbytes) == (128, 0, 8)
    assert (placement.nbytes, placement.chunk_offset(()), placement.estimated_runs(Region.whole(()))) == (
        8,
        128,
        1,
    )


def test_an_empty_region_has_no_runs():
    placement = Placement((4, 4), 2, (2, 2), "f", 0)
    empty = Region((1, 1), (1, 3))
    assert list(placement.runs(empty)) == []
    assert placement.estimated_runs(empty) == 0


def test_padding_is_part_of_the_file_but_of_no_run():
    placement = Placement((5,), 1, (3,), "f", 0)
    assert placement.nbytes == 6
    assert sum(run.nbytes for run in placement.runs(Region.whole((5,)))) == 5
    assert prod(placement.grid) == 2
