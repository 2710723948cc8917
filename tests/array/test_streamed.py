"""Plans for files that are written from their first byte to their last."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    Appended,
    DataFile,
    Layout,
    OrbaxWriter,
    Placement,
    SafetensorsWriter,
    ZarrWriter,
    Zstd,
    build,
)
from support.trees import lazy

from ckpttools import MemoryBudgetError, Metadata, Region, Tree
from ckpttools.formats.placement import ChunkFiles
from ckpttools.plan import task as tasks
from ckpttools.plan.task import grid_boxes, prices, split_in_order, task_sizes
from ckpttools.stores.costs import Streams
from ckpttools.testing.strategies import chunk_shapes, lazy_arrays

STREAMS = Streams(memory=1 << 20, file_bytes=1 << 16, files=4)
HOMES = (
    DataFile("d/data", 64),
    DataFile("d/data", 0, per_file=1),
    DataFile("d/data", 0, per_file=3),
    ChunkFiles("", "c", "/"),
)


@settings(max_examples=300)
@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    limit=st.integers(1, 30),
    stride=st.none() | st.integers(1, 9),
)
def test_boxes_tile_the_grid_in_order(shape, limit, stride):
    position = 0
    for box in grid_boxes(shape, limit, stride):
        cells = sorted(_position(shape, index) for index in _indices(box))
        assert cells == list(range(position, position + box.size)), "the cells that come next"
        assert 1 <= len(cells) <= limit
        assert stride is None or cells[0] // stride == cells[-1] // stride
        position += len(cells)
    assert position == prod(shape)


@settings(max_examples=300)
@given(data=st.data())
def test_tasks_write_each_file_from_its_beginning_to_its_end(data):
    array = data.draw(lazy_arrays())[0]
    chunk = data.draw(chunk_shapes(array.shape))
    placement = Placement(array.shape, array.dtype.itemsize, chunk, data.draw(st.sampled_from(HOMES)))
    limit = data.draw(st.integers(placement.itemsize, 4096))
    runs = defaultdict(list)
    seen = 0
    for task in split_in_order(("a",), array, placement, limit):
        assert task.bytes_out <= limit
        seen += task.region.size
        for run in placement.runs(task.region):
            runs[run.file].append((run.offset, run.offset + run.nbytes))
        files = {run.file for run in placement.runs(task.region)}
        assert len(files) == 1 or isinstance(placement.home, ChunkFiles)
    assert seen == array.size
    for item in runs.values():
        assert all(stop <= start for (_, stop), (start, _) in pairwise(item))
    assert sum(stop - start for item in runs.values() for start, stop in item) == array.nbytes


@settings(max_examples=100)
@given(data=st.data())
def test_small_tasks_read_no_more_than_large_tasks(data):
    array = data.draw(lazy_arrays())[0]
    chunk = data.draw(chunk_shapes(array.shape))
    placement = Placement(array.shape, array.dtype.itemsize, chunk, data.draw(st.sampled_from(HOMES)))
    layout = Layout({("a",): placement}, {})
    limit = data.draw(st.integers(64, 4096))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "_SMALLEST_TASK", 64)
        (size,) = task_sizes({("a",): array}, layout, limit).values()
    assert min(64, limit) <= size <= limit

    def reads(size):
        first = next(split_in_order(("a",), array, placement, size))
        return prices(array).of(array.read_cost(first.region)) / first.region.size

    if array.size:
        assert reads(size) <= 1.05 * reads(limit)


def test_oversized_encoded_chunk_is_refused():
    array = lazy(np.zeros((4, 4), np.float32))
    placement = Placement((4, 4), array.dtype.itemsize, (4, 4), Appended("d", 99), Zstd(3))
    with pytest.raises(MemoryBudgetError, match="an encoded chunk does not fit"):
        list(split_in_order(("a",), array, placement, placement.chunk_nbytes - 1))


@settings(max_examples=50)
@given(arrays=st.lists(lazy_arrays(), min_size=1, max_size=6), data=st.data())
def test_each_task_and_file_is_in_one_group(arrays, data):
    writer = data.draw(
        st.sampled_from(
            [
                OrbaxWriter(target_data_file_bytes=4096),
                OrbaxWriter(compression=Zstd(3)),
                OrbaxWriter(ocdbt=False),
                ZarrWriter(),
                ZarrWriter(compression=Zstd(3)),
                SafetensorsWriter(max_shard_bytes=4096),
            ]
        )
    )
    is_held = {
        "orbax": lambda a: a.dtype.zarr3 and a.size,
        "zarr3": lambda a: a.dtype.zarr3,
        "safetensors": lambda a: a.dtype.safetensors and not a.dtype.packed,
    }[writer.name]
    tree = Tree({(f"a{n}",): a for n, (a, *_) in enumerate(arrays) if is_held(a)}, Metadata())
    plan = build(tree, writer, memory=1 << 30, jobs=3, streams=STREAMS)
    groups = [list(group) for group in plan.groups]
    assert sorted(number for group in groups for number in group) == list(range(len(plan.tasks)))
    assert groups == [list(group) for group in plan.groups], "the same numbers in every run"
    owner = {}
    for number, group in enumerate(groups):
        for task in (plan.tasks[item] for item in group):
            placement = plan.layout.placements[task.path]
            if placement.codec is None:
                for run in placement.runs(task.region):
                    assert owner.setdefault(run.file, number) == number
    assert plan.projected_peak >= plan.jobs * STREAMS.memory


def test_workers_do_not_exceed_files():
    array = lazy(np.zeros(64, np.float32))
    tree = Tree({("a",): array}, Metadata())
    assert build(tree, SafetensorsWriter(), memory=1 << 30, jobs=9, streams=STREAMS).jobs == 1


def _indices(box: Region):
    if not box.rank:
        yield ()
        return
    for index in _indices(Region(box.start[1:], box.stop[1:])):
        yield from ((first, *index) for first in range(box.start[0], box.stop[0]))


def _position(shape, index):
    position = 0
    for length, location in zip(shape, index, strict=True):
        position = position * length + location
    return position
