from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    Cast,
    Constant,
    DataFile,
    Describer,
    Layout,
    Multiply,
    OrbaxWriter,
    Placement,
    Scratch,
    Stored,
    Zstd,
    build,
    elementwise,
    grid_cell,
    grid_indices,
    relayout,
    stack,
)

from ckpttools import DTYPES, MemoryBudgetError, Metadata, Region, Tree
from ckpttools.array import read_blocks
from ckpttools.core import memory_limit
from ckpttools.core.notes import Note, Notes
from ckpttools.plan import plan as planning
from ckpttools.plan.task import split_array
from ckpttools.testing.strategies import (
    UnreadableFile,
    chunk_shapes,
    lazy_arrays,
    noise,
    shapes,
    shuffled,
    stored,
)

BF16, F32 = DTYPES["bfloat16"], DTYPES["float32"]
MIB = 1 << 20


@dataclass(frozen=True)
class Grids:
    """A writer that puts arrays one after the other, with these chunk shapes; whole where none is named."""

    chunks: dict
    offset: int = 0
    name: str = "grids"

    def layout(self, tree, limit):
        placements, end = {}, self.offset
        for path, array in tree.arrays.items():
            chunk = self.chunks.get(path, array.shape)
            placements[path] = Placement(array.shape, array.dtype.itemsize, chunk, DataFile("data", end))
            end += placements[path].nbytes
        return Layout(placements, {"data": end})

    def finish(self, directory, tree, layout, extents):
        raise NotImplementedError


@pytest.fixture
def small():
    """Budgets and tasks of a size that fits the small arrays of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_limit, "BASELINE_BYTES", 0)
        patch.setattr(planning, "LARGEST_TASK", 256)
        patch.setattr(planning, "_SMALLEST_TASK", 16)
        patch.setattr(read_blocks, "READ_BLOCK_BYTES", 512)
        yield


@st.composite
def known_trees(draw):
    knowns = {("a", k): draw(lazy_arrays(depth=2, packed=False)) for k in range(draw(st.integers(1, 3)))}
    tree = Tree({path: known.array for path, known in knowns.items()})
    chunks = {path: draw(chunk_shapes(known.array.shape)) for path, known in knowns.items()}
    return tree, {path: known.truth for path, known in knowns.items()}, Grids(chunks)


def least(tree, writer, jobs=1):
    """The budget that a refusal asks for, in bytes."""
    with pytest.raises(MemoryBudgetError) as caught:
        build(tree, writer, memory=0, jobs=jobs)
    hint = caught.value.hint.removeprefix('try memory="').removesuffix('"')
    number, unit = hint[:-3], hint[-3:]
    assert unit == "MiB"
    return int(number) * MIB


@settings(max_examples=120)
@given(case=known_trees(), jobs=st.integers(1, 3), seed=st.integers(0, 1 << 32))
def test_tasks_write_the_same_files_in_any_order(small, case, jobs, seed):
    tree, truths, writer = case
    plan = build(tree, writer, memory=10 * MIB, jobs=jobs)
    assert plan.jobs == jobs
    file = bytearray(plan.layout.files["data"])
    scratch, buffer = Scratch(plan.scratch_bytes), Scratch(plan.buffer_bytes)
    for task in shuffled(plan.tasks, seed):
        array, placement = tree.arrays[task.path], plan.layout.placements[task.path]
        assert task.bytes_out == task.region.size * array.dtype.itemsize <= plan.buffer_bytes <= 256
        assert task.bytes_in == -(-task.region.size * array.stored_bits // 8)
        with buffer.take([task.region.shape[k] for k in placement.order], array.dtype.carrier) as memory:
            view = memory.transpose([int(k) for k in np.argsort(placement.order)])
            array.read_into(task.region, view, scratch)
            flat = memory.tobytes()
            for run in placement.runs(task.region):
                file[run.offset : run.offset + run.nbytes] = flat[run.position : run.position + run.nbytes]
    for path, truth in truths.items():
        check_chunks(file, plan.layout.placements[path], truth)


def check_chunks(file, placement, truth):
    for index in grid_indices(placement.shape, placement.chunk):
        cell = grid_cell(placement.shape, placement.chunk, index)
        padded = np.zeros(placement.chunk, truth.dtype)
        padded[tuple(slice(0, n) for n in cell.shape)] = truth[cell.slices]
        start = placement.chunk_range(index).offset
        assert bytes(file[start : start + placement.chunk_nbytes]) == padded.tobytes()


@given(case=known_trees())
def test_tasks_cover_every_array_exactly_once(small, case):
    tree, _, writer = case
    plan = build(tree, writer, memory=10 * MIB, jobs=1)
    seen = {path: np.zeros(array.shape, int) for path, array in tree.arrays.items()}
    for task in plan.tasks:
        seen[task.path][task.region.slices] += 1
    assert all((count == 1).all() for count in seen.values())
    assert plan.bytes_out == tree.nbytes
    assert [task.locality for task in plan.tasks] == sorted(task.locality for task in plan.tasks)


SIDES = st.sampled_from((1, 3, 7, 100, 1000, 4096, 14336, 128256))
LARGE = st.lists(SIDES, min_size=0, max_size=3).map(tuple).filter(lambda shape: prod(shape) < 1 << 36)


@st.composite
def large_trees(draw):
    """Trees of up to terabytes that cannot be read: whole files, transposed, stacked and cast."""
    leaves = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(LARGE)
        array = Stored(shape, draw(st.sampled_from((BF16, F32))), UnreadableFile(f"f{number}", 1 << 50), 8)
        kind = draw(st.sampled_from(("plain", "turned", "stacked", "cast", "both")))
        if kind in ("turned", "both"):
            order = draw(st.permutations(range(len(shape))))
            array = relayout(array, [(n,) for n in shape], order, [1] * len(shape))
        if kind in ("stacked", "both"):
            array = stack([array] * draw(st.integers(1, 9)), draw(st.integers(0, len(shape))))
        if kind in ("cast", "both"):
            array = elementwise(array, Cast(F32 if array.dtype == BF16 else BF16, array.dtype))
        leaves["leaf", number] = array
    return Tree(leaves)


def thrifty(tree):
    """Whether the tree can be planned in a moment: tasks are made one by one."""
    return tree.nbytes < 1 << 29


@settings(max_examples=25)
@given(tree=large_trees().filter(thrifty), jobs=st.integers(1, 8), data=st.data())
def test_projected_peak_never_exceeds_the_memory(tree, jobs, data):
    writer = OrbaxWriter()
    need = least(tree, writer, jobs)
    memory = need + data.draw(st.sampled_from((0, 0, MIB, 100 * MIB, 4096 * MIB)))
    plan = build(tree, writer, memory=memory, jobs=jobs)
    assert plan.projected_peak <= memory
    assert 1 <= plan.jobs <= jobs
    assert max(task.bytes_out for task in plan.tasks) == plan.buffer_bytes
    assert all(plan.scratch_bytes >= array.scratch_bytes for array in tree.arrays.values())
    for path, array in tree.arrays.items():
        assert sum(task.region.size for task in plan.tasks if task.path == path) == array.size


@settings(max_examples=60)
@given(tree=large_trees(), jobs=st.integers(1, 8))
def test_memory_below_the_minimum_is_refused(tree, jobs):
    writer = OrbaxWriter()
    need = least(tree, writer, jobs)
    with pytest.raises(MemoryBudgetError) as caught:
        build(tree, writer, memory=need - MIB, jobs=jobs)
    assert caught.value.hint == f'try memory="{need >> 20}MiB"'
    assert f"{(need >> 20) - 1}MiB" in caught.value.got
    assert caught.value.exit_code == 4


def test_huge_array_needs_little_memory():
    """Fewer, larger tasks take less memory than a million small ones."""
    huge = Tree({("w",): Stored((1000, 4096, 128256), BF16, UnreadableFile("f", 1 << 50), 0)})
    assert least(huge, OrbaxWriter()) < 320 * MIB


def test_awkward_shapes_stay_within_the_budget(small):
    """Halving threes leaves many small tiles: they count, too."""
    tree = Tree({("w",): stored(noise((3,) * 5, BF16), BF16)})
    for memory in range(500, 1 << 16, 97):
        try:
            plan = build(tree, Grids({("w",): (1,) * 5}), memory=memory, jobs=2)
        except MemoryBudgetError:
            continue
        assert plan.projected_peak <= memory


def test_more_memory_adds_workers_then_larger_tasks():
    tree = Tree({("w",): Stored((16384, 16384), F32, UnreadableFile("f", 1 << 31), 0)})
    plans = [build(tree, OrbaxWriter(), memory=m * MIB, jobs=4) for m in (110, 128, 256, 1024)]
    assert [plan.jobs for plan in plans] == sorted(plan.jobs for plan in plans)
    assert plans[-1].jobs == 4
    assert plans[-1].buffer_bytes > plans[0].buffer_bytes


def test_element_larger_than_the_limit_is_refused():
    array = Constant((2,), DTYPES["complex128"], bytes(16))
    placement = Placement((2,), 16, (2,), DataFile("data"))
    with pytest.raises(MemoryBudgetError, match="one element does not fit") as caught:
        list(split_array(("w",), array, placement, 15))
    assert caught.value.location == "w"
    assert len(list(split_array(("w",), array, placement, 16))) == 2


@given(shapes(limit=400), st.integers(1, 100), st.data())
def test_split_regions_stay_within_the_limit(shape, limit, data):
    array = stored(noise(shape, BF16), BF16)
    placement = Placement(shape, 2, data.draw(chunk_shapes(shape)), DataFile("data"))
    seen = np.zeros(shape, int)
    for task in split_array(("w",), array, placement, 2 * limit):
        assert 0 < task.region.size <= limit
        seen[task.region.slices] += 1
    assert (seen == 1).all()


@given(shapes(min_rank=1, limit=3000), st.integers(1, 300), st.sampled_from((None, Zstd(1))), st.data())
def test_tasks_larger_than_a_chunk_contain_complete_chunks(shape, limit, codec, data):
    """A chunk that two tasks share is written in two goes; one that is encoded must not be shared at all."""
    array, chunk = stored(noise(shape, BF16), BF16), data.draw(chunk_shapes(shape))
    placement = Placement(shape, 2, chunk, DataFile("data"), codec)
    for task in split_array(("w",), array, placement, 2 * max(limit, prod(chunk) if codec else 1)):
        for start, stop, whole, length in zip(task.region.start, task.region.stop, shape, chunk, strict=True):
            is_whole = start % length == 0 and (stop % length == 0 or stop == whole)
            assert is_whole or (codec is None and stop - start <= length)


def test_matrix_is_split_along_its_storage_axis():
    array = Stored((4096, 4096), BF16, UnreadableFile("f"), 0)
    placement = Placement((4096, 4096), 2, (512, 4096), DataFile("data"))
    regions = [task.region for task in split_array(("w",), array, placement, 8 * MIB)]
    assert regions == [Region((1024 * k, 0), (1024 * (k + 1), 4096)) for k in range(4)]


def one_leaf(**changes):
    options = {"path": "f", "version": "1", "offset": 0, "shape": (6, 4, 4), "dtype": BF16} | changes
    source = UnreadableFile(options["path"], 1 << 20, options["version"])
    array = Stored(options["shape"], options["dtype"], source, options["offset"])
    axes = range(3)
    order = options.get("order", axes)
    array = relayout(array, [(n,) for n in array.shape], order, (1, 1, 1))
    if "op" in options:
        array = elementwise(array, options["op"])
    return Tree({("params", "w"): array}, Metadata(custom={"scan_layers": options.get("scan", True)}))


def fingerprint(writer=None, notes=None, memory=1 << 30, **changes):
    return build(one_leaf(**changes), writer or Grids({}), memory=memory, jobs=2, notes=notes).fingerprint()


CHANGES = {
    "version": {"version": "2"},
    "file": {"path": "g"},
    "offset": {"offset": 8},
    "dtype": {"dtype": DTYPES["float16"]},
    "shape": {"shape": (6, 2, 8)},
    "order of axes of one length": {"order": (0, 2, 1)},
    "cast": {"op": Cast(DTYPES["float16"])},
    "scale": {"op": Multiply(0.25)},
    "another scale": {"op": Multiply(0.5)},
    "scan": {"scan": False},
    "chunks": {"writer": Grids({("params", "w"): (1, 4, 4)})},
    "place": {"writer": Grids({}, offset=64)},
    "notes": {"notes": Notes(inexact=(Note("w", "rounded"),))},
}


def test_equal_plans_have_one_fingerprint():
    assert fingerprint() == fingerprint()
    assert fingerprint(op=Multiply(0.25)) == fingerprint(op=Multiply(0.25))


def test_relative_file_names_are_described_as_absolute(tmp_path, monkeypatch):
    described = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        array = Stored((3, 3), BF16, UnreadableFile("model.safetensors"), 0)
        described.append(next(iter(Describer().lines(array))))
    assert described[0] != described[1]
    assert str(tmp_path / "a") in described[0][1]


def test_every_change_alters_the_fingerprint():
    result = {name: fingerprint(**change) for name, change in CHANGES.items()}
    result["none"] = fingerprint()
    names: dict[str, str] = {}
    for name, item in result.items():
        assert names.setdefault(item, name) == name


def test_scan_axis_of_a_square_stack_alters_the_fingerprint():
    parts = [Stored((3, 3), BF16, UnreadableFile(f"f{k}"), 0) for k in range(3)]
    plans = [build(Tree({("w",): stack(parts, k)}), Grids({}), memory=1 << 30, jobs=1) for k in range(3)]
    assert len({plan.fingerprint() for plan in plans}) == 3


def test_axis_order_of_a_cube_alters_the_fingerprint():
    """As the two layouts of RoPE: one shape, one source, the same first byte."""
    orders = ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 1, 2))
    assert len({fingerprint(shape=(4, 4, 4), order=order) for order in orders}) == 6


def test_constant_value_alters_the_fingerprint():
    trees = [Tree({("step",): Constant((), DTYPES["int64"], bytes([k] * 8))}) for k in range(2)]
    one, two = (build(tree, Grids({}), memory=1 << 30, jobs=1).fingerprint() for tree in trees)
    assert one != two


def test_descriptions_accept_only_nodes():
    with pytest.raises(TypeError, match="not a node"):
        list(Describer().lines("text"))


def test_sources_are_listed_once_by_path():
    parts = [Stored((3,), BF16, UnreadableFile(path), 0) for path in ("b", "a", "b")]
    plan = build(Tree({("w",): stack(parts, 0)}), Grids({}), memory=1 << 30, jobs=1)
    assert [source.path for source in plan.sources] == ["a", "b"]


def test_tasks_follow_their_sources():
    """Arrays are listed by name, but read in file order."""
    locations = {"a": 16, "b": 0, "c": 8}
    arrays = {(name,): Stored((4,), BF16, UnreadableFile("f"), offset) for name, offset in locations.items()}
    plan = build(Tree(arrays), Grids({}), memory=1 << 30, jobs=1)
    assert [task.path for task in plan.tasks] == [("b",), ("c",), ("a",)]


def test_empty_tree_has_an_empty_plan():
    plan = build(Tree({}), Grids({}), memory=1 << 30, jobs=4)
    assert (plan.tasks, plan.bytes_in, plan.bytes_out, plan.buffer_bytes) == ((), 0, 0, 0)
    assert plan.fingerprint()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_array_needs_no_task(shape):
    tree = Tree({(name,): Stored(n, BF16, UnreadableFile("f"), 0) for name, n in (("w", shape), ("v", (2,)))})
    writer = Grids({("w",): tuple(max(1, n) for n in shape)})
    plan = build(tree, writer, memory=1 << 30, jobs=1)
    assert [task.path for task in plan.tasks] == [("v",)]
