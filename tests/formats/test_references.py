"""Checkpoints of references: the same as if all had been written, over files that are shared, not touched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt, with_flags
from support.golden_data import (
    all_described,
    arrays_by_tensorstore,
    golden_arrays,
    golden_leaves,
    opened_by_tensorstore,
)
from support.internals import (
    Cast,
    Constant,
    LocalFile,
    OrbaxWriter,
    Stored,
    TaskDone,
    ZarrWriter,
    Zstd,
    build,
    elementwise,
    entries_of,
    execute,
    grid_cell,
    grid_indices,
    parse,
    relayout,
    stack,
    take,
    window,
)
from support.locations import GOLDEN
from support.orbax_loads import some_cases
from support.scripts import answers
from support.stored_trees import write

import ckpttools
from ckpttools import (
    DTYPES,
    FormatError,
    LazyArray,
    Metadata,
    NoSpaceError,
    Resources,
    ToMaxText,
    Tree,
    UsageError,
    plan_to_maxtext,
)
from ckpttools.array.nodes import Stack, Take
from ckpttools.cli.options import ANY_PATH
from ckpttools.cli.write import storage_options
from ckpttools.formats import references
from ckpttools.formats.blocks import Finder, chunks_of
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES
from ckpttools.formats.placement import Referenced
from ckpttools.formats.references import ReferenceMode, References, reference_mode
from ckpttools.formats.registry import writer_for
from ckpttools.formats.zarr import chunking
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import assert_same, groupings, noise, regions, stored

ANY = ReferenceMode.ANY_ORDER
SAME = ReferenceMode.SAME_ORDER
BF16 = DTYPES["bfloat16"]
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def tiny_chunks_count(monkeypatch):
    monkeypatch.setattr(references, "FINE", 1)


def writer(mode: ReferenceMode, destination: Path | None = None) -> OrbaxWriter:
    return OrbaxWriter(references=References(mode, destination and parse(destination)))


def planned(tree: Tree, mode: ReferenceMode, destination: Path | None = None):
    return build(tree, writer(mode, destination), memory=1 << 30, jobs=2)


def digests(directory: Path) -> dict[str, str]:
    """Every file below a directory with its content and the time of its last change."""
    files = (file for file in sorted(directory.rglob("*")) if file.is_file())
    return {
        str(
            file.relative_to(directory)
        ): f"{hashlib.sha256(file.read_bytes()).hexdigest()} {file.stat().st_mtime_ns}"
        for file in files
    }


def is_referenced(plan, *path) -> bool:
    return isinstance(plan.layout.placements[path].home, Referenced)


# Where arrays come from: every way to store them that can be referred to, with ragged edges.

SHAPE = (5, 12, 4)
LAYERS = 3


def sources() -> Tree:
    """Three arrays of one shape for each dtype, as three layers have them; and some of their own."""
    leaves = {
        (dtype, f"w{k}"): stored(noise(SHAPE, DTYPES[dtype], k), DTYPES[dtype], f"{dtype}{k}")
        for dtype in ("bfloat16", "float32")
        for k in range(LAYERS)
    }
    leaves["wide",] = stored(noise((2, 3, 4, 5), BF16, 7), BF16, "wide")
    leaves["step",] = stored(noise((), DTYPES["int32"], 8), DTYPES["int32"], "step")
    return Tree(leaves, Metadata(step=0))


def stored_by(kind: str, directory: Path) -> Tree:
    """`sources` on disk."""
    if kind == "safetensors":
        arrays = {".".join(map(str, path)): array.read() for path, array in sources().arrays.items()}
        save_file(arrays, directory / "model.safetensors")
        return ckpttools.open(directory / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "chunk_shape", ragged)
        for module in ("orbax.write", "zarr.write"):
            patch.setattr(f"ckpttools.formats.{module}.chunk_shape", ragged)
        write(sources(), WRITERS[kind], directory / "out")
    return ckpttools.open(directory / "out")


def ragged(shape, itemsize, single_axes, largest=None):
    """Cells that do not divide the axes, and some that do; the second axis is whole for larger elements."""
    cells = (2, 3 if itemsize == 2 else 12, 3) if len(shape) == 3 else (1, 3, 2, 5)
    return tuple(min(cell, n) for cell, n in zip(cells, shape, strict=False))


WRITERS = {
    "raw": OrbaxWriter(),
    "zstd": OrbaxWriter(compression=Zstd(1)),
    "files": OrbaxWriter(ocdbt=False),
    "zarr2": OrbaxWriter(zarr3=False, compression=Zstd(3)),
    "zarr2-raw": OrbaxWriter(zarr3=False),
    "zarr3": ZarrWriter(),
}
KINDS = ("safetensors", *WRITERS)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Tree]:
    return {kind: stored_by(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


# Expressions: what transforms and rows make of stored arrays.


orders = cache(st.permutations)


@cache
def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


def factors(draw, number: int) -> tuple[int, ...]:
    first = draw(divisors(number))
    return (first, number // first) if draw(st.booleans()) else (number,)


def a_move(draw, shape: tuple[int, ...]):
    """A function of arrays of `shape` that moves elements."""
    kind = draw(MOVES) if shape else "relayout"
    if kind == "take":
        axis = draw(st.integers(0, len(shape) - 1))
        return partial(take, axis=axis, index=draw(st.integers(0, shape[axis] - 1)))
    if kind == "window":
        region = draw(regions(shape))
        return partial(window, start=region.start, shape=region.shape)
    split = [factors(draw, length) for length in shape]
    atoms = sum(map(len, split))
    order = draw(orders(range(atoms)))
    if draw(st.booleans()):
        return partial(relayout, split=split, order=order, merge=[1] * atoms)
    merge = [len(group) for group in draw(groupings(tuple(range(atoms))))]
    return partial(relayout, split=split, order=order, merge=merge)


MOVES = st.sampled_from(("relayout", "relayout", "take", "window"))


@st.composite
def expressions(draw, tree: Tree) -> LazyArray:
    """Stacks, parts and rearrangements of what a tree holds."""
    arrays = list(tree.arrays.values())
    first = draw(st.sampled_from(arrays))
    alike = [array for array in arrays if (array.shape, array.dtype) == (first.shape, first.dtype)]
    for _ in range(draw(st.integers(0, 4))):
        first = alike[0]
        if len(first.shape) < 6 and draw(st.integers(0, 2)) == 0:
            axis = draw(st.integers(0, len(first.shape)))
            count = draw(st.integers(1, 3))
            parts = [draw(orders(range(len(alike)))) * count for _ in range(2)]
            alike = [stack([alike[k] for k in some[:count]], axis) for some in parts]
        else:
            move = a_move(draw, first.shape)
            alike = [move(array) for array in alike]
    return alike[0]


def bytes_of(locations, position: int) -> np.ndarray:
    source, start, nbytes = locations[position]
    out = bytearray(nbytes)
    source.read_into(start, out)
    return np.frombuffer(bytes(out), np.uint8)


@pytest.mark.parametrize("kind", ("safetensors", "raw", "files", "zarr2-raw", "zarr3"))
@settings(max_examples=50)
@given(data=st.data())
def test_every_chunk_has_the_bytes_of_its_location(stores, kind, data):
    """Plain chunks are checked against the array itself, whatever it is made of."""
    array = data.draw(expressions(stores[kind]))
    blocks = Finder().blocks(array)
    chunks = (
        None if blocks is None else chunks_of(blocks, data.draw(st.sampled_from((8, 64, 1 << 20, 1 << 20))))
    )
    if chunks is None:
        return
    truth = array.read().view(array.dtype.carrier)
    cells = list(grid_indices(array.shape, chunks.chunk))
    locations = list(chunks.locations())
    assert len(cells) == len(locations) == chunks.count
    order = list(range(len(array.shape)))
    if chunks.codecs[0]["name"] == "transpose":
        order = chunks.codecs[0]["configuration"]["order"]
    for position, index in enumerate(cells):
        cell = grid_cell(array.shape, chunks.chunk, index)
        memory = bytes_of(locations, position).view(array.dtype.carrier)
        result = memory.reshape([chunks.chunk[axis] for axis in order]).transpose(np.argsort(order))
        assert np.array_equal(result[tuple(map(slice, cell.shape))], truth[cell.slices])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_referenced_arrays_read_like_copies(stores, kind, data, tmp_path_factory):
    """Random trees of random expressions, some of which must be written."""
    location = tmp_path_factory.mktemp("tree")
    mode = data.draw(st.sampled_from((SAME, ANY)))
    result = data.draw(st.lists(expressions(stores[kind]), min_size=1, max_size=4))
    leaves = {("params", f"w{k}"): array for k, array in enumerate(result)}
    leaves["params", "step"] = Constant((), DTYPES["int32"], b"\7\0\0\0")
    tree = Tree(leaves, Metadata(step=0))
    plan = planned(tree, mode, location / "out")
    tiles_every_array_once(plan)
    receipt = execute(plan, writer(mode), location / "out")
    assert receipt.bytes_referenced == plan.bytes_referenced
    assert (
        receipt.bytes_out + sum(a.nbytes for p, a in tree.arrays.items() if is_referenced(plan, *p))
        == tree.nbytes
    )
    assert_same(ckpttools.open(location / "out"), tree)
    by_tensorstore = arrays_by_tensorstore(location / "out" / "0" / "items")
    for path, array in tree.arrays.items():
        assert by_tensorstore["/".join(path)].tobytes() == array.read().tobytes(), path


def tiles_every_array_once(plan) -> None:
    """Every element is in one chunk that is referenced, or made by one task."""
    for path, array in plan.tree.arrays.items():
        placement = plan.layout.placements[path]
        counts = np.zeros(array.shape, int)
        for task in plan.tasks:
            if task.path == path:
                counts[task.region.slices] += 1
        if isinstance(placement.home, Referenced):
            indices = list(grid_indices(array.shape, placement.chunk))
            assert len(indices) == len(placement.home.numbers)
            for index in indices:
                counts[grid_cell(array.shape, placement.chunk, index).slices] += 1
        assert (counts == 1).all()


# What must be referenced, and what cannot be.


def hf_tree(location: Path, **arrays: np.ndarray) -> Tree:
    save_file(arrays, location)
    return ckpttools.open(location)


@pytest.fixture
def weights(tmp_path) -> list[LazyArray]:
    """Two layers of [out, in] = [6, 4]."""
    arrays = {f"w{k}": noise((6, 4), BF16, k).view(BF16.numpy) for k in range(2)}
    return list(hf_tree(tmp_path / "model.safetensors", **arrays).arrays.values())


TRANSPOSED = ([(6,), (4,)], (1, 0), (1, 1))


def chunks(array: LazyArray):
    blocks = Finder().blocks(array)
    return None if blocks is None else chunks_of(blocks, 1 << 20)


def test_stack_of_transposed_matrices_has_a_chunk_per_matrix(weights):
    result = chunks(stack([relayout(weight, *TRANSPOSED) for weight in weights], 1))
    assert result.chunk == (4, 1, 6)
    assert result.codecs[0] == {"name": "transpose", "configuration": {"order": [1, 2, 0]}}
    assert [location[1] for location in result.locations()] == [weight.offset for weight in weights]


def test_head_atoms_reference_the_same_bytes(weights):
    result = chunks(stack([relayout(weight, [(2, 3), (4,)], (2, 0, 1), (1, 1, 1)) for weight in weights], 1))
    assert result.chunk == (4, 1, 2, 3)
    assert result.codecs[0]["configuration"]["order"] == [1, 2, 3, 0]


def test_reshape_needs_no_transpose(weights):
    result = chunks(relayout(weights[0], [(2, 3), (4,)], (0, 1, 2), (1, 1, 1)))
    assert (result.chunk, result.is_in_order) == ((2, 3, 4), True)


def test_interleaved_rows_cannot_be_referenced(weights):
    assert chunks(relayout(weights[0], [(2, 3), (4,)], (1, 0, 2), (2, 1))) is None


def test_changed_values_cannot_be_referenced(weights):
    assert chunks(elementwise(weights[0], Cast(DTYPES["float32"], BF16))) is None


def test_outer_axis_of_a_range_can_be_indexed_and_sliced(weights):
    result = chunks(take(relayout(weights[0], [(2, 3), (4,)], (0, 1, 2), (1, 1, 1)), 0, 1))
    assert (result.chunk, next(result.locations())[1]) == ((3, 4), weights[0].offset + 24)
    result = chunks(window(weights[0], (2, 0), (3, 4)))
    assert (result.chunk, next(result.locations())[1]) == ((3, 4), weights[0].offset + 16)


def test_second_block_of_a_stack_keeps_its_location(weights):
    """A stack lists the blocks of its parts, also of one that is the second of two."""
    pair = Stack((2, 6, 4), BF16, tuple(weights), 0)
    taken = tuple(Take((6, 4), BF16, pair, 0, index) for index in (1, 0))
    result = chunks(Stack((2, 6, 4), BF16, taken, 0))
    assert [location[1] for location in result.locations()] == [weights[1].offset, weights[0].offset]


def test_large_ranges_become_even_chunks(weights):
    blocks = Finder().blocks(relayout(weights[0], *TRANSPOSED))
    assert chunks_of(blocks, 24).chunk == (4, 3)
    assert chunks_of(blocks, 25).chunk == (4, 3)
    assert chunks_of(blocks, 20).chunk == (4, 2)
    assert chunks_of(blocks, 8).chunk == (4, 1)
    # Not even single rows are so small: cutting them would serve nobody.
    assert chunks_of(blocks, 4).chunk == (4, 6)


def test_indexed_inner_axis_cannot_be_shared(tmp_path, monkeypatch):
    """Its elements are millions of places; they are not even listed."""
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 1 << 33)
    huge = Stored((1 << 16, 1 << 15, 2), BF16, LocalFile.at(tmp_path / "x"), 0)
    result = chunks(take(huge, 2, 1))
    assert (result.chunk, result.count) == ((1, 1), 1 << 31)
    monkeypatch.setattr(references, "FINE", 64 << 10)
    tree = Tree({("w",): take(huge, 2, 1)}, Metadata(step=0))
    assert references.find(tree, References(ANY), "d").links == {}


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_stacking_by_reference_needs_single_layer_chunks(stores, kind):
    tree = stores[kind]
    layers = [tree.arrays["float32", f"w{k}"] for k in range(LAYERS)]
    assert chunks(stack(layers, 1)).chunk == (2, 1, 12, 3)
    whole = tree.arrays["float32", "w0"]
    # Two of the first axis and three of the last one share a chunk.
    assert chunks(take(whole, 2, 1)) is None or kind == "raw"
    assert chunks(take(stack(layers, 1), 1, 2)).chunk == (2, 12, 3)


def test_layers_whose_chunks_differ_cannot_be_stacked(stores, weights):
    raw, zstd = (stores[kind].arrays["float32", "w0"] for kind in ("raw", "zstd"))
    assert chunks(stack([raw, zstd], 1)) is None
    # One shape, once stored so and once turned.
    square = [relayout(weight, [(6,), (4,)], (0, 1), (1, 1)) for weight in weights]
    turned = [relayout(window(weight, (0, 0), (4, 4)), [(4,), (4,)], (1, 0), (1, 1)) for weight in weights]
    assert chunks(stack([window(square[0], (0, 0), (4, 4)), turned[1]], 0)) is None
    assert chunks(stack(turned, 0)).chunk == (1, 4, 4)


def test_thousands_of_vectors_become_one_chunk(weights, monkeypatch, tmp_path):
    monkeypatch.setattr(references, "FINE", 1 << 10)
    tree = Tree({("alone",): weights[0], ("stacked",): stack(weights, 0)})
    plan = planned(tree, ANY)
    assert is_referenced(plan, "alone")
    assert not is_referenced(plan, "stacked")


def test_only_unchanged_arrays_count_as_same_order(weights, stores):
    tree = Tree({("range",): weights[0], ("chunks",): stores["zstd"].arrays["float32", "w0"]})
    assert [is_referenced(planned(tree, SAME), *path) for path in tree] == [False, True]
    assert [is_referenced(planned(tree, ANY), *path) for path in tree] == [True, True]
    assert planned(tree, ReferenceMode.NONE).layout.links == {}


def test_mode_follows_the_option_or_the_command():
    declared = {True: ANY, False: ReferenceMode.NONE}
    for asked, mode in declared.items():
        for default in (True, False):
            assert reference_mode(asked, by_default=default, encodes=True) is mode
    assert reference_mode(None, by_default=True, encodes=False) is SAME
    assert reference_mode(None, by_default=True, encodes=True) is ReferenceMode.NONE
    assert reference_mode(None, by_default=False, encodes=False) is ReferenceMode.NONE


@pytest.mark.parametrize(
    ("options", "copying", "sharing"),
    [
        ([], ReferenceMode.NONE, SAME),
        (["--reference"], ANY, ANY),
        (["--copy"], ReferenceMode.NONE, ReferenceMode.NONE),
        (["--compression", "none"], ReferenceMode.NONE, ReferenceMode.NONE),
        (["--target-data-file-size", "1GB"], ReferenceMode.NONE, ReferenceMode.NONE),
        (["--no-ocdbt"], ReferenceMode.NONE, ReferenceMode.NONE),
        (["--reference", "--compression", "zstd"], ANY, ANY),
    ],
)
def test_option_combinations_have_expected_mode(options, copying, sharing):
    for shares, mode in ((False, copying), (True, sharing)):
        seen = []

        @click.command()
        @click.argument("destination", type=ANY_PATH)
        @storage_options
        def command(destination, seen=seen, shares=shares, **storage):
            seen.append(writer_for(Tree({}), "orbax", destination, shares=shares, **storage).references)

        outcome = CliRunner().invoke(command, ["DST", *options])
        assert outcome.exit_code == 0, outcome.output
        (result,) = seen
        assert result.mode is mode
        assert result.destination == (None if mode is ReferenceMode.NONE else parse("DST"))


def test_command_line_reports_shared_bytes(model, tmp_path):
    command = ["convert", "hf-to-maxtext", str(model), str(tmp_path / "out"), "--reference"]
    plan = json.loads(ckpt(*command, "--dry-run", "--json").stdout)
    assert list(plan["links"].values()) == [str(model / "model.safetensors")]
    assert [*sorted(path.name for path in tmp_path.iterdir())] == ["hf"]
    text = ckpt(*command, "--dry-run").stdout
    assert "\nshare " in text
    assert "slower" in text
    receipt = json.loads(ckpt(*command, "--json").stdout)
    assert receipt["bytes_referenced"] == plan["bytes_referenced"] > 0
    assert receipt["bytes_unreferenced"] == plan["bytes_unreferenced"] > 0
    told = f"DST shares files with SRC: {plan['bytes_unreferenced']:,} bytes in them are unused in DST"
    assert any(item.startswith(told) for item in plan["remarks"])
    plain = ["convert", "to-orbax", str(tmp_path / "out"), str(tmp_path / "plain"), "--copy"]
    assert " shared" not in ckpt(*plain).stdout
    assert_same(ckpttools.open(tmp_path / "plain"), ckpttools.open(tmp_path / "out"))


@pytest.mark.parametrize("how", [{"compression": Zstd(1)}, {"target_data_file_bytes": 64}])
def test_written_arrays_next_to_references_use_requested_codec(weights, tmp_path, how):
    turned = relayout(weights[1], *TRANSPOSED)
    changed = elementwise(weights[0], Cast(DTYPES["float32"], BF16))
    tree = Tree({("shared",): turned, ("written",): changed, ("too",): changed}, Metadata(step=0))
    mixed = OrbaxWriter(references=References(ANY), **how)
    plan = build(tree, mixed, memory=1 << 30, jobs=2)
    assert [is_referenced(plan, *path) for path in tree] == [True, False, False]
    tiles_every_array_once(plan)
    execute(plan, mixed, tmp_path / "out")
    assert_same(ckpttools.open(tmp_path / "out"), tree)
    result = opened_by_tensorstore(tmp_path / "out" / "0" / "items")
    assert ("zstd" in str(result["written"].spec())) == ("compression" in how)
    assert "transpose" in str(result["shared"].spec())


def test_plan_reports_slower_loading(weights, stores, monkeypatch):
    plain = Tree({("w",): weights[0]}, Metadata(step=0))
    turned = Tree({("w",): relayout(weights[0], *TRANSPOSED)}, Metadata(step=0))
    assert not any("slower" in remark for remark in planned(plain, ANY).remarks)
    assert any(
        "slower" in remark and "to-orbax --copy" in remark
        for remark in with_flags(planned(turned, ANY).raw_remarks)
    )
    monkeypatch.setattr(references, "_GIANT", 40)
    assert any("w stays in chunks of 48 B" in remark for remark in planned(plain, ANY).remarks)


@pytest.mark.parametrize("how", [{"ocdbt": False}, {"zarr3": False}])
def test_layouts_without_references_are_refused(how):
    with pytest.raises(UsageError, match="zarr v3 under OCDBT"):
        OrbaxWriter(references=References(ANY), **how)


# Samples that Orbax wrote.

ORBAX = GOLDEN.parent / "orbax"
BY_ORBAX = (
    "maxtext_run",
    "multihost_plain",
    "pytree_ocdbt1_zarr31",
    "standard",
    "llama3.1_scanned_zarr2_ocdbt",
    "tree_zoo",
)


@pytest.mark.parametrize("sample", BY_ORBAX)
def test_orbax_chunks_are_referenced(sample, tmp_path):
    source = ckpttools.open(ORBAX / sample)
    tree = source.with_metadata(step=0)
    before = digests(ORBAX / sample)
    plan = planned(tree, SAME, tmp_path / "out")
    receipt = execute(plan, writer(SAME), tmp_path / "out")
    # Random keys are written: what JAX wants to know of their chunks is written with them. So are booleans,
    # whose bytes are looked at.
    bools = {path for path, array in tree.arrays.items() if array.dtype.kind == "bool"}
    moved = bools | tree.metadata.key_impls.keys()
    assert {path for path in tree.arrays if not is_referenced(plan, *path)} == moved
    assert receipt.bytes_out == sum(tree.arrays[path].nbytes for path in moved)
    assert_same(ckpttools.open(tmp_path / "out"), tree)
    assert digests(ORBAX / sample) == before


def test_small_values_of_an_index_stay_in_the_index(tmp_path):
    """Orbax stores chunks of less than a kilobyte in the index itself."""
    source = ckpttools.open(ORBAX / "maxtext_run")
    plan = planned(source, SAME)
    inline = [home.inline for home in plan.layout.referenced if home.inline]
    assert inline
    write(source, OrbaxWriter(step=0, references=References(SAME)), tmp_path / "out")
    entries = entries_of(parse(tmp_path / "out" / "0" / "items"), True, MAX_INDEX_BYTES)
    values = [entries.get(key) for key in entries.below("") if not key.endswith("zarr.json")]
    assert {bytes} == set(map(type, values))
    assert_same(ckpttools.open(tmp_path / "out"), source.with_metadata(step=0))


def test_shards_of_several_pieces_are_shared_completely(tmp_path):
    import tensorstore as ts

    truth = np.arange(8 * 6 * 4, dtype=np.int32).reshape(8, 6, 4)
    inner = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 1}},
    ]
    codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 1, 2], "codecs": inner}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 1, 4]}}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/src/w/"},
        "metadata": {"shape": truth.shape, "data_type": "int32", "chunk_grid": grid, "codecs": codecs},
    }
    ts.open(spec, create=True).result().write(truth).result()
    (tmp_path / "src" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    array = ckpttools.open(tmp_path / "src").arrays["w",]
    layers = [take(array, 1, k) for k in range(6)]
    tree = Tree(
        {
            ("same",): array,
            ("back",): stack(layers, 2),
            **{(f"layer{k}",): item for k, item in enumerate(layers)},
        },
        Metadata(step=0),
    )
    plan = planned(tree, ANY)
    assert all(is_referenced(plan, *path) for path in tree)
    # Splitting an axis of a shard would move its pieces.
    assert chunks(relayout(array, [(4, 2), (6,), (4,)], (0, 1, 2, 3), (1, 1, 1, 1))) is None
    execute(plan, writer(ANY), tmp_path / "out")
    assert_same(ckpttools.open(tmp_path / "out"), tree)
    result = arrays_by_tensorstore(tmp_path / "out" / "0" / "items")
    assert np.array_equal(result["same"], truth)
    assert np.array_equal(result["back"], truth.transpose(0, 2, 1))
    assert np.array_equal(result["layer3"], truth[:, 3])


# The files.


@pytest.fixture
def model(tmp_path) -> Path:
    shutil.copytree(GOLDEN / "llama3.1" / "hf", tmp_path / "hf")
    return tmp_path / "hf"


def by_reference(model: Path, out: Path, scan: bool = True, jobs: int | None = None):
    resources = Resources(jobs=jobs)
    return plan_to_maxtext(model, ToMaxText(scan=scan), writer=writer(ANY, out), resources=resources)


def test_referenced_source_can_be_deleted(model, tmp_path):
    before = digests(model)
    receipt = by_reference(model, tmp_path / "out").run(tmp_path / "out")
    assert digests(model) == before
    assert receipt.bytes_referenced > 0.8 * receipt.bytes_out
    linked = tmp_path / "out" / "0" / "items" / "d" / "linked-00000-model.safetensors"
    assert linked.samefile(model / "model.safetensors")
    shutil.rmtree(model)
    result = all_described(arrays_by_tensorstore(tmp_path / "out" / "0" / "items"))
    assert result == golden_arrays("llama3.1", True)


def test_dead_bytes_are_counted(model, tmp_path):
    plan = by_reference(model, tmp_path / "out").plan
    size = (model / "model.safetensors").stat().st_size
    assert plan.bytes_unreferenced == size - plan.bytes_referenced
    assert plan.bytes_referenced + plan.bytes_out == plan.tree.nbytes
    assert any("--copy" in remark for remark in with_flags(plan.raw_remarks))


def test_shared_bytes_are_not_dead(weights):
    plan = planned(Tree({("a",): weights[0], ("b",): weights[0], ("c",): weights[1]}), ANY)
    (source,) = plan.layout.links.values()
    assert plan.bytes_referenced == 3 * 48
    assert plan.bytes_unreferenced == source.size - 2 * 48


def test_symbolic_link_shares_its_target(model, tmp_path):
    """As all files of the Hugging Face cache are."""
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    by_reference(model, tmp_path / "out").run(tmp_path / "out")
    linked = tmp_path / "out" / "0" / "items" / "d" / "linked-00000-model.safetensors"
    assert not linked.is_symlink()
    assert linked.samefile(tmp_path / "blob")


def test_references_of_references_keep_the_names_short(model, tmp_path):
    by_reference(model, tmp_path / "a").run(tmp_path / "a")
    for source, target in (("a", "b"), ("b", "c")):
        write(ckpttools.open(tmp_path / source), writer(SAME), tmp_path / target)
        shutil.rmtree(tmp_path / source)
    names = sorted(file.name for file in (tmp_path / "c" / "0" / "items" / "d").iterdir())
    assert [name for name in names if "linked" in name] == [
        "linked-00000-data",
        "linked-00001-model.safetensors",
    ]
    assert all_described(arrays_by_tensorstore(tmp_path / "c" / "0" / "items")) == golden_arrays(
        "llama3.1", True
    )


def test_plain_copy_equals_unreferenced_conversion(model, tmp_path):
    by_reference(model, tmp_path / "out").run(tmp_path / "out")
    write(ckpttools.open(tmp_path / "out"), OrbaxWriter(), tmp_path / "plain")
    plan_to_maxtext(model).run(tmp_path / "expected")
    item = Path("0", "items", "d", "data")
    assert (tmp_path / "plain" / item).read_bytes() == (tmp_path / "expected" / item).read_bytes()


def test_transposed_square_matrices_are_read_within_their_scratch(tmp_path):
    side = 1200
    tree = hf_tree(tmp_path / "m.safetensors", w=noise((side, side), DTYPES["uint16"]).view(np.uint16))
    turned = Tree({("w",): relayout(tree.arrays["w",], [(side,), (side,)], (1, 0), (1, 1))}, Metadata(step=0))
    write(turned, writer(ANY), tmp_path / "out")
    back = ckpttools.open(tmp_path / "out")
    assert_same(back, turned)
    write(back, OrbaxWriter(), tmp_path / "plain")
    assert_same(ckpttools.open(tmp_path / "plain"), turned)


@pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == Path("/tmp").stat().st_dev,
    reason="needs two file systems",
)
def test_other_file_system_is_detected_before_writing(model, tmp_path):
    location = SHARED_MEMORY / f"ckpttools-{os.getpid()}"
    try:
        plan = by_reference(model, location / "out").plan
        assert (plan.bytes_referenced, plan.layout.links) == (0, {})
        assert any("cross-device" in remark.lower() for remark in plan.remarks)
        assert not location.exists()
        # A plan that does not know where it will be carried out finds out then.
        conversion = plan_to_maxtext(model, writer=writer(ANY))
        receipt = conversion.run(location / "out")
        assert receipt.bytes_unlinked == receipt.bytes_referenced > 0
        result = all_described(arrays_by_tensorstore(location / "out" / "0" / "items"))
        assert result == golden_arrays("llama3.1", True)
        (linked,) = (location / "out" / "0" / "items" / "d").glob("linked-*")
        source = model / "model.safetensors"
        assert linked.stat().st_size == source.stat().st_size
        assert linked.stat().st_blocks < source.stat().st_blocks
    finally:
        shutil.rmtree(location, ignore_errors=True)


def refusing(number: int):
    def link(*names: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return link


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_refused_links_are_copies_in_the_plan(model, tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "link", refusing(number))
    conversion = by_reference(model, tmp_path / "out")
    assert conversion.plan.bytes_referenced == 0
    assert any(os.strerror(number) in remark for remark in conversion.plan.remarks)
    receipt = conversion.run(tmp_path / "out")
    assert (receipt.bytes_referenced, receipt.bytes_unlinked) == (0, 0)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_refused_links_become_copies(model, tmp_path, monkeypatch, number):
    conversion = by_reference(model, tmp_path / "out")
    monkeypatch.setattr(os, "link", refusing(number))
    receipt = conversion.run(tmp_path / "out")
    assert receipt.bytes_unlinked == receipt.bytes_referenced > 0
    (copied,) = (tmp_path / "out" / "0" / "items" / "d").glob("linked-*")
    assert not copied.samefile(model / "model.safetensors")
    result = all_described(arrays_by_tensorstore(tmp_path / "out" / "0" / "items"))
    assert result == golden_arrays("llama3.1", True)


def test_full_disk_is_reported(model, tmp_path, monkeypatch):
    conversion = by_reference(model, tmp_path / "out")
    monkeypatch.setattr(os, "link", refusing(errno.ENOSPC))
    with pytest.raises(NoSpaceError, match="the disk is full"):
        conversion.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["touched", "the header, at the same time"])
def test_changed_source_is_not_linked(model, tmp_path, how):
    conversion = by_reference(model, tmp_path / "out")
    path = model / "model.safetensors"
    before = path.stat()
    if how == "touched":
        os.utime(path, ns=(0, 0))
    else:
        with path.open("r+b") as file:
            file.seek(9)
            file.write(b"\x01")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FormatError, match="was changed while it was read") as error:
        conversion.run(tmp_path / "out")
    assert ("1970-01-01T00:00:00Z" if how == "touched" else "its header was rewritten") in error.value.got
    assert not (tmp_path / "out").exists()


class InterruptionError(Exception):
    pass


def interrupt(event):
    if isinstance(event, TaskDone):
        raise InterruptionError


def test_interrupted_conversion_resumes(model, tmp_path):
    """First links are refused, then they are not: the copy goes, and the source is not written to."""
    before = digests(model)
    out, partial_out = tmp_path / "out", tmp_path / "out.partial"
    for refused in (True, False):
        # Several workers may have done all tasks before the interruption stops them.
        conversion = by_reference(model, out, jobs=1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptionError):
            if refused:
                patch.setattr(os, "link", refusing(errno.EMLINK))
            conversion.run(out, observe=interrupt)
        (linked,) = (partial_out / "content" / "0" / "items" / "d").glob("linked-*")
        assert linked.samefile(model / "model.safetensors") is not refused
    receipt = by_reference(model, out, jobs=1).run(out)
    assert receipt.tasks_resumed > 0
    assert receipt.bytes_unlinked == 0
    assert not partial_out.exists()
    assert all_described(arrays_by_tensorstore(out / "0" / "items")) == golden_arrays("llama3.1", True)
    assert digests(model) == before


KILLED = """
import os, pathlib, signal, sys, time
from ckpttools import plan_to_maxtext
from ckpttools.formats import references
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.references import ReferenceMode, References
from ckpttools.plan import plan
from ckpttools.run import threads
from ckpttools.run.events import TaskDone
from ckpttools.stores.local.journal import JOURNAL as NAME
references.FINE, threads._SYNC_SECONDS = 1, 0.001
plan.LARGEST_TASK, plan._SMALLEST_TASK = 1 << 12, 1 << 10
source, out, entries = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
def observe(event):
    if isinstance(event, TaskDone):
        time.sleep(0.02)
    # Its first line is the plan's.
    if 0 <= entries < (out.with_name("out.partial") / NAME).read_bytes().count(b"\\n"):
        os.kill(os.getpid(), signal.SIGKILL)
writer = OrbaxWriter(references=References(ReferenceMode.ANY_ORDER))
print(plan_to_maxtext(source, writer=writer).run(out, observe=observe).tasks_resumed)
"""


def test_kill_nine_loses_nothing(model, tmp_path):
    before = digests(model)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(model), str(out)]
    for entries in ("0", "8"):
        assert subprocess.run([*command, entries], check=False).returncode == -9
        assert not out.exists()
    assert list((tmp_path / "out.partial" / "content" / "0" / "items" / "d").glob("linked-*"))
    ended = subprocess.run([*command, "-1"], check=True, capture_output=True, text=True)
    assert int(ended.stdout) >= 8
    assert not (tmp_path / "out.partial").exists()
    assert all_described(arrays_by_tensorstore(out / "0" / "items")) == golden_arrays("llama3.1", True)
    assert digests(model) == before


def test_weights_file_is_not_shared_for_a_single_scalar(model, tmp_path):
    """All is cast but the step, which would keep the old weights on the disk."""
    plan_to_maxtext(model).run(tmp_path / "old")
    arguments = ["cast", str(tmp_path / "old"), str(tmp_path / "new"), "--dtype", "float32", "--json"]
    result = ckpt(*arguments)
    assert json.loads(result.stdout)["bytes_referenced"] == 0
    assert not list((tmp_path / "new").rglob("linked-*"))


def test_shared_files_do_not_count_as_reclaimable(model, tmp_path):
    """What an unfinished conversion shares is not freed when it is done anew."""
    from ckpttools.stores.local.directory import disk_usage

    (tmp_path / "x").mkdir()
    os.link(model / "model.safetensors", tmp_path / "x" / "linked")
    (tmp_path / "x" / "own").write_bytes(b"x" * 8192)
    assert disk_usage(tmp_path / "x") < 3 * 8192


def test_source_is_not_replaced_by_sharing_output(model, tmp_path):
    by_reference(model, tmp_path / "out").run(tmp_path / "out")
    before = digests(tmp_path / "out")
    tree = ckpttools.open(tmp_path / "out")
    kept = Tree({path: leaf for path, leaf in tree.items() if "mlp" in path}, tree.metadata)
    with pytest.raises(UsageError, match="`destination` contains `source`"):
        execute(planned(kept, SAME), writer(SAME), tmp_path / "out", overwrite=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["hf", "out"]
    assert digests(tmp_path / "out") == before


def test_nine_thousand_tensors_stay_within_the_memory_limit(tmp_path):
    """As a process, since the memory of this one is that of all tests before."""
    sizes = LlamaSizes(layers=1000, hidden=256, mlp=256, heads=1, kv_heads=1, head_dim=32, vocab=1000)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    command = [
        Path(sys.executable).with_name("ckpt"),
        "convert",
        "hf-to-maxtext",
        tmp_path / "hf",
        tmp_path / "out",
    ]
    options = ["--reference", "--memory", "192MiB", "--json"]
    ended = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    receipt = json.loads(ended.stdout)
    assert receipt["bytes_referenced"] >= 1000 * 3 * 2 * 256 * 256
    assert receipt["peak_bytes"] < 192 << 20


# What Orbax makes of it.


def unstacked(tree: Tree, axis: int = 1) -> Tree:
    """The layers of a scanned checkpoint as arrays of their own."""
    leaves = {}
    for path, leaf in tree.items():
        if "layers" not in path:
            leaves[path] = leaf
            continue
        at = path.index("layers")
        for k in range(leaf.shape[axis]):
            leaves[(*path[:at], f"layers_{k}", *path[at + 1 :])] = take(leaf, axis, k)
    return Tree(leaves, tree.metadata)


def restacked(tree: Tree, like: Tree, axis: int = 1) -> Tree:
    """The inverse."""
    leaves = {}
    for path, leaf in like.items():
        if "layers" not in path:
            leaves[path] = tree[path]
            continue
        at = path.index("layers")
        parts = [tree[(*path[:at], f"layers_{k}", *path[at + 1 :])] for k in range(leaf.shape[axis])]
        leaves[path] = stack(parts, axis)
    return Tree(leaves, tree.metadata)


def test_orbax_loads_shared_chunks(model, tmp_path):
    """All public loaders on 8 devices, with and without targets; every source is gone by then."""
    runs = {name: tmp_path / name for name in ("hf", "unstacked", "restacked", "orbax")}
    runs["hf"] = tmp_path / "converted"
    by_reference(model, runs["hf"]).run(runs["hf"])
    scanned = ckpttools.open(runs["hf"])
    apart = unstacked(scanned).with_metadata(custom={"scan_layers": False})
    plan = planned(apart, SAME, runs["unstacked"])
    assert plan.bytes_referenced > 0.8 * apart.nbytes
    execute(plan, writer(SAME), runs["unstacked"])
    again = restacked(ckpttools.open(runs["unstacked"]), scanned).with_metadata(custom={"scan_layers": True})
    execute(planned(again, SAME), writer(SAME), runs["restacked"])
    by_orbax = ckpttools.open(GOLDEN / "llama3.1" / "maxtext_scanned").with_metadata(step=0)
    execute(planned(by_orbax, SAME), writer(SAME), runs["orbax"])
    shutil.rmtree(model)
    expected = {name: golden_leaves("llama3.1", name != "unstacked") for name in runs}
    # What lies elsewhere is found below all loaders: one of the runs meets each of them, and each target.
    jobs = [(name, str(runs[name]), expected[name], some_cases(k)[k::4]) for k, name in enumerate(runs)]
    results = answers("orbax_loader_script", jobs, tmp_path)
    problems = {
        f"{run} {case}": text for run, cases in results.items() for case, text in cases.items() if text
    }
    assert problems == {}
    assert {run: tuple(cases) for run, cases in results.items()} == {name: cases for name, *_, cases in jobs}
    assert sum(len(cases) for cases in results.values()) == 21
