"""Each process is given what it can make of arrays that are made of others, without a process of JAX."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import cast, pad_array, relayout, stack, take, window

from ckpttools import DTYPES, Region, UsageError
from ckpttools.array.nodes import InMemoryArray, rebuild_arrays
from ckpttools.core.region import grid_cells
from ckpttools.sharding.distributed_save import RegionAssigner
from ckpttools.sharding.save_shards import Shard, ShardHolder

FLOAT = DTYPES["float32"]


def held(shape, cell):
    """An array of which each process has every third cell of a grid."""
    values = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    boxes = [*grid_cells(shape, cell)]
    owners = [(number % 3, box) for number, box in enumerate(boxes)]
    shards = [Shard(box, values[box.slices]) for box in boxes]
    return InMemoryArray(shape, FLOAT, ShardHolder("w", FLOAT, shards, "v", owners))


def as_process(array, number):
    """The same where one process alone has its shards."""

    def own(leaf):
        holder = leaf.holder
        shards = [
            shard
            for shard, (process, _) in zip(holder._shards, holder.owners, strict=True)
            if process == number
        ]
        return replace(leaf, holder=ShardHolder("w", FLOAT, shards, "v", holder.owners))

    return rebuild_arrays({"": array}, own)[""]


@st.composite
def built(draw):
    """Arrays made of one to three others, of every kind of node."""
    cell = (draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
    parts = [held((6, 4, 2), cell) for _ in range(draw(st.integers(1, 3)))]
    order = draw(st.permutations(range(5)))
    merge = draw(st.sampled_from([(2, 2, 1), (1, 4), (5,), (3, 2)]))
    rearranged = [relayout(part, ((2, 3), (2, 2), (2,)), order, merge) for part in parts]
    array = stack(rearranged, draw(st.integers(0, len(merge))))
    match draw(st.sampled_from(["all", "take", "window", "padded", "cast"])):
        case "take":
            return take(array, 0, draw(st.integers(0, array.shape[0] - 1)))
        case "window":
            start = tuple(draw(st.integers(0, length - 1)) for length in array.shape)
            return window(array, start, tuple(n - a for n, a in zip(array.shape, start, strict=True)))
        case "padded":
            return pad_array(array, tuple(n + draw(st.integers(0, 3)) for n in array.shape))
        case "cast":
            return cast(array, DTYPES["float64"])
    return array


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_assigned_process_has_the_complete_region(data):
    array = data.draw(built())
    expected, result = array.read(), np.full(array.shape, np.nan, array.dtype.numpy)
    tile = tuple(data.draw(st.integers(1, length)) for length in array.shape)
    makers, count = RegionAssigner(), 0
    for region in grid_cells(array.shape, tile):
        for process, piece in makers.pieces(("w",), array, region):
            result[piece.slices] = as_process(array, process).read(piece)
            count += piece.size
    assert np.array_equal(result, expected) and count == array.size


def test_assignments_are_not_shared_between_arrays():
    makers, whole = RegionAssigner(), Region.whole((6, 4))
    for cell in ((2, 4, 2), (6, 1, 2), (2, 4, 2)):
        array = take(held((6, 4, 2), cell), 2, 0)
        pieces = makers.pieces(("w",), array, whole)
        for process, piece in pieces:
            assert np.array_equal(as_process(array, process).read(piece), array.read(piece))


def test_too_many_pieces_are_refused():
    array = take(held((33, 32, 1), (1, 1, 1)), 2, 0)
    with pytest.raises(UsageError, match="no process has enough") as caught:
        RegionAssigner().pieces(("layers", "w"), array, Region.whole(array.shape))
    assert "3 processes" in str(caught.value) and "layers/w" in str(caught.value)
