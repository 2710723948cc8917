"""Arrays with axes split in two, and parts of arrays that are read as one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Relayout, Scratch, pad_array, quantized_view, relayout, stack, window
from support.quantized_weights import fp8_rows

from ckpttools import DTYPES, Region
from ckpttools.plan.pieces import fit_pieces
from ckpttools.run import scanning
from ckpttools.sharding.scatter import ReadResources, buffers, read_parts
from ckpttools.sharding.shards import LocalParts, Shards, merge_parts, split_axes
from ckpttools.testing.strategies import Known, factors, lazy_arrays, noise, regions, stored


@given(st.data())
def test_splitting_an_axis_equals_a_reshape(data):
    known = data.draw(lazy_arrays())
    array, truth = known.array, known.truth
    groups = [data.draw(factors(length)) if length else (length,) for length in array.shape]
    split = split_axes(array, groups)
    if split is None:
        return
    assert split.shape == tuple(itertools.chain(*groups))
    assert split.dtype == array.dtype
    assert split.scratch_bytes <= array.scratch_bytes
    region = data.draw(regions(split.shape))
    expected = truth.reshape(split.shape)[region.slices]
    assert split.read(region).tobytes() == expected.tobytes()
    # Nothing is moved once more than before, which some arrays are twice.
    twice = isinstance(split, Relayout) and isinstance(split.source, Relayout)
    assert not twice or split.source is array.source


@given(st.data())
def test_joined_parts_equal_the_array(data):
    known = data.draw(lazy_arrays())
    array, truth = known.array, known.truth
    counts = [data.draw(st.sampled_from(_divisors(length))) for length in array.shape]
    part = tuple(length // count for length, count in zip(array.shape, counts, strict=True))
    grid = list(itertools.product(*map(range, counts)))
    some = data.draw(st.one_of(st.just(grid), st.lists(st.sampled_from(grid), min_size=1, unique=True)))
    local = LocalParts(array, Shards(array.shape, part, tuple(some)))
    built = buffers(local)
    shards = built.local.shards
    for box in shards.boxes:
        for index, common in shards.intersect_parts(box):
            built.local.array.read_into(common, built.location(index, common), Scratch(array.scratch_bytes))
    assert set(built.parts) == set(local.shards.local)
    for index, values in built.parts.items():
        expected = np.ascontiguousarray(truth[local.shards.region(index).slices])
        assert (values.flags.c_contiguous and values.ctypes.data % 64 == 0) or values.size == 0
        if values.size:
            assert values.tobytes() == expected.tobytes()


@settings(max_examples=40)
@given(st.data())
def test_parallel_small_reads_match_numpy_slices(data):
    known = [_any_array(data) for _ in range(data.draw(st.integers(1, 3)))]
    local = []
    for array, _ in known:
        counts = [data.draw(st.sampled_from(_divisors(length))) for length in array.shape]
        part = tuple(length // count for length, count in zip(array.shape, counts, strict=True))
        grid = list(itertools.product(*map(range, counts)))
        some = data.draw(st.one_of(st.just(grid), st.lists(st.sampled_from(grid), min_size=1, unique=True)))
        local.append(LocalParts(array, Shards(array.shape, part, tuple(some)), "array"))
    limit = data.draw(st.sampled_from((16, 200, 1 << 20)))

    def small(*arguments, **options):
        return replace(fit_pieces(*arguments, **options), piece_bytes=limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "fit_pieces", small)
        result = dict(read_parts(local, ReadResources(1 << 30, data.draw(st.sampled_from((1, 3))))))
    assert sorted(result) == list(range(len(local)))
    for number, parts in result.items():
        shards = local[number].shards
        assert set(parts) == set(shards.local)
        for index, values in parts.items():
            assert values.tobytes() == known[number].truth[shards.region(index).slices].tobytes()


def _any_array(data):
    """Also of the kinds that are made of others and of which `lazy_arrays` draws none."""
    known = data.draw(lazy_arrays())
    array, truth = known
    kind = data.draw(st.sampled_from(("plain", "window", "padded", "numbers")))
    if kind == "window" and array.size:
        region = data.draw(regions(array.shape))
        return Known(window(array, region.start, region.shape), truth[region.slices])
    if kind == "padded" and array.ndim:
        more = [data.draw(st.integers(0, 2)) for _ in array.shape]
        shape = tuple(length + item for length, item in zip(array.shape, more, strict=True))
        return Known(pad_array(array, shape), np.pad(truth, [(0, item) for item in more]))
    if kind == "numbers":
        built = fp8_rows(np.random.default_rng(data.draw(st.integers(0, 99))), (6, 4), "float32")
        numbers = quantized_view(built.tree).dequantized(DTYPES["float32"]).tree.arrays[built.name,]
        order = data.draw(st.permutations(range(3)))
        shape = tuple((2, 3, 4)[item] for item in order)
        turned = relayout(numbers, ((2, 3), (4,)), order, (1, 1, 1))
        assert turned.shape == shape
        return Known(turned, built.product.reshape(2, 3, 4).transpose(order).view(np.uint32))
    return known


def test_parts_of_a_transposed_matrix_are_joined():
    dtype = DTYPES["bfloat16"]
    layers = [stored(noise((8, 6), dtype, seed), dtype) for seed in range(3)]
    array = stack([relayout(layer, ((8,), (6,)), (1, 0), (1, 1)) for layer in layers], 1)
    local = LocalParts(array, Shards((6, 3, 8), (3, 3, 2), tuple(itertools.product((0, 1), (0,), range(4)))))
    one = merge_parts(local)
    assert one is not None
    assert one.array.shape == one.shards.part == (2, 3, 3, 4, 2)
    assert one.array.read_cost(Region.whole(one.array.shape)) == array.read_cost(Region.whole(array.shape))


def _divisors(length):
    return [n for n in range(1, length + 1) if length % n == 0] or [1]
