"""Orbax in every storage layout: read by this package, by tensorstore, and loaded by Orbax itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.golden_data import described, kvstore
from support.internals import Appended, OrbaxWriter, TaskDone, Zstd, build, dotted, execute, parse_compression
from support.scripts import answers
from support.stored_trees import ARRAYS, EVERYTHING, STEP, ZARR3, array, contents, values, write

import ckpttools
from ckpttools import DTYPES, FormatError, LazyArray, Metadata, Text, Tree, UsageError
from ckpttools.codecs.zstd import HIGHEST_LEVEL, LARGEST_ENCODED
from ckpttools.core.dtypes import from_zarr2
from ckpttools.formats.orbax import format as orbax
from ckpttools.formats.zarr import chunking, zarr2
from ckpttools.plan import plan as planning
from ckpttools.run import threads
from ckpttools.testing.conformance import FormatTests
from ckpttools.testing.strategies import assert_same, stored

LOADERS = ("standard", "pytree", "manager", "v1_load")
ITEM = "state"
COMBINATIONS = {
    f"{'ocdbt' if ocdbt else 'files'}-{'zarr3' if zarr3 else 'zarr2'}-{codec.name if codec else 'raw'}": {
        "ocdbt": ocdbt,
        "zarr3": zarr3,
        "compression": codec,
    }
    for ocdbt, zarr3, codec in product((True, False), (True, False), (None, Zstd(3)))
}
EVERY = pytest.mark.parametrize("name", COMBINATIONS)
RAW = pytest.mark.parametrize("name", [name for name in COMBINATIONS if name.endswith("raw")])
TARGET = 3000
BARE = Tree({(): array("float32", 37, 5)}, Metadata(step=0))


def writer(name: str, **options: Any) -> OrbaxWriter:
    return OrbaxWriter(**{"step": STEP, "item": ITEM, **COMBINATIONS[name], **options})


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Arrays of a few KiB become several chunks, with cut edges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "SMALLEST", 2000)
        patch.setattr(chunking, "LARGEST", 1500)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_chunks):
    """Run directories by layout: of all kinds of leaf, of arrays only, of an array alone, of many files."""
    top = tmp_path_factory.mktemp("runs")
    for name in COMBINATIONS:
        write(EVERYTHING, writer(name), top / "everything" / name)
        write(ARRAYS, writer(name), top / "arrays" / name)
        write(BARE, writer(name, step=None), top / "bare" / name)
        if name.startswith("ocdbt"):
            write(ARRAYS, writer(name, target_data_file_bytes=TARGET), top / "target" / name)
    return top


def expected(tree: Tree) -> Any:
    """What Orbax restores, as the script spells it."""

    def leaf(path: Any, each: LazyArray) -> Any:
        if path in tree.metadata.scalars:
            return each.read().item()
        if path in tree.metadata.key_impls:
            return {"impl": tree.metadata.key_impls[path], "data": described(each.read())}
        return described(each.read())

    def spelled(node: Any, path: Any) -> Any:
        if isinstance(node, dict):
            return {key: spelled(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [spelled(value, (*path, key)) for key, value in enumerate(node)]
        return leaf(path, node) if isinstance(node, LazyArray) else node

    return spelled(tree.nested(), ())


def loaders_of(kind: str, name: str) -> tuple[str, ...]:
    """All; into shards, which takes them longest, two each: between them every pair of codec and loader."""
    if kind != "arrays":
        return LOADERS
    number = [*COMBINATIONS].index(name)
    first = number % 4 + 2 * (number // 4)
    return LOADERS[first % 4], LOADERS[(first + 1) % 4]


@pytest.fixture(scope="module")
def results(runs, tmp_path_factory):
    """What became of every loader: kind/layout -> loader -> problem. One process loads everything."""
    trees = {"everything": (EVERYTHING, False), "arrays": (ARRAYS, True), "target": (ARRAYS, False)}
    jobs = [
        (f"{kind}/{run.name}", str(run), STEP, ITEM, targeted, expected(tree), loaders_of(kind, run.name))
        for kind, (tree, targeted) in trees.items()
        for run in sorted((runs / kind).iterdir())
    ]
    jobs += [
        (f"bare/{name}", str(runs / "bare" / name), 0, ITEM, False, expected(BARE), LOADERS)
        for name in COMBINATIONS
    ]
    return answers("orbax_options_script", jobs, tmp_path_factory.mktemp("results"))


class TestOrbaxFiles(FormatTests):
    format = orbax.FORMAT
    dtypes = tuple(ZARR3.values())
    # Each is files of its own; all in one file are a thousand.
    most_leaves = 200

    def writer(self, tree):
        return OrbaxWriter(step=None, ocdbt=False)


class TestOrbaxZarr2Zstd(TestOrbaxFiles):
    most_leaves = 100

    def writer(self, tree):
        return OrbaxWriter(step=None, ocdbt=False, zarr3=False, compression=Zstd(1))


class TestOrbaxManyDataFiles(TestOrbaxFiles):
    def writer(self, tree):
        return OrbaxWriter(step=None, zarr3=False, target_data_file_bytes=1000)


class TestLoaders:
    """Every public loader of Orbax restores every layout."""

    @pytest.mark.parametrize("loader", LOADERS)
    @EVERY
    def test_every_leaf_loads_without_a_target(self, results, name, loader):
        assert results[f"everything/{name}"][loader] == ""

    @EVERY
    def test_every_array_loads_sharded(self, results, name):
        assert results[f"arrays/{name}"] == dict.fromkeys(loaders_of("arrays", name), "")

    @pytest.mark.parametrize("loader", LOADERS)
    @pytest.mark.parametrize("name", [name for name in COMBINATIONS if name.startswith("ocdbt")])
    def test_many_data_files_are_loaded(self, results, name, loader):
        assert results[f"target/{name}"][loader] == ""

    @pytest.mark.parametrize("loader", LOADERS)
    @EVERY
    def test_array_as_the_whole_tree_round_trips(self, results, name, loader):
        assert results[f"bare/{name}"][loader] == ""


class TestReadBack:
    @pytest.mark.parametrize("kind", ["everything", "arrays"])
    @EVERY
    def test_package_reads_every_layout(self, runs, name, kind):
        back = ckpttools.open(runs / kind / name)
        tree = EVERYTHING if kind == "everything" else ARRAYS
        assert_same(back, tree)
        assert list(back) == list(tree)
        assert back.metadata.key_impls == tree.metadata.key_impls

    @EVERY
    def test_array_as_the_whole_tree_round_trips(self, runs, name):
        assert_same(ckpttools.open(runs / "bare" / name), BARE)

    @EVERY
    def test_tensorstore_reads_every_layout(self, runs, name):
        item = runs / "arrays" / name / str(STEP) / ITEM
        for path, entry in ARRAYS.arrays.items():
            opened = open_by_tensorstore(item, name, dotted(path))
            assert described(opened.read().result()) == described(entry.read()), path

    @EVERY
    def test_large_arrays_are_split_into_chunks(self, runs, name):
        item = runs / "arrays" / name / str(STEP) / ITEM
        opened = open_by_tensorstore(item, name, "ranks.2.kernel")
        chunk = opened.chunk_layout.read_chunk.shape
        assert any(n % c for n, c in zip(opened.shape, chunk, strict=True))
        assert prod(chunk) * 4 <= chunking.LARGEST


def open_by_tensorstore(item: Path, name: str, array: str) -> ts.TensorStore:
    base = kvstore(item) if "ocdbt" in name else {"driver": "file"}
    path = f"{array}/" if "ocdbt" in name else f"{item}/{array}/"
    driver = "zarr3" if "zarr3" in name else "zarr"
    spec = {"driver": driver, "kvstore": base | {"path": path}, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, read=True).result()


class TestFiles:
    @RAW
    def test_two_runs_write_the_same_bytes(self, runs, tmp_path, name):
        write(EVERYTHING, writer(name), tmp_path / "again", jobs=1)
        assert contents(tmp_path / "again") == contents(runs / "everything" / name)

    def test_compressed_chunks_equal_those_of_tensorstore(self, runs, tmp_path):
        write(EVERYTHING, writer("files-zarr3-zstd:3"), tmp_path / "again", jobs=1)
        assert contents(tmp_path / "again") == contents(runs / "everything" / "files-zarr3-zstd:3")

    @EVERY
    def test_metadata_matches_contents(self, runs, name):
        item = runs / "everything" / name / str(STEP) / ITEM
        document = json.loads((item / "_METADATA").read_bytes())
        assert (document["use_ocdbt"], document["use_zarr3"]) == ("ocdbt" in name, "zarr3" in name)
        assert (item / "manifest.ocdbt").exists() == ("ocdbt" in name)
        step = json.loads((item.parent / "_CHECKPOINT_METADATA").read_bytes())
        assert list(step["item_handlers"]) == [ITEM]
        assert step["custom_metadata"] == EVERYTHING.metadata.custom

    def test_layout_without_ocdbt_has_a_directory_per_array(self, runs):
        item = runs / "arrays" / "files-zarr3-raw" / str(STEP) / ITEM
        assert (item / "dtypes.bfloat16" / "zarr.json").is_file()
        assert (item / "dtypes.bfloat16" / "c" / "0" / "0").stat().st_size == 30
        assert (item / "ranks.0" / "c").stat().st_size == 4
        item = runs / "arrays" / "files-zarr2-raw" / str(STEP) / ITEM
        assert (item / "dtypes.bfloat16" / "0.0").stat().st_size == 30
        assert (item / "ranks.0" / "0").stat().st_size == 4

    @pytest.mark.parametrize("version", ["zarr2", "zarr3"])
    def test_array_documents_name_the_codecs(self, runs, version):
        locations = [
            runs / "arrays" / f"files-{version}-{codec}" / str(STEP) / ITEM / "sharded"
            for codec in ("raw", "zstd:3")
        ]
        if version == "zarr2":
            raw, coded = (json.loads((location / ".zarray").read_bytes()) for location in locations)
            assert (raw["compressor"], coded["compressor"]) == (None, {"id": "zstd", "level": 3})
        else:
            raw, coded = (json.loads((location / "zarr.json").read_bytes()) for location in locations)
            assert [codec["name"] for codec in raw["codecs"]] == ["bytes"]
            assert [codec["name"] for codec in coded["codecs"]] == ["bytes", "zstd"]

    def test_default_is_one_raw_data_file(self, tmp_path):
        write(ARRAYS, OrbaxWriter(), tmp_path / "run")
        assert sorted(location.name for location in (tmp_path / "run/0/items/d").iterdir()) == [
            "data",
            "index",
        ]

    def test_step_is_taken_from_the_tree(self, tmp_path):
        write(ARRAYS, OrbaxWriter(step=None), tmp_path / "run")
        assert (tmp_path / "run" / str(STEP) / "items" / "_METADATA").exists()
        write(Tree(ARRAYS.leaves), OrbaxWriter(step=None), tmp_path / "stepless")
        assert (tmp_path / "stepless" / "0" / "items" / "_METADATA").exists()

    @EVERY
    def test_tree_without_arrays_round_trips(self, tmp_path, name):
        tree = Tree({("text",): Text("x")}, Metadata(step=STEP))
        write(tree, writer(name), tmp_path / "run")
        assert_same(ckpttools.open(tmp_path / "run"), tree)


class TestTargetSize:
    """`--target-data-file-size`: files of about that size, arrays whole where they fit."""

    def sizes(self, run: Path) -> dict[str, int]:
        files = (run / str(STEP) / ITEM / "d").glob("data*")
        return {file.name: file.stat().st_size for file in files}

    def test_raw_files_are_never_larger(self, runs):
        sizes = self.sizes(runs / "target" / "ocdbt-zarr3-raw")
        assert len(sizes) > 5
        assert max(sizes.values()) <= TARGET
        assert sum(sizes.values()) >= ARRAYS.nbytes

    def test_compressed_files_exceed_the_target_by_at_most_one_chunk(self, runs):
        sizes = self.sizes(runs / "target" / "ocdbt-zarr3-zstd:3")
        assert len(sizes) > 5
        # zstd may add a few bytes to noise.
        assert max(sizes.values()) <= TARGET + chunking.SMALLEST + 100

    def test_oversized_chunk_has_its_own_file(self, tmp_path):
        write(ARRAYS, writer("ocdbt-zarr3-raw", target_data_file_bytes=1000), tmp_path / "run")
        sizes = self.sizes(tmp_path / "run")
        assert max(sizes.values()) <= chunking.SMALLEST
        assert_same(ckpttools.open(tmp_path / "run"), ARRAYS)

    @pytest.mark.parametrize("name", ["ocdbt-zarr3-raw", "ocdbt-zarr2-zstd:3"])
    def test_split_data_files_read_back(self, runs, name):
        assert_same(ckpttools.open(runs / "target" / name), ARRAYS)

    @given(st.lists(st.integers(1, 4000), max_size=12), st.integers(1, 5000))
    def test_arrays_do_not_share_bytes(self, lengths, target):
        tree = Tree({(f"a{k}",): array("uint8", n) for k, n in enumerate(lengths)}, Metadata(step=0))
        layout = OrbaxWriter(target_data_file_bytes=target).layout(tree, 1 << 20)
        taken: dict[str, list[tuple[int, int]]] = {}
        for placement in layout.placements.values():
            for position in range(prod(placement.grid)):
                location = placement.chunk_range((position,))
                taken.setdefault(location.file, []).append(
                    (location.offset, location.offset + location.nbytes)
                )
        assert set(taken) == set(layout.files)
        for file, ranges in taken.items():
            ranges.sort()
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
            assert ranges[-1][1] == layout.files[file]
            assert layout.files[file] <= max(target, chunking.SMALLEST)


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("name", [name for name in COMBINATIONS if "zstd" in name])
def test_interrupted_compression_resumes(tmp_path, monkeypatch, name):
    monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 12)
    monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 12)
    monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
    seen = []

    def observe(event):
        if isinstance(event, TaskDone):
            seen.append(event)
            if len(seen) == 20:
                raise InterruptionError

    each = writer(name, target_data_file_bytes=5000 if "ocdbt" in name else None)
    plan = build(ARRAYS, each, memory=1 << 30, jobs=2)
    with pytest.raises(InterruptionError):
        execute(plan, each, tmp_path / "out", observe=observe)
    assert not (tmp_path / "out").exists()
    receipt = write(ARRAYS, each, tmp_path / "out")
    assert receipt.tasks_resumed > 0
    assert_same(ckpttools.open(tmp_path / "out"), ARRAYS)
    for path, leaf in ARRAYS.arrays.items():
        opened = open_by_tensorstore(tmp_path / "out" / str(STEP) / ITEM, name, dotted(path))
        assert described(opened.read().result()) == described(leaf.read())


def test_chunk_padding_is_zeros(runs):
    """Not what the worker's memory held before: the same input gives the same bytes."""
    directory = runs / "arrays" / "files-zarr3-zstd:3" / str(STEP) / ITEM / "ranks.2.kernel"
    chunk = json.loads((directory / "zarr.json").read_bytes())["chunk_grid"]["configuration"]["chunk_shape"]
    truth = ARRAYS.arrays["ranks", 2, "kernel"].read()
    padding = [(0, -n % c) for n, c in zip(truth.shape, chunk, strict=True)]
    assert any(after for _, after in padding)
    whole = np.pad(truth, padding)
    for file in (directory / "c").rglob("*"):
        if file.is_file():
            index = map(int, file.relative_to(directory / "c").parts)
            part = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))
            assert zstandard.ZstdDecompressor().decompress(file.read_bytes()) == whole[part].tobytes()


class TestEncodedChunks:
    """Chunks that are encoded are made whole, so they must fit."""

    @pytest.fixture(autouse=True)
    def large_chunks(self, small_chunks, monkeypatch):
        monkeypatch.setattr(chunking, "SMALLEST", 4 << 20)
        monkeypatch.setattr(chunking, "LARGEST", 64 << 20)

    @pytest.mark.parametrize("limit", [64 << 20, 3 << 20, 1 << 20, 4096])
    def test_encoded_chunks_fit_the_memory_limit(self, limit):
        layout = OrbaxWriter(compression=Zstd()).layout(large(), limit)
        (placement,) = layout.placements.values()
        assert placement.chunk_nbytes <= min(limit, LARGEST_ENCODED)
        assert isinstance(placement.home, Appended)

    @pytest.mark.parametrize("jobs", [1, 2, 64])
    def test_small_memory_limits_are_sufficient(self, jobs):
        plan = build(large(), OrbaxWriter(compression=Zstd()), memory=128 << 20, jobs=jobs)
        assert plan.projected_peak <= 128 << 20

    def test_raw_grids_do_not_depend_on_memory(self):
        grids = {OrbaxWriter().layout(large(), limit).placements["w",].chunk for limit in (64 << 20, 1 << 20)}
        assert len(grids) == 1


def large() -> Tree:
    from ckpttools.array.nodes import Constant

    return Tree({("w",): Constant((128256, 4096), DTYPES["bfloat16"], b"\0\0")}, Metadata(step=0))


@given(
    st.lists(st.integers(1, 300), max_size=4).map(tuple),
    st.sampled_from((1, 2, 4, 8, 16)),
    st.sampled_from((16, 160, 4096, 1 << 20)),
    st.sets(st.integers(0, 3)),
)
def test_chunk_limit_is_respected(shape, itemsize, largest, single):
    axes = sorted(axis for axis in single if axis < len(shape))
    chunk = chunking.chunk_shape(shape, itemsize, axes, largest)
    assert prod(chunk) * itemsize <= largest
    assert all(1 <= c <= n for c, n in zip(chunk, shape, strict=True))


class TestCompression:
    @pytest.mark.parametrize(
        ("text", "expected"), [("none", None), ("zstd", Zstd(3)), ("zstd:1", Zstd(1)), ("zstd:19", Zstd(19))]
    )
    def test_compression_names_are_parsed(self, text, expected):
        assert parse_compression(text) == expected

    @pytest.mark.parametrize("text", ["lz4", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "ZSTD", "", "zstd:1.5"])
    def test_unknown_names_are_refused_with_alternatives(self, text):
        with pytest.raises(UsageError) as caught:
            parse_compression(text)
        assert repr(text) in caught.value.message
        assert caught.value.expected == "none, zstd or zstd:LEVEL with a level from 1 to 19"

    @pytest.mark.parametrize("level", [1, 3, HIGHEST_LEVEL])
    def test_bytes_do_not_depend_on_threads(self, level):
        data = memoryview(np.arange(100_000, dtype=np.uint16).view(np.uint8))
        with ThreadPoolExecutor(4) as pool:
            (encoded,) = set(pool.map(Zstd(level).encode, [data] * 8))
        assert zstandard.ZstdDecompressor().decompress(encoded) == bytes(data)
        assert zstandard.get_frame_parameters(encoded).content_size == len(data)

    def test_compression_memory_grows_with_the_level(self):
        low, middle, high = (Zstd(level).working_bytes for level in (3, 9, HIGHEST_LEVEL))
        assert low < 4 << 20 < middle < 32 << 20 < high < 128 << 20


class TestRefusedTrees:
    def refused(self, tree: Tree, name: str = "ocdbt-zarr3-raw", **options: Any) -> FormatError:
        with pytest.raises(FormatError) as caught:
            writer(name, **options).layout(tree, 1 << 20)
        return caught.value

    @pytest.mark.parametrize(
        ("name", "what"), [("ocdbt-zarr3-raw", "zarr v3"), ("ocdbt-zarr2-raw", "zarr v2")]
    )
    def test_unsupported_dtypes_are_refused(self, name, what):
        leaves = {
            ("a", f"w{k}"): array(dtype, 2) for k, dtype in enumerate(("float6_e2m3fn", "float6_e3m2fn"))
        }
        error = self.refused(Tree({**leaves, ("b",): array("float32", 2)}), name)
        assert error.message == (
            f"{what} does not support float6_e2m3fn or float6_e3m2fn:"
            "\n    a/w0: float6_e2m3fn\n    a/w1: float6_e3m2fn"
        )
        assert 'dtype="bfloat16"' in error.hint

    def test_arrays_without_elements_are_refused(self):
        error = self.refused(Tree({("w",): array("float32", 0, 3), ("v",): array("float32", 2)}))
        assert error.message == "Orbax cannot store arrays without elements:\n    w: [0, 3]"
        assert 'format="zarr3"' in error.hint

    def test_two_paths_with_one_name_are_refused(self):
        error = self.refused(Tree({("a.b",): array("float32", 2), ("a", "b"): array("float32", 2)}))
        assert error.location == "a/b"
        assert error.got == "a.b is also 'a.b'"

    @pytest.mark.parametrize("key", ["a/b", "..", "d", "_METADATA", "x" * 300, "manifest.ocdbt"])
    def test_invalid_directory_names_are_refused(self, tmp_path, key):
        tree = Tree({(key,): array("float32", 2)}, Metadata(step=STEP))
        error = self.refused(tree, "files-zarr3-raw")
        assert key in error.message
        assert error.hint == "write with ocdbt=True, or rename them"
        write(tree, writer("ocdbt-zarr3-raw"), tmp_path / "run")
        assert_same(ckpttools.open(tmp_path / "run"), tree)

    @pytest.mark.parametrize("item", ["", "..", "a/b", "_METADATA", "x\ny", "x\x7f"])
    def test_invalid_item_names_are_refused(self, item):
        with pytest.raises(UsageError, match="cannot be the name of an item"):
            OrbaxWriter(item=item)

    def test_target_size_without_data_files_is_refused(self):
        with pytest.raises(UsageError, match="a target size for data files does not apply"):
            OrbaxWriter(ocdbt=False, target_data_file_bytes=1)


@pytest.mark.parametrize("name", DTYPES)
def test_zarr2_spellings_are_tensorstores(tmp_path, name):
    dtype = DTYPES[name]
    if dtype.zarr2 is None:
        assert name not in ZARR3
        return
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/"}}
    truth = values((3, 2), dtype)
    opened = ts.open(spec, create=True, dtype=ts.dtype(name), shape=[3, 2]).result()
    opened.write(truth.view(dtype.numpy)).result()
    theirs = json.loads((tmp_path / ".zarray").read_bytes())
    compressor = theirs["compressor"]
    assert json.loads(zarr2.encode((3, 2), dtype, (3, 2), compressor)) == theirs
    assert from_zarr2(theirs["dtype"]) == dtype


def test_test_helpers_write_the_declared_layout():
    assert {leaf.dtype.name for path, leaf in ARRAYS.arrays.items() if path[0] == "dtypes"} == set(ZARR3)
    assert stored(values((4,), DTYPES["int2"]), DTYPES["int2"]).read().astype(int).min() >= -2
