from dataclasses import dataclass
from functools import cache
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    Bytes,
    Cast,
    Chunked,
    Constant,
    Relayout,
    Scratch,
    Stored,
    count_runs,
    elementwise,
    grid_cell,
    grid_indices,
    relayout,
    stack,
    take,
)

from ckpttools import DTYPES, FormatError, Region, ShapeError
from ckpttools.array import copy as copying
from ckpttools.array import read_blocks
from ckpttools.array import stored as storing
from ckpttools.array.lazy import ReadCost
from ckpttools.testing.strategies import (
    ReadRefusedError,
    UnreadableFile,
    chunk_shapes,
    chunked,
    dtypes,
    lazy_arrays,
    noise,
    regions,
    relaid_arrays,
    shapes,
    stored,
)

BF16, F32, U8 = DTYPES["bfloat16"], DTYPES["float32"], DTYPES["uint8"]
orders = cache(st.permutations)
STEPS = st.sampled_from((1, 1, 2))


@pytest.fixture(params=[64, 512, 4096, None], ids=lambda size: f"read block {size}")
def block(request):
    """Reads everything through read blocks of this many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(read_blocks, "READ_BLOCK_BYTES", request.param)
            patch.setattr(storing, "_PACKED_BLOCK", min(request.param, storing._PACKED_BLOCK))
            patch.setattr(copying, "_TILE_BYTES", max(request.param, 256))
        yield request.param


@pytest.fixture
def exact(monkeypatch):
    """No room for buffers that are rounded up to pages: it would hide what is not accounted for."""
    monkeypatch.setattr(read_blocks, "_PAGE", 0)
    monkeypatch.setattr(copying, "round_up_to_page", lambda nbytes: nbytes)


@dataclass(frozen=True)
class Tight:
    """Scratch that hands out exactly as many bytes as are asked for, 16-byte aligned, and counts them."""

    limit: int

    def take(self, shape, dtype):
        return _Taken(self, shape, dtype)


class _Taken:
    in_use = 0
    limit = 0

    def __init__(self, scratch, shape, dtype):
        self.nbytes, self.limit = prod(shape) * dtype.itemsize, scratch.limit
        self.array = np.frombuffer(b"\xee" * self.nbytes, np.uint8).copy().view(dtype).reshape(shape)

    def __enter__(self):
        _Taken.in_use += self.nbytes
        _Taken.limit = max(_Taken.limit, _Taken.in_use)
        assert _Taken.in_use <= self.limit, "more scratch than was projected"
        return self.array

    def __exit__(self, *error):
        _Taken.in_use -= self.nbytes


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def out_array(draw, shape, dtype):
    """An output of any strides: (the memory, the view)."""
    order = draw(orders(range(len(shape))))
    extra = [draw(st.integers(0, 1)) for _ in shape]
    steps = [draw(STEPS) for _ in shape]
    memory = np.frombuffer(
        b"\xcc" * (prod(shape[k] * steps[k] + extra[k] for k in order) * dtype.itemsize), np.uint8
    ).copy()
    base = memory.view(dtype).reshape([shape[k] * steps[k] + extra[k] for k in order])
    view = base.transpose([int(k) for k in np.argsort(order)])
    return base, view[(*(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True)), ...)]


@settings(max_examples=120)
@given(known=lazy_arrays(), data=st.data())
def test_every_region_equals_the_slice_of_the_array(block, known, data):
    array, truth = known
    region = data.draw(regions(array.shape))
    base, out = out_array(data.draw, region.shape, array.dtype.carrier)
    expected = base.copy()
    offset = out.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    np.ndarray(out.shape, out.dtype, expected, offset, out.strides)[...] = truth[region.slices]
    array.read_into(region, out, Scratch(array.scratch_bytes))
    assert bits(base) == bits(expected)


@settings(max_examples=120)
@given(known=lazy_arrays(), data=st.data())
def test_declared_scratch_is_exact(block, exact, known, data):
    array, truth = known
    region = data.draw(regions(array.shape))
    out = np.empty(region.shape, array.dtype.carrier)
    array.read_into(region, out, Tight(array.scratch_bytes))
    assert bits(out) == bits(truth[region.slices])


def needed(array):
    """Scratch that reading all of an array really takes, in bytes."""
    scratch = Tight(1 << 30)
    _Taken.limit = 0
    array.read_into(Region.whole(array.shape), np.empty(array.shape, array.dtype.carrier), scratch)
    return _Taken.limit


def test_every_node_adds_its_own_scratch(exact):
    """Over a constant, which takes nothing, no slack of the nodes below hides an account that is short."""
    plain = Constant((64, 96), F32, bytes(4))
    once = elementwise(plain, Cast(BF16))
    twice = elementwise(once, Cast(F32))
    turned = relayout(plain, [(64,), (96,)], (1, 0), (1, 1))
    apart = relayout(elementwise(plain, Cast(BF16)), [(8, 8), (96,)], (2, 1, 0), (1, 2))
    assert needed(once) == once.scratch_bytes == plain.nbytes
    assert needed(twice) == twice.scratch_bytes == plain.nbytes + once.nbytes
    assert plain.nbytes < needed(turned) <= turned.scratch_bytes
    assert needed(apart) <= apart.scratch_bytes


@given(known=lazy_arrays())
def test_read_returns_the_full_array_in_its_dtype(known):
    array, truth = known
    read = array.read()
    assert (read.shape, read.dtype) == (array.shape, array.dtype.numpy)
    assert bits(read) == bits(truth)


@dataclass(frozen=True)
class Counting:
    """A file that keeps a list of what was read."""

    data: Bytes
    seen: list

    path = property(lambda self: self.data.path)
    size = property(lambda self: self.data.size)
    version = "0"

    def read_into(self, offset, out):
        self.seen.append((offset, memoryview(out).nbytes))
        self.data.read_into(offset, out)


def counted(array, seen):
    return Stored(array.shape, array.dtype, Counting(array.source, seen), array.offset)


@given(st.data())
def test_stored_array_reads_its_declared_ranges(data):
    shape = data.draw(shapes(min_rank=1))
    dtype = data.draw(dtypes())
    truth, seen = noise(shape, dtype), []
    array = counted(stored(truth, dtype, lead=7, tail=9), seen)
    region = data.draw(regions(shape))
    # With the real length all arrays of a test would be read whole.
    short = data.draw(st.sampled_from([1, 4, 32, storing._SHORT_RUN]))
    with patch.object(storing, "_SHORT_RUN", short):
        array.read(region)
        cost = array.read_cost(region)
    nbytes = sum(n for _, n in seen)
    assert cost == ReadCost(nbytes, len(seen))
    growth = storing._MAX_GROWTH * region.size * dtype.itemsize
    assert nbytes <= max(growth, short * count_runs(shape, region))
    assert len(seen) <= count_runs(shape, region)
    assert all(start >= 7 and start + n <= 7 + array.nbytes for start, n in seen)
    flat = np.arange(truth.size).reshape(shape)[region.slices].reshape(-1)
    assert array.first_byte(region) == ("memory", 7 + int(flat[0]) * dtype.itemsize)
    read = np.zeros(7 + array.nbytes, int)
    for start, count in seen:
        read[start : start + count] += 1
    assert read.max() == 1
    assert (read[7:].reshape(-1, dtype.itemsize)[flat] == 1).all()


def test_columns_are_read_by_row_or_with_complete_rows():
    for columns, reads in ((1 << 15, 64), (1 << 10, 1)):
        seen: list[tuple[int, int]] = []
        array = counted(stored(noise((64, columns), U8), U8), seen)
        array.read(Region((0, 5), (64, 6)))
        assert len(seen) == reads


def test_long_runs_are_read_without_gaps():
    seen: list[tuple[int, int]] = []
    array = counted(stored(noise((4, 1 << 16), U8), U8), seen)
    array.read(Region((1, 5), (4, 5 + (1 << 14))))
    assert seen == [(k * (1 << 16) + 5, 1 << 14) for k in (1, 2, 3)]


@given(st.data())
def test_packed_array_reads_only_its_own_bytes(data):
    dtype = data.draw(st.sampled_from([d for d in DTYPES.values() if d.packed]))
    truth, seen = noise(data.draw(shapes(min_rank=1, limit=400)), dtype), []
    array = counted(stored(truth, dtype, lead=3), seen)
    region = data.draw(regions(truth.shape))
    array.read(region)
    read = sum(n for _, n in seen)
    assert read <= array.read_cost(region).nbytes + 2 * len(seen)
    assert all(start >= 3 and start + n <= 3 + array.stored_nbytes for start, n in seen)


@given(st.data())
def test_expressions_read_their_declared_cost(data):
    """No node reads behind the plan's back; a relayout's cover may make it read more than the region."""
    seen: list[tuple[int, int]] = []
    shape = data.draw(shapes(min_rank=1, max_rank=3, limit=300))
    parts = [counted(stored(noise(shape, BF16, k), BF16), seen) for k in range(2)]
    axis = data.draw(st.integers(0, len(shape)))
    array = take(stack(parts, axis), axis, 1)
    array = elementwise(array, Cast(F32))
    order = data.draw(orders(range(len(shape))))
    array = relayout(array, [(n,) for n in shape], order, [1] * len(shape))
    region = data.draw(regions(array.shape))
    with patch.object(storing, "_SHORT_RUN", 1):
        array.read(region)
        cost = array.read_cost(region)
    nbytes = sum(n for _, n in seen)
    assert nbytes <= cost.nbytes <= storing._MAX_GROWTH * region.size * 2
    assert nbytes >= region.size * 2


@given(known=lazy_arrays(), data=st.data())
def test_costs_and_locations_exist_for_every_region(known, data):
    region = data.draw(regions(known.array.shape))
    cost = known.array.read_cost(region)
    file, offset = known.array.first_byte(region)
    assert cost.nbytes >= 0
    assert (cost.reads == 0) == (cost.nbytes == 0)
    sources = {source.path for source in known.array.sources()}
    assert offset >= 0
    assert file in sources | {""}
    assert (cost.nbytes > 0) <= bool(sources)


@given(st.data())
def test_chunk_cost_is_the_sum_of_overlapping_chunks(data):
    shape = data.draw(shapes(min_rank=0, max_rank=3))
    array = chunked(noise(shape, BF16), BF16, data.draw(chunk_shapes(shape, max_excess=2)))
    region = data.draw(regions(shape))
    met = [
        (array.part(index), grid_cell(shape, array.chunk, index).intersect(region), index)
        for index in grid_indices(shape, array.chunk)
    ]
    costs = (
        part.read_cost(inside.shifted([-i * c for i, c in zip(index, array.chunk, strict=True)]))
        for part, inside, index in met
        if inside is not None
    )
    assert array.read_cost(region) == sum(costs, ReadCost())


@given(st.data())
def test_inspecting_an_expression_reads_nothing(data):
    shape = data.draw(shapes(min_rank=2, max_rank=3))
    part = Stored(shape, BF16, UnreadableFile("f", 1 << 40), 100)
    whole = relayout(
        stack([part] * 3, 1),
        [(n,) for n in (shape[0], 3, *shape[1:])],
        range(len(shape) + 1)[::-1],
        [1] * (len(shape) + 1),
    )
    array = elementwise(whole, Cast(F32))
    region = data.draw(regions(array.shape))
    assert array.read_cost(region).nbytes >= region.size * 2
    assert array.first_byte(region)[0] == "f"
    assert array.scratch_bytes > 0
    assert "float32" in repr(array)
    with pytest.raises(ReadRefusedError, match="bytes of f were read"):
        array.read(region)


def test_huge_transpose_needs_little_scratch():
    huge = Stored((1 << 20, 1 << 18), BF16, UnreadableFile("f"), 0)
    turned = relayout(huge, [(1 << 20,), (1 << 18,)], (1, 0), (1, 1))
    assert elementwise(turned, Cast(F32)).scratch_bytes < 8 << 20


def test_huge_cast_needs_the_scratch_of_its_source():
    part = Stored((3, 5), F32, UnreadableFile("f"), 0)
    assert elementwise(part, Cast(BF16)).scratch_bytes >= 2 * part.nbytes


def test_relayout_reads_rope_halves_within_bounds():
    """Two neighbors of an interleaved head lie half a head apart: the read block between them is read."""
    seen: list[tuple[int, int]] = []
    truth = noise((64, 5), BF16)
    source = counted(stored(truth, BF16), seen)
    array = relayout(source, [(2, 2, 16), (5,)], (0, 2, 1, 3), (3, 1))
    region = Region((0, 0), (4, 5))
    assert bits(array.read(region)) == bits(
        truth.reshape(2, 2, 16, 5).transpose(0, 2, 1, 3).reshape(64, 5)[:4]
    )
    assert sum(n for _, n in seen) <= array.read_cost(region).nbytes <= source.nbytes


@given(st.data())
def test_relayout_region_costs_at_most_the_source(data):
    known = data.draw(relaid_arrays())
    region = data.draw(regions(known.array.shape))
    if isinstance(known.array, Relayout) and isinstance(source := known.array.source, Stored):
        boxes = len(list(known.array._atom_boxes(region)))
        assert known.array.read_cost(region).nbytes <= source.stored_nbytes * boxes


def test_identity_relayout_is_the_source():
    array = Constant((4, 1, 6), F32, bytes(4))
    assert relayout(array, [(4,), (1,), (6,)], (0, 1, 2), (1, 1, 1)) is array
    assert relayout(array, [(2, 2), (1,), (6,)], (2, 0, 1, 3), (2, 1, 1)).shape == (2, 2, 6)
    square = Constant((4, 4), F32, bytes(4))
    assert relayout(square, [(4,), (4,)], (1, 0), (1, 1)) is not square


@pytest.mark.parametrize(
    ("split", "order", "merge"),
    [
        ([(2, 3), (4,)], (0, 1, 2), (1, 1, 1)),
        ([(4,), (6,)], (0, 0), (1, 1)),
        ([(4,), (6,)], (0,), (1,)),
        ([(4,), (6,)], (1, 0), (1,)),
        ([(4,)], (0,), (1,)),
    ],
)
def test_relayout_refuses_non_permutations(split, order, merge):
    with pytest.raises(ShapeError):
        relayout(Constant((4, 6), F32, bytes(4)), split, order, merge)


def test_stack_refuses_differing_arrays():
    with pytest.raises(ShapeError, match="the same shape and dtype") as caught:
        stack([Constant((2,), F32, bytes(4)), Constant((3,), F32, bytes(4))], 0)
    assert "[2]" in caught.value.got
    assert "[3]" in caught.value.got
    with pytest.raises(ShapeError):
        stack([Constant((2,), F32, bytes(4)), Constant((2,), BF16, bytes(2))], 0)
    with pytest.raises(ShapeError) as caught:
        stack([], 0)
    assert caught.value.got == "none"


@pytest.mark.parametrize("index", [-1, 3])
def test_take_refuses_out_of_range_coordinates(index):
    with pytest.raises(ShapeError, match="no such coordinate"):
        take(Constant((3, 2), F32, bytes(4)), 0, index)


def test_layer_and_expert_axes_are_stacked_axes():
    leaf = Constant((4, 5), F32, bytes(4))
    experts = stack([leaf] * 3, 0)
    layers = stack([experts] * 2, 1)
    assert layers.shape == (3, 2, 4, 5)
    assert leaf.stacked_axes == ()
    assert experts.stacked_axes == (0,)
    assert layers.stacked_axes == (0, 1)
    assert stack([experts] * 2, 0).stacked_axes == (0, 1)
    assert stack([experts] * 2, 3).stacked_axes == (0, 3)


def test_cast_keeps_stacked_axes():
    layers = stack([Constant((4, 5), F32, bytes(4))] * 2, 1)
    assert elementwise(layers, Cast(BF16)).stacked_axes == (1,)


def test_truncated_file_is_reported():
    array = Stored((5,), F32, Bytes("short", bytes(18)), 0)
    with pytest.raises(FormatError, match="short ends too early"):
        array.read()


def test_chunked_array_reads_only_overlapping_chunks():
    truth = noise((5, 7), U8)
    whole = chunked(truth, U8, (2, 3))
    met: list[tuple[int, ...]] = []

    def part(index):
        met.append(index)
        return whole.part(index)

    array = Chunked(whole.shape, U8, whole.chunk, part)
    region = Region((1, 2), (3, 4))
    assert bits(array.read(region)) == bits(truth[region.slices])
    assert met == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({source.path for source in array.sources()}) == 9


def test_scratch_is_released_when_reading_fails():
    scratch = Scratch(1 << 14)
    for _ in range(9):
        with pytest.raises(ReadRefusedError):
            Stored((9, 9), F32, UnreadableFile("f"), 0).read_into(
                Region.whole((9, 9)), np.empty((9, 18), "<u4")[:, ::2], scratch
            )
    with scratch.take((scratch.nbytes,), np.dtype("u1")):
        pass


def test_scratch_refuses_requests_beyond_its_size():
    scratch = Scratch(4096)
    with scratch.take((1,), np.dtype("u1")), pytest.raises(MemoryError, match="4096 in use, 1 more expected"):
        scratch.take((1,), np.dtype("u1")).__enter__()
