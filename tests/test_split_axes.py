"""Arrays with axes split in two, and parts of arrays that are read as one."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.array.nodes import Relayout
from ckpttools.array.scratch import Scratch
from ckpttools.array.splitting import with_axes_split
from ckpttools.core.region import Region
from ckpttools.sharding.buffers import buffers
from ckpttools.sharding.held import HeldParts, as_one_part
from ckpttools.sharding.shards import Shards
from ckpttools.testing.strategies import factors, lazy_arrays, regions


@given(st.data())
def test_an_array_with_axes_split_is_the_same_array_reshaped(data):
    known = data.draw(lazy_arrays())
    array, truth = known.array, known.truth
    groups = [data.draw(factors(length)) if length else (length,) for length in array.shape]
    split = with_axes_split(array, groups)
    if split is None:
        return
    assert split.shape == tuple(itertools.chain(*groups))
    assert split.dtype == array.dtype
    assert split.scratch_bytes <= array.scratch_bytes
    region = data.draw(regions(split.shape))
    wanted = truth.reshape(split.shape)[region.slices]
    assert split.read(region).tobytes() == wanted.tobytes()
    assert not (isinstance(split, Relayout) and isinstance(split.source, Relayout))


@given(st.data())
def test_parts_are_those_of_the_array_whether_read_as_one_or_apart(data):
    known = data.draw(lazy_arrays())
    array, truth = known.array, known.truth
    counts = [data.draw(st.sampled_from(_divisors(length))) for length in array.shape]
    part = tuple(length // count for length, count in zip(array.shape, counts, strict=True))
    grid = list(itertools.product(*map(range, counts)))
    some = data.draw(st.one_of(st.just(grid), st.lists(st.sampled_from(grid), min_size=1, unique=True)))
    held = HeldParts(array, Shards(array.shape, part, tuple(some)))
    made = buffers(held)
    shards = made.held.shards
    for box in shards.boxes:
        for index, common in shards.parts_of(box):
            made.held.array.read_into(common, made.place(index, common), Scratch(array.scratch_bytes))
    assert set(made.parts) == set(held.shards.held)
    for index, values in made.parts.items():
        wanted = np.ascontiguousarray(truth[held.shards.region(index).slices])
        assert (values.flags.c_contiguous and values.ctypes.data % 64 == 0) or values.size == 0
        if values.size:
            assert values.tobytes() == wanted.tobytes()


def test_parts_of_a_transposed_matrix_are_one():
    from ckpttools.array.nodes import relayout, stack
    from ckpttools.core.dtypes import DTYPES
    from ckpttools.testing.strategies import noise, stored

    dtype = DTYPES["bfloat16"]
    layers = [stored(noise((8, 6), dtype, seed), dtype) for seed in range(3)]
    array = stack([relayout(each, ((8,), (6,)), (1, 0), (1, 1)) for each in layers], 1)
    held = HeldParts(array, Shards((6, 3, 8), (3, 3, 2), tuple(itertools.product((0, 1), (0,), range(4)))))
    one = as_one_part(held)
    assert one is not None
    assert one.array.shape == one.shards.part == (2, 3, 3, 4, 2)
    assert one.array.read_cost(Region.whole(one.array.shape)) == array.read_cost(Region.whole(array.shape))


def _divisors(length):
    return [n for n in range(1, length + 1) if length % n == 0] or [1]
