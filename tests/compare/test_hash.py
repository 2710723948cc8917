"""Digests: the same in every format, layout, chunking and order of reading; another for any other bit."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run
from support.digests import array_digest, tree_digest
from support.golden_data import golden_checkpoint
from support.internals import (
    Bytes,
    Chunked,
    Decoded,
    OrbaxWriter,
    SafetensorsWriter,
    Selection,
    ZarrWriter,
    grid_cell,
    grid_indices,
    parse_compression,
    take,
    to_maxtext,
)
from support.locations import DOCS, GOLDEN, ORBAX
from support.stored_trees import write

import ckpttools
from ckpttools import (
    DTYPES,
    FormatError,
    MemoryBudgetError,
    Metadata,
    Region,
    StackLayers,
    ToMaxText,
    Tree,
    UnknownNameError,
    UnstackLayers,
)
from ckpttools.digest import digest, digester
from ckpttools.digest.canonical import per_layer
from ckpttools.digest.digest import algorithm_named, block_ends
from ckpttools.digest.digester import BlockHasher, Digester, Room
from ckpttools.digest.hashing import hash_tree
from ckpttools.digest.stacks import assemble, cheapest_reads, complete_arrays
from ckpttools.plan import pieces
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import chunked, dtypes, lazy_arrays, noise, shapes, stored, tilings

MIB = 1 << 20
PLENTY = {"memory": 512 * MIB, "jobs": 2}
# Blocks so small that arrays of a test have several; a multiple of every element's size.
SMALL_BLOCK = 48


@contextmanager
def blocks_of(nbytes=SMALL_BLOCK):
    with patch.object(digest, "BLOCK_BYTES", nbytes), patch.object(digester, "BLOCK_BYTES", nbytes):
        yield


def hashed(truth, dtype, regions, *, room=MIB, algorithm="xxh3-128", arrange=lambda values: values):
    """The digest of an array that comes in `regions`, and whether there was room for it."""
    hasher = BlockHasher(truth.shape, dtype, algorithm, Room(room))
    for region in regions:
        hasher.add(region, arrange(truth[(*region.slices, ...)]))
    return hasher.digest().digest if hasher.is_complete else None


# Every other element of one twice as long, Fortran order, and a plain copy.
ARRANGEMENTS = (
    np.ascontiguousarray,
    np.asfortranarray,
    lambda values: np.repeat(values, 2, axis=-1)[..., ::2] if values.ndim else values,
)


@given(st.data(), shapes(), dtypes(packed=True), st.sampled_from(("xxh3-128", "sha256")))
def test_digest_is_independent_of_parts_and_order(data, shape, dtype, algorithm):
    truth = noise(shape, dtype, data.draw(st.integers(0, 9)))
    parts = data.draw(tilings(shape))
    arrange = data.draw(st.sampled_from(ARRANGEMENTS))
    with blocks_of():
        built = hashed(truth, dtype, parts, algorithm=algorithm, arrange=arrange)
    assert built == array_digest(truth, dtype.name, algorithm, SMALL_BLOCK)


@given(st.data(), shapes(min_rank=1), dtypes())
def test_any_flipped_bit_changes_the_digest(data, shape, dtype):
    truth = noise(shape, dtype)
    flipped = truth.copy()
    bits = flipped.reshape(-1).view(np.uint8)
    bits[data.draw(st.integers(0, bits.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with blocks_of():
        whole = [Region.whole(shape)]
        assert hashed(truth, dtype, whole) != hashed(flipped, dtype, whole)


def test_digest_depends_on_shape_dtype_and_block_order():
    same = np.zeros(24, np.uint16)
    digests = {
        hashed(same.reshape(shape).view(DTYPES[name].carrier), DTYPES[name], [Region.whole(shape)])
        for shape in ((24,), (4, 6), (6, 4), (24, 1), (2, 3, 4))
        for name in ("bfloat16", "float16", "int16")
    }
    assert len(digests) == 15
    blocks = np.repeat(np.arange(4, dtype=np.uint8), SMALL_BLOCK)
    swapped = np.repeat(np.array([0, 2, 1, 3], np.uint8), SMALL_BLOCK)
    with blocks_of():
        whole = [Region.whole(blocks.shape)]
        assert hashed(blocks, DTYPES["uint8"], whole) != hashed(swapped, DTYPES["uint8"], whole)


def test_empty_arrays_and_scalars_have_digests():
    assert hashed(np.zeros((0, 3), np.uint16), DTYPES["bfloat16"], []) == array_digest(
        np.zeros((0, 3), np.uint16), "bfloat16"
    )
    scalar = np.array(7, np.uint64)
    assert hashed(scalar, DTYPES["int64"], [Region.whole(())]) == array_digest(scalar, "int64")


def test_documented_digests_are_correct():
    """The digests in docs/internals.md."""
    text = (DOCS / "internals.md").read_text()
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    assert array_digest(values, "float32") in text
    assert tree_digest({"a": array_digest(values, "float32")}) in text


def test_digest_accepts_parts_from_several_threads():
    truth, dtype = noise((256, 300), DTYPES["bfloat16"]), DTYPES["bfloat16"]
    rows = [Region((k, 0), (k + 8, 300)) for k in range(0, 128, 8)]
    columns = [Region((128, k), (256, k + 20)) for k in range(0, 300, 20)]
    expected = array_digest(truth, "bfloat16", block=4096)
    for seed in range(20):
        parts = [*rows, *columns]
        np.random.default_rng(seed).shuffle(parts)
        with blocks_of(4096):
            hasher = BlockHasher(truth.shape, dtype, "xxh3-128", room := Room(MIB))
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda region, to=hasher: to.add(region, truth[region.slices]), parts))
        assert hasher.is_complete
        assert hasher.digest().digest == expected
        assert room.take(MIB), "all room is given back"


@given(st.data(), shapes(min_rank=1))
def test_hashing_can_be_retried_after_insufficient_memory(data, shape):
    dtype = DTYPES["uint16"]
    truth = noise(shape, dtype)
    parts = data.draw(tilings(shape))
    room = Room(data.draw(st.integers(0, 200)))
    with blocks_of():
        hasher = BlockHasher(shape, dtype, "xxh3-128", room)
        for region in parts:
            hasher.add(region, truth[region.slices])
        if not hasher.is_complete:
            hasher.restart()
            assert room.take(room.nbytes), "what was kept is given back"
            room.give(room.nbytes)
            hasher.add(Region.whole(shape), truth)
    assert hasher.digest().digest == array_digest(truth, "uint16", block=SMALL_BLOCK)


@given(st.lists(lazy_arrays(), min_size=1, max_size=4))
def test_any_array_has_the_digest_of_its_values(known):
    tree = Tree({(f"a{k}",): item.array for k, item in enumerate(known)})
    built = hash_tree(tree, **PLENTY)
    expected = {f"a{k}": array_digest(item.truth, item.array.dtype.name) for k, item in enumerate(known)}
    assert {name: item.digest for name, item in built.arrays.items()} == expected
    assert built.digest == built.parameters == tree_digest(expected)


def test_unknown_algorithm_is_refused():
    with pytest.raises(UnknownNameError, match="md5"):
        algorithm_named("md5")


# Layers stored together


def layered(layers: int = 3, width: int = 24) -> Tree:
    """Parameters, moments and a step of a small decoder, layers one by one."""
    leaves = {("params", "params", "decoder", "decoder_norm", "scale"): (width,)}
    for layer in range(layers):
        for head in (("params", "params"), ("opt_state", 0, "mu", "params")):
            key = (*head, "decoder", f"layers_{layer}")
            leaves[*key, "mlp", "wi_0", "kernel"] = (width, 2 * width)
            leaves[*key, "pre_self_attention_layer_norm", "scale"] = (width,)
    dtype = DTYPES["bfloat16"]
    arrays = {
        path: stored(noise(shape, dtype, seed), dtype, str(seed))
        for seed, (path, shape) in enumerate(leaves.items())
    }
    step = stored(np.array(4, np.uint64), DTYPES["int64"], "step")
    return Tree({("step",): step, **arrays}, Metadata(step=4))


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_and_unstacked_layers_have_the_same_digests(axis):
    tree = layered()
    stacked = StackLayers(axis=axis)(tree).tree
    assert len(stacked.arrays) < len(tree.arrays)
    assert hash_tree(stacked, **PLENTY) == hash_tree(tree, **PLENTY)
    assert hash_tree(UnstackLayers(axis=axis)(stacked).tree, **PLENTY) == hash_tree(tree, **PLENTY)
    whole = Selection(layers=False)
    assert hash_tree(stacked, whole, **PLENTY).digest != hash_tree(tree, whole, **PLENTY).digest


class Code:
    """A chunk that can only be decoded whole; notes how often it is."""

    source, offset, code, scratch_bytes = Bytes("code", b""), 0, "test", 0

    def __init__(self, truth, decoded):
        self.truth, self.decoded = truth, decoded
        self.nbytes = truth.nbytes

    def fetched(self, region):
        return self.nbytes

    def read_into(self, region, out, scratch):
        self.decoded.append(self.nbytes)
        out[...] = self.truth[region.slices]


def encoded(truth, dtype, chunk):
    """An array in such chunks, and the list of what was decoded."""
    decoded: list[int] = []
    parts = {
        index: Decoded(chunk, dtype, Code(truth[grid_cell(truth.shape, chunk, index).slices], decoded))
        for index in grid_indices(truth.shape, chunk)
    }
    return Chunked(truth.shape, dtype, chunk, parts.__getitem__, part_scratch=0), decoded


def test_chunks_of_several_layers_are_decoded_once():
    dtype = DTYPES["bfloat16"]
    truth = noise((64, 5, 48), dtype)
    source, decoded = encoded(truth, dtype, (16, 5, 48))
    arrays = {f"layers_{k}": take(source, 1, k) for k in range(5)}
    built = Digester(arrays, "xxh3-128").digests(**PLENTY)
    assert sum(decoded) == truth.nbytes
    assert [item.digest for item in built.values()] == [
        array_digest(truth[:, k], "bfloat16") for k in range(5)
    ]


def test_separately_stored_layers_are_read_separately():
    """Read together they would have to be copied apart."""
    dtype = DTYPES["bfloat16"]
    source = chunked(noise((64, 5, 48), dtype), dtype, (16, 1, 48))
    arrays = {f"layers_{k}": take(source, 1, k) for k in range(5)}
    assert [whole.array for whole in cheapest_reads(arrays)] == [*arrays.values()]
    assert [whole.array for whole in complete_arrays(arrays)] == [source]


def test_single_layer_digest_reads_only_that_layer():
    source = stored(noise((8, 5, 6), DTYPES["bfloat16"]), DTYPES["bfloat16"])
    read = []
    Digester({"layers_3": take(source, 1, 3)}, "xxh3-128").digests(**PLENTY, observe=read.append)
    assert sum(read) == 8 * 6 * 2


@given(st.data(), shapes(min_rank=2, max_rank=4, limit=300), st.integers(1, 2))
def test_split_and_joined_arrays_keep_their_values(data, shape, count):
    dtype = DTYPES["uint16"]
    truth = noise(shape, dtype)
    arrays = {"all": stored(truth, dtype)}
    for _ in range(count):
        arrays = {
            f"{name}/{k}": take(array, axis, k)
            for name, array in arrays.items()
            for axis in [len(shape) - 1 - count if len(array.shape) > count else 0]
            for k in range(array.shape[axis])
        }
    (whole,) = complete_arrays(arrays)
    again = assemble(whole, arrays)
    assert again.shape == shape
    assert np.array_equal(again.read().view(np.uint16), truth)
    seen = {name: np.zeros(array.shape, np.uint16) for name, array in arrays.items()}
    for region in data.draw(tilings(shape)):
        for name, inner, view in whole.split(region, truth[region.slices]):
            seen[name][(*inner.slices, ...)] = view
    assert all(np.array_equal(seen[name], array.read().view(np.uint16)) for name, array in arrays.items())


def test_columns_that_do_not_fit_are_reread():
    """Chunks of columns, each decoded whole for all layers; there is room for some layers at a time."""
    dtype, layer = DTYPES["uint16"], 64 * 64 * 2
    truth = noise((64, 6, 64), dtype)
    columns, decoded = encoded(truth, dtype, (64, 6, 4))
    arrays = {f"layers_{k}": take(columns, 1, k) for k in range(6)}
    expected = [array_digest(truth[:, k], "uint16") for k in range(6)]
    for room, passes in ((6 * layer, 1), (2 * layer, 3), (layer, 6)):
        decoded.clear()
        peak = SimpleNamespace(projected_peak=PLENTY["memory"] - room + digester.ROOM_BYTES)
        with (
            patch.object(pieces, "PIECE_BYTES", layer),
            patch.object(digester, "fit_pieces", lambda *_, peak=peak, **__: peak),
        ):
            digests = Digester(arrays, "xxh3-128").digests(**PLENTY)
        assert [item.digest for item in digests.values()] == expected
        assert sum(decoded) == passes * truth.nbytes


def test_insufficient_memory_is_an_error():
    """Blocks end within pieces, and nothing of them can wait."""
    dtype = DTYPES["uint8"]
    truth = noise((16, 100), dtype)
    peak = SimpleNamespace(projected_peak=PLENTY["memory"] + digester.ROOM_BYTES)
    with (
        patch.object(pieces, "PIECE_BYTES", 200),
        patch.object(digester, "fit_pieces", lambda *_, **__: peak),
        blocks_of(),
        pytest.raises(MemoryBudgetError, match="no array"),
    ):
        hash_tree(Tree({("a",): stored(truth, dtype)}), **PLENTY)


def test_too_little_memory_is_an_error():
    array = stored(noise((64,), DTYPES["uint8"]), DTYPES["uint8"])
    tree = Tree({("a",): array})
    with pytest.raises(MemoryBudgetError) as caught:
        hash_tree(tree, memory=8 * MIB, jobs=1)
    assert caught.value.got == 'memory="8MiB"'
    expected = int(caught.value.hint.removeprefix('try memory="').removesuffix('MiB"')) * MIB
    hash_tree(tree, memory=expected, jobs=1)
    with pytest.raises(MemoryBudgetError):
        hash_tree(tree, memory=expected - MIB, jobs=1)


# Formats

WRITERS = {
    "orbax": OrbaxWriter(),
    "orbax-zstd": OrbaxWriter(compression=parse_compression("zstd:1")),
    "orbax-zarr2-files": OrbaxWriter(ocdbt=False, zarr3=False),
    "safetensors": SafetensorsWriter(),
    "safetensors-shards": SafetensorsWriter(4000),
    "zarr3": ZarrWriter(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_digests_are_equal_in_every_format(name, tmp_path):
    tree = StackLayers()(layered()).tree
    write(tree, WRITERS[name], tmp_path / "made")
    built = ckpttools.open(tmp_path / "made")
    assert hash_tree(built, **PLENTY) == hash_tree(tree, **PLENTY)


def variants():
    """Checkpoints of one model: MaxText's own, in every layout."""
    yield golden_checkpoint(scan=True)
    yield golden_checkpoint(scan=False)
    yield from sorted(ORBAX.glob("llama3.1_scanned_*"))


def test_digests_are_equal_in_every_maxtext_layout():
    trees = [ckpttools.open(path) for path in variants()]
    assert len(trees) >= 6
    manifests = [hash_tree(tree, **PLENTY) for tree in trees]
    assert all(manifest == manifests[0] for manifest in manifests)
    arrays = per_layer(trees[0])
    expected = {name: array_digest(array.read(), array.dtype.name) for name, array in arrays.items()}
    assert {name: item.digest for name, item in manifests[0].arrays.items()} == expected
    assert manifests[0].digest == tree_digest(expected)
    del expected["step"]
    assert manifests[0].parameters == tree_digest(expected)


def test_single_file_and_shards_have_equal_digests():
    one, shards = (
        hash_tree(ckpttools.open(GOLDEN / "llama3.1" / name), **PLENTY) for name in ("hf", "hf_sharded")
    )
    assert one == shards
    assert len(one.arrays) == 39


@pytest.mark.parametrize("name", ["hf", "hf_sharded"])
def test_hugging_face_digest_equals_maxtext_under_its_names(name):
    def spelled_as_maxtext(tree):
        return per_layer(to_maxtext(tree, ToMaxText(scan=False)).state)

    selection = Selection(parameters=True, naming=spelled_as_maxtext)
    theirs = hash_tree(ckpttools.open(GOLDEN / "llama3.1" / name), selection, **PLENTY)
    ours = hash_tree(ckpttools.open(golden_checkpoint(scan=True)), **PLENTY)
    assert theirs.digest == theirs.parameters == ours.parameters


# The command


def test_equal_checkpoints_print_the_same_output():
    first, second = (run("hash", golden_checkpoint(scan)) for scan in (True, False))
    assert first == second
    *lines, parameters, everything = first.splitlines()
    named = dict(reversed(line.split("  ")) for line in lines)
    assert len(named) == 40
    assert everything == f"{tree_digest(named)}  (everything)"
    del named["step"]
    assert parameters == f"{tree_digest(named)}  (parameters)"


def test_layers_are_sorted_numerically(tmp_path):
    write(layered(layers=11), OrbaxWriter(), tmp_path / "made")
    names = [line.split("  ")[1] for line in run("hash", tmp_path / "made", "--parameters").splitlines()[:-2]]
    scales = [name for name in names if name.endswith("norm/scale")]
    assert [name.split("/")[1] for name in scales] == ["decoder_norm", *(f"layers_{k}" for k in range(11))]


def test_hash_options_appear_in_json():
    path = golden_checkpoint(scan=True)
    report = json.loads(
        run("hash", path, "--json", "--algorithm", "sha256", "--whole", "--filter", "*/wi_?/*")
    )
    assert report["algorithm"] == "sha256"
    assert not report["per_layer"]
    assert [(item["name"], item["shape"]) for item in report["arrays"]] == [
        ("decoder/layers/mlp/wi_0/kernel", [64, 4, 128]),
        ("decoder/layers/mlp/wi_1/kernel", [64, 4, 128]),
    ]
    values = ckpttools.open(path)["params", "params", "decoder", "layers", "mlp", "wi_0", "kernel"].read()
    assert report["arrays"][0]["digest"] == array_digest(values, "bfloat16", "sha256")
    everything, parameters = (
        json.loads(run("hash", path, "--json", *flag)) for flag in ([], ["--parameters"])
    )
    assert (
        everything["parameters"] == parameters["parameters"] == parameters["digest"] != everything["digest"]
    )


def test_unmatched_pattern_is_refused():
    assert "'*.bias'" in run("hash", golden_checkpoint(scan=True), "--filter", "*.bias", code=2)


def test_unrelated_layers_can_be_hashed_as_stored(tmp_path):
    dtype = DTYPES["float32"]
    head = ("params", "params", "decoder", "layers")
    shapes_of = {"a": (8, 4), "b": (8, 4), "c": (7, 5)}
    leaves = {(*head, name): stored(noise(shape, dtype), dtype, name) for name, shape in shapes_of.items()}
    write(Tree(leaves, Metadata(step=0)), OrbaxWriter(), tmp_path / "odd")
    assert "--whole" in run("hash", tmp_path / "odd", code=3)
    assert len(run("hash", tmp_path / "odd", "--whole").splitlines()) == 5


def test_optimizer_state_with_other_shapes_is_hashed_as_stored():
    tree = StackLayers()(layered()).tree
    factored = ("opt_state", 0, "v_row", "params", "decoder", "layers", "mlp", "wi_0", "kernel")
    odd = Tree({**tree, factored: stored(noise((24,), DTYPES["float32"]), DTYPES["float32"])}, tree.metadata)
    names = per_layer(odd)
    assert "decoder/layers_2/mlp/wi_0/kernel" in names
    assert "opt_state/0/v_row/params/decoder/layers/mlp/wi_0/kernel" in names


def test_duplicate_names_are_refused():
    dtype = DTYPES["uint8"]
    paths = (("params", "params", "opt_state", "a"), ("opt_state", "a"))
    tree = Tree({path: stored(noise((2,), dtype), dtype) for path in paths})
    with pytest.raises(FormatError, match="one name"):
        per_layer(tree)


@given(shapes(), st.integers(0, 40))
def test_block_range_covers_its_elements(shape, block):
    with blocks_of():
        truth = np.arange(int(np.prod(shape))).reshape(shape)
        block %= max(1, -(-truth.size * 4 // SMALL_BLOCK))
        first, last = block_ends(shape, 4, block)
        assert truth[first] == block * SMALL_BLOCK // 4
        assert truth[last] == min(truth.size, (block + 1) * SMALL_BLOCK // 4) - 1


HASH = """
import json, sys
import ckpttools
from ckpttools.digest.hashing import hash_tree
from ckpttools.core.process_memory import peak_bytes
manifest = hash_tree(ckpttools.open(sys.argv[1]), memory=int(sys.argv[2]), jobs=2)
print(json.dumps({"peak": peak_bytes(), "digest": manifest.digest}))
"""


def test_hash_stays_within_the_memory_limit(tmp_path):
    sizes = LlamaSizes(layers=2, hidden=2048, mlp=16384, heads=16, kv_heads=4, head_dim=128, vocab=32768)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    digests = set()
    for memory in (128 * MIB, 512 * MIB):
        command = [sys.executable, "-c", HASH, str(tmp_path / "hf"), str(memory)]
        done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert done["peak"] <= memory
        digests.add(done["digest"])
    assert len(digests) == 1
