import itertools
from collections import defaultdict
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Appended, DataFile, Placement, grid_cell, grid_indices

from ckpttools import DTYPES, Region
from ckpttools.formats.placement import ChunkFiles
from ckpttools.testing.strategies import chunk_shapes, noise, regions, shapes, tilings

CARRIED = [DTYPES[name] for name in ("uint8", "bfloat16", "float32", "complex128")]


HOMES = (
    DataFile("d/data"),
    DataFile("d/data", 4096),
    DataFile("d/data", 64, per_file=1),
    DataFile("d/data", 0, per_file=3),
    ChunkFiles("", "c", "/"),
)


@st.composite
def placements(draw, homes=HOMES):
    shape = draw(shapes(limit=300))
    dtype = draw(st.sampled_from(CARRIED))
    chunk = draw(chunk_shapes(shape))
    return Placement(shape, dtype.itemsize, chunk, draw(st.sampled_from(homes))), dtype


def buffer_of(truth, region, placement):
    """A task's buffer: the region's elements with the axes in the placement's order."""
    return np.ascontiguousarray(truth[region.slices].transpose(placement.order)).reshape(-1).view(np.uint8)


@settings(max_examples=200)
@given(placements(), st.data())
def test_tiles_written_in_any_order_fill_the_chunks(case, data):
    placement, dtype = case
    truth = noise(placement.shape, dtype, 1)
    ranges = {index: placement.chunk_range(index) for index in grid_indices(placement.shape, placement.chunk)}
    ends = defaultdict(int)
    for span in ranges.values():
        assert span.nbytes == placement.chunk_nbytes
        ends[span.file] = max(ends[span.file], span.offset + span.nbytes)
    files = {file: np.zeros(end, np.uint8) for file, end in ends.items()}
    written = {file: np.zeros(end, np.uint8) for file, end in ends.items()}
    for region in data.draw(tilings(placement.shape)):
        buffer = buffer_of(truth, region, placement)
        for run in placement.runs(region):
            part = slice(run.offset, run.offset + run.nbytes)
            files[run.file][part] = buffer[run.position : run.position + run.nbytes]
            written[run.file][part] += 1
    assert max(counts.max() for counts in written.values()) == 1
    assert sum(counts.sum() for counts in written.values()) == truth.nbytes
    for index, location in ranges.items():
        cell = grid_cell(placement.shape, placement.chunk, index)
        padded = np.zeros(placement.chunk, dtype.carrier)
        padded[tuple(slice(0, n) for n in cell.shape)] = truth[cell.slices]
        stored = files[location.file][location.offset : location.offset + location.nbytes]
        assert stored.tobytes() == padded.tobytes()


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
    in_file = sorted((run.file, run.offset, run.nbytes, run.position) for run in runs)
    for (file, a, n, here), (other, b, _, there) in itertools.pairwise(in_file):
        assert file != other or a + n < b or (a + n == b and here + n != there)


@given(placements(HOMES[:2]), st.data())
def test_runs_come_in_file_order(case, data):
    placement, _ = case
    offsets = [run.offset for run in placement.runs(data.draw(regions(placement.shape)))]
    assert offsets == sorted(offsets)


@given(placements())
def test_chunks_are_contiguous(case):
    placement, _ = case
    cells = list(placement.cells(Region.whole(placement.shape)))
    assert sorted(cells) == list(grid_indices(placement.shape, placement.chunk))
    assert [placement.position(index) for index in cells] == list(range(len(cells)))
    ends = {}
    for location in map(placement.chunk_range, cells):
        first = placement.home.offset if isinstance(placement.home, DataFile) else 0
        assert location.offset == ends.get(location.file, first)
        ends[location.file] = location.offset + location.nbytes
    assert placement.nbytes == len(cells) * placement.chunk_nbytes
    assert sorted(placement.order) == list(range(len(placement.shape)))
    if isinstance(placement.home, DataFile):
        assert len(ends) == -(-len(cells) // (placement.home.per_file or len(cells)))
    else:
        assert len(ends) == len(cells)


@given(placements(), st.data())
def test_estimates_are_close_to_actual_counts(case, data):
    placement, _ = case
    region = data.draw(regions(placement.shape))
    count = len(list(placement.runs(region)))
    estimate = placement.estimated_runs(region)
    assert 1 <= estimate <= region.size * 2 ** len(placement.shape)
    first = tuple(a // c for a, c in zip(region.start, placement.chunk, strict=True))
    if region.intersect(grid_cell(placement.shape, placement.chunk, first)) == region:
        assert estimate == count


@given(st.integers(1, 5), st.integers(2, 6), st.integers(2, 6), st.integers(1, 6))
def test_chunks_of_a_layer_are_contiguous(layers, rows, columns, piece):
    """Stacked in the middle, cut on the first axis: a layer's chunks are neighbors in file and buffer."""
    placement = Placement((rows * piece, layers, columns), 2, (rows, 1, columns), DataFile("f"))
    for layer in range(layers):
        region = Region((0, layer, 0), (rows * piece, layer + 1, columns))
        (run,) = placement.runs(region)
        assert run.nbytes == region.size * 2
        assert placement.estimated_runs(region) == 1
    assert len(list(placement.runs(Region.whole(placement.shape)))) == 1


def test_scalar_is_one_chunk():
    placement = Placement((), 8, (), DataFile("f", 128))
    (run,) = placement.runs(Region.whole(()))
    assert (run.offset, run.position, run.nbytes) == (128, 0, 8)
    assert (placement.nbytes, placement.chunk_range(()).offset) == (8, 128)
    assert placement.estimated_runs(Region.whole(())) == 1


def test_appended_chunk_has_no_location_yet():
    with pytest.raises(TypeError, match="no location"):
        Placement((4,), 2, (2,), Appended("f", 100)).chunk_range((0,))


def test_different_placements_have_different_descriptions():
    homes = (*HOMES, Appended("d/data", 10), Appended("d/data", 11))
    described = {Placement((4,), 2, (2,), home).described for home in homes}
    assert len(described) == len(homes)
    assert Placement((4,), 2, (1,), HOMES[0]).described not in described


def test_padding_belongs_to_the_file_but_to_no_run():
    placement = Placement((5,), 1, (3,), DataFile("f"))
    assert placement.nbytes == 6
    assert sum(run.nbytes for run in placement.runs(Region.whole((5,)))) == 5
    assert prod(placement.grid) == 2
