"""Writing safetensors: what the reference implementation reads, and what the way back restores."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from support.internals import (
    Constant,
    ReadOptions,
    SafetensorsWriter,
    TaskDone,
    build,
    execute,
    parse,
    plan_tree,
)

from ckpttools import DTYPES, Empty, FormatError, Metadata, Text, Tree
from ckpttools.formats import flat
from ckpttools.formats.safetensors import format as safetensors
from ckpttools.formats.safetensors import write as safetensors_write
from ckpttools.formats.safetensors.write import DEFAULT_SHARD_BYTES, split
from ckpttools.plan import plan as planning
from ckpttools.run import threads
from ckpttools.testing.conformance import FormatTests, write
from ckpttools.testing.strategies import assert_same, file_bytes, many_leaves, noise, stored

HELD = tuple(dtype for dtype in DTYPES.values() if dtype.safetensors and not dtype.packed)
ONE = SafetensorsWriter()


class TestOneFile(FormatTests):
    format = safetensors.FORMAT
    dtypes = HELD

    def writer(self, tree):
        return ONE


class TestShards(FormatTests):
    format = safetensors.FORMAT
    dtypes = HELD

    def writer(self, tree):
        return SafetensorsWriter(max_shard_bytes=300, separator="/")


def array(name="float32", shape=(3, 2), seed=0):
    dtype = DTYPES[name]
    return stored(noise(shape, dtype, seed), dtype)


def constant(name="float32", shape=(3, 2)):
    return Constant(tuple(shape), DTYPES[name], bytes(DTYPES[name].itemsize))


def flat_tree(arrays, **metadata):
    return Tree({(name,): item for name, item in arrays.items()}, Metadata(**metadata))


def opened(location):
    return safetensors.FORMAT.open(parse(location), ReadOptions())


def come_back(tree, location, writer=ONE):
    write(tree, writer, location)
    return opened(location)


def header(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def digests(location):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(location.iterdir())}


def mixed_tree():
    """All dtypes, and shapes of whole pages and of none, in no good order."""
    shapes = ((5, 3), (), (0, 4), (64, 64), (1, 1024, 8), (7,))
    leaves = {
        ("params", f"layers_{k}", dtype.name): array(dtype.name, shape, k)
        for k, shape in enumerate(shapes)
        for dtype in HELD
    }
    return Tree(leaves, Metadata(step=3))


class TestSafetensorsPackage:
    @pytest.mark.parametrize("separator", [".", "/"])
    def test_package_reads_the_same_bytes(self, tmp_path, separator):
        tree = mixed_tree()
        write(tree, SafetensorsWriter(separator=separator), tmp_path / "out")
        result = dict(deserialize((tmp_path / "out" / "model.safetensors").read_bytes()))
        assert set(result) == {separator.join(path) for path in tree}
        for path, item in tree.arrays.items():
            got = result[separator.join(path)]
            assert (got["dtype"], tuple(got["shape"])) == (item.dtype.safetensors, item.shape)
            assert bytes(got["data"]) == file_bytes(item.read().view(item.dtype.carrier), item.dtype)

    def test_package_opens_the_file_and_its_metadata(self, tmp_path):
        tree = flat_tree({"a": array(), "b": array("int64", (2, 5))}, custom={"author": "somebody"})
        write(tree, ONE, tmp_path / "out")
        with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
            assert file.metadata() == {"author": "somebody", "format": "pt"}
            for path, item in tree.arrays.items():
                assert np.array_equal(file.get_tensor(path[0]), item.read(), equal_nan=True)
                assert np.array_equal(file.get_slice(path[0])[1:], item.read()[1:], equal_nan=True)

    def test_package_reads_every_shard(self, tmp_path):
        tree = mixed_tree()
        write(tree, SafetensorsWriter(20_000), tmp_path / "out")
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
        assert index["metadata"] == {"total_size": tree.nbytes}
        assert set(index["weight_map"]) == {".".join(path) for path in tree}
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 3
        assert files == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
        assert {file.name for file in (tmp_path / "out").iterdir()} == {
            *files,
            "model.safetensors.index.json",
        }
        for file in files:
            with safe_open(tmp_path / "out" / file, framework="numpy") as shard:
                assert shard.metadata()["format"] == "pt"
                named = {name for name, where in index["weight_map"].items() if where == file}
                assert set(shard.keys()) == named

    @given(
        sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20),
        limit=st.integers(1, 40),
    )
    def test_shards_match_huggingface_hub(self, sizes, limit):
        theirs = split_state_dict_into_shards_factory(
            {str(k): size for k, size in enumerate(sizes)},
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=limit,
        )
        groups = split(sizes, limit)
        names = safetensors_write._file_names("model", len(groups))
        ours = {name: list(map(str, group)) for name, group in zip(names, groups, strict=True)}
        assert ours == theirs.filename_to_tensors

    def test_limit_matches_huggingface_hub(self):
        from huggingface_hub.serialization._base import MAX_SHARD_SIZE, parse_size_to_int

        assert parse_size_to_int(MAX_SHARD_SIZE) == DEFAULT_SHARD_BYTES
        assert f"{safetensors_write.STEM}.safetensors.index.json" == constants.SAFETENSORS_INDEX_FILE
        assert safetensors_write._file_names("model", 1) == [constants.SAFETENSORS_SINGLE_FILE]


class TestLocations:
    def test_every_array_is_aligned_to_its_elements_and_large_ones_to_pages(self, tmp_path):
        tree = mixed_tree()
        write(tree, ONE, tmp_path / "out")
        fields, start = header(tmp_path / "out" / "model.safetensors")
        fields.pop("__metadata__")
        assert start % 4096 == 0
        pages = 0
        for name, entry in fields.items():
            begin, end = (start + item for item in entry["data_offsets"])
            dtype = DTYPES[name.rpartition(".")[2]]
            assert begin % dtype.itemsize == 0, name
            if begin < end and (end - begin) % 4096 == 0:
                pages += 1
                assert begin % 4096 == 0, name
        assert pages > 10

    def test_small_file_has_a_short_header(self, tmp_path):
        write(flat_tree({"a": array()}), ONE, tmp_path / "out")
        _, start = header(tmp_path / "out" / "model.safetensors")
        assert start % 8 == 0
        assert start < 120

    def test_layers_keep_their_order(self, tmp_path):
        tree = many_leaves(1000)
        back = come_back(tree, tmp_path / "out", SafetensorsWriter(5000))
        assert list(back) == list(tree)
        files = sorted((tmp_path / "out").glob("*.safetensors"))
        named = [name for file in files for name in header(file)[0] if name != "__metadata__"]
        assert named == [f"params.layers_{k}.kernel" for k in range(1000)]

    def test_empty_arrays_and_empty_trees_are_written(self, tmp_path):
        tree = flat_tree({"a": constant("bfloat16", (0, 7)), "b": constant("int8", (3, 0))})
        assert_same(come_back(tree, tmp_path / "a").with_metadata(custom={}), tree)
        tree = Tree({("opt_state",): Empty("Dict")}, Metadata(step=1))
        assert_same(come_back(tree, tmp_path / "b"), tree)
        tree = Tree({}, Metadata(step=1))
        assert_same(come_back(tree, tmp_path / "c"), tree)


class TestRuns:
    def run(self, tree, location, jobs=2, **options):
        writer = SafetensorsWriter(2_000_000)
        plan = build(tree, writer, memory=256 << 20, jobs=jobs)
        return execute(plan, writer, location, **options)

    def tree(self):
        shapes = {"a": (64, 4, 1024), "b": (1000, 7, 33), "c": (4096,), "d": (301, 77), "e": (1024, 512)}
        return flat_tree({name: array("float32", shape) for name, shape in shapes.items()}, step=1)

    def test_any_tasks_in_any_order_give_the_same_files(self, tmp_path, monkeypatch):
        tree = self.tree()
        self.run(tree, tmp_path / "a", jobs=1)
        monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 16)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 12)
        self.run(tree, tmp_path / "b", jobs=4)
        assert digests(tmp_path / "a") == digests(tmp_path / "b")
        assert len(digests(tmp_path / "a")) > 2

    def test_interrupted_run_resumes_to_the_same_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr(planning, "LARGEST_TASK", 1 << 16)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 12)
        monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
        tree = self.tree()
        self.run(tree, tmp_path / "whole")
        seen = []

        def observe(event):
            seen.append(event)
            if isinstance(event, TaskDone) and len(seen) > 20:
                raise KeyError("enough")

        with pytest.raises(KeyError):
            self.run(tree, tmp_path / "out", observe=observe)
        assert not (tmp_path / "out").exists()
        for file in (tmp_path / "out.partial").glob("*.safetensors"):
            with pytest.raises(FormatError):
                opened(file)
            with pytest.raises(Exception, match="Error while deserializing header"):
                safe_open(file, framework="numpy")
        receipt = self.run(tree, tmp_path / "out")
        assert receipt.tasks_resumed > 0
        assert digests(tmp_path / "out") == digests(tmp_path / "whole")
        assert sorted(location.name for location in tmp_path.iterdir()) == ["out", "whole"]


# Everything that a map of names cannot say.
STRUCTURED = Tree(
    {
        ("step",): stored(noise((), DTYPES["int64"]), DTYPES["int64"]),
        ("params", "layers_9", "w"): array(seed=1),
        ("params", "layers_10", "w"): array(seed=2),
        ("params", "a.b", "ü / 語 😀"): array(seed=3),
        ("mu", 10): array(seed=4),
        ("mu", 9): array(seed=5),
        ("key",): stored(noise((2,), DTYPES["uint32"]), DTYPES["uint32"]),
        ("opt_state",): Empty("Dict"),
        ("nothing", 0): Empty("None"),
        ("list",): Empty("List"),
        ("text",): Text('quotes " and \\ and \x00 and a pair \U0001f600'),
    },
    Metadata(
        step=12,
        custom={"scan_layers": True, "format": "flax", "nested": {"a": [1, 2.5, None]}},
        scalars=frozenset({("step",)}),
        key_impls={("key",): "threefry2x32"},
    ),
)


class TestRoundTrips:
    @pytest.mark.parametrize("limit", [None, 60])
    @pytest.mark.parametrize("separator", [".", "/"])
    def test_everything_round_trips(self, tmp_path, separator, limit):
        back = come_back(STRUCTURED, tmp_path / "out", SafetensorsWriter(limit, separator))
        assert_same(back, STRUCTURED)
        assert list(back) == list(STRUCTURED)
        assert back.metadata.key_impls == STRUCTURED.metadata.key_impls
        assert back.metadata.format == "safetensors"
        again = come_back(back, tmp_path / "again", SafetensorsWriter(limit, separator))
        assert_same(again, STRUCTURED)
        assert digests(tmp_path / "again") == digests(tmp_path / "out")

    # A run waits for the disk, so it has no deadline.
    @settings(deadline=None, max_examples=50)
    @given(
        custom=st.dictionaries(
            st.text(max_size=5) | st.just(flat.ENTRY) | st.just("format"),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
                lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below),
                max_leaves=4,
            ),
            max_size=3,
        ),
        step=st.none() | st.integers(0, 1 << 40),
    )
    def test_metadata_round_trips(self, tmp_path_factory, custom, step):
        tree = flat_tree({"w": array()}, custom=custom, step=step)
        back = come_back(tree, tmp_path_factory.mktemp("out") / "out")
        assert back.metadata.step == step
        # A name of a framework that says nothing may be there beside what the user said.
        assert dict(back.metadata.custom) in (custom, {**custom, "format": "pt"})

    def test_plain_names_have_no_description(self, tmp_path):
        tree = flat_tree({"model.layers.0.w": array(), "lm_head": array()}, custom={"note": "x"})
        back = come_back(tree, tmp_path / "out")
        assert header(tmp_path / "out" / "model.safetensors")[0]["__metadata__"] == {
            "format": "pt",
            "note": "x",
        }
        assert_same(back.with_metadata(custom={"note": "x"}), tree)

    def test_unknown_framework_becomes_pt(self, tmp_path):
        tree = flat_tree({"w": array()}, custom={"format": "mlx"}, format="safetensors")
        assert come_back(tree, tmp_path / "out").metadata.custom == {"format": "pt"}

    @pytest.mark.parametrize("count", [2, 3])
    def test_single_shard_has_its_arrays_by_name(self, tmp_path, count):
        tree = many_leaves(2 * count)
        write(tree, SafetensorsWriter(50), tmp_path / "out")
        for number in (1, 2):
            back = opened(tmp_path / "out" / f"model-{number:05d}-of-{count:05d}.safetensors")
            first = 2 * (number - 1)
            assert list(back) == [(f"params.layers_{k}.kernel",) for k in (first, first + 1)]
            assert back.metadata.custom == {"format": "pt"}
        assert_same(opened(tmp_path / "out" / "model.safetensors.index.json"), tree)

    def test_shard_1_of_1_is_a_complete_tree(self, tmp_path):
        tree = many_leaves(2)
        write(tree, ONE, tmp_path / "out")
        built = (tmp_path / "out" / "model.safetensors").rename(tmp_path / "a-00001-of-00001.safetensors")
        assert_same(opened(built), tree)

    def test_opening_reads_no_tensor_data(self, tmp_path):
        write(STRUCTURED, ONE, tmp_path / "out")
        file = tmp_path / "out" / "model.safetensors"
        _, start = header(file)
        with file.open("r+b") as opened_file:
            opened_file.seek(start)
            opened_file.write(b"\xff" * (file.stat().st_size - start))
        assert list(opened(tmp_path / "out")) == list(STRUCTURED)


def rewritten(location: Path, change) -> Path:
    """The file at `location` after `change` was done to its header, data kept."""
    file = location / "model.safetensors"
    fields, start = header(file)
    data = file.read_bytes()[start:]
    data = change(fields, data) or data
    text = json.dumps(fields).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def with_entry(document):
    def change(fields, data):
        text = document if isinstance(document, str) else json.dumps(document)
        fields["__metadata__"][flat.ENTRY] = text

    return change


LEAVES = [[["a", "b"], "array"]]
SOUND = {
    "version": 1,
    "separator": ".",
    "step": None,
    "custom_metadata": {},
    "leaves": LEAVES,
}


class TestContradictingMetadata:
    @pytest.fixture
    def location(self, tmp_path):
        write(Tree({("a", "b"): array()}), ONE, tmp_path / "out")
        return tmp_path / "out"

    def refused(self, location, *words):
        with pytest.raises(FormatError) as caught:
            opened(location)
        for word in (flat.ENTRY, str(location), *words):
            assert word in str(caught.value)

    def test_consistent_description_is_accepted(self, location):
        rewritten(location, with_entry(SOUND))
        assert list(opened(location)) == [("a", "b")]

    def test_extra_array_is_refused(self, location):
        def change(fields, data):
            fields["more"] = {"dtype": "U8", "shape": [1], "data_offsets": [len(data), len(data) + 1]}
            return data + b"x"

        rewritten(location, change)
        self.refused(location, "present, but not described (1):\n    more", "another program")

    def test_missing_array_is_refused(self, location):
        def change(fields, data):
            fields["A"] = fields.pop("a.b")

        rewritten(location, change)
        self.refused(
            location, "described, but missing (1):\n    a.b", "present, but not described (1):\n    A"
        )

    def test_duplicate_description_is_refused(self, location):
        rewritten(location, with_entry({**SOUND, "leaves": [*LEAVES, [["a", "b"], "empty", "Dict"]]}))
        self.refused(location, 'described twice (1):\n    ["a", "b"]')

    def test_newer_description_version_is_refused(self, location):
        rewritten(location, with_entry({**SOUND, "version": 2, "leaves": "other"}))
        self.refused(location, "version 2", "update ckpttools")

    @pytest.mark.parametrize(
        "entry",
        [
            "",
            "{",
            "[]",
            "7",
            {},
            {"version": 1},
            {**SOUND, "step": "1"},
            {**SOUND, "step": True},
            {**SOUND, "separator": None},
            {**SOUND, "custom_metadata": []},
            {**SOUND, "leaves": 5},
            {**SOUND, "leaves": [5]},
            {**SOUND, "leaves": [[]]},
            {**SOUND, "leaves": [[["a", "b"]]]},
            {**SOUND, "leaves": [[["a", "b"], "matrix"]]},
            {**SOUND, "leaves": [[["a", "b"], ["array"]]]},
            {**SOUND, "leaves": [[["a", True], "array"]]},
            {**SOUND, "leaves": [[["a", None], "array"]]},
            {**SOUND, "leaves": [[["a", "b"], "array"], [["c"], "text", 5]]},
            "[" * 100_000,
        ],
        ids=lambda entry: str(entry)[:60],
    )
    def test_damaged_description_is_refused(self, location, entry):
        rewritten(location, with_entry(entry))
        self.refused(location, "damaged", "remove it")


class TestRefusedTrees:
    def refused(self, tree, location, *words, writer=ONE):
        with pytest.raises(FormatError) as caught:
            write(tree, writer, location / "out")
        for word in words:
            assert word in str(caught.value)
        assert list(location.iterdir()) == []

    def test_two_paths_with_one_name_are_refused(self, tmp_path):
        leaves = {("a", "b"): array(), ("a.b",): array(), ("x", 0): array(), ("x", "0"): array()}
        tree = Tree({**leaves, ("y/z",): array(), ("y", "z"): array()})
        words = ("""["a", "b"] and ["a.b"]: 'a.b'""", """["x", 0] and ["x", "0"]: 'x.0'""", "`separator`")
        self.refused(tree, tmp_path, *words)
        words = ("""["y/z"] and ["y", "z"]: 'y/z'""",)
        self.refused(tree, tmp_path, *words, writer=SafetensorsWriter(separator="/"))

    def test_leaves_without_data_are_refused(self, tmp_path):
        tree = Tree({("a", "b"): array(), ("a.b",): Empty("None"), ("x",): Text("t")})
        assert_same(come_back(tree, tmp_path / "out"), tree)

    def test_all_arrays_of_unsupported_dtypes_are_listed(self, tmp_path):
        lacking = [dtype.name for dtype in DTYPES.values() if dtype not in HELD]
        assert {"int4", "float8_e3m4", "complex128", "float4_e2m1fn"} <= set(lacking)
        tree = Tree({("w", name): array(name, (4, 2)) for name in (*lacking, "float32")})
        words = (f"{len(lacking)} arrays", *(f"w/{name}: {name}\n" for name in lacking))
        self.refused(tree, tmp_path, *words, 'dtype="bfloat16"', "complex128, int2, int4")

    def test_hint_fits_the_dtype(self, tmp_path):
        self.refused(flat_tree({"w": array("complex128")}), tmp_path, "hint     `dtype` leaves complex128")
        with pytest.raises(FormatError, match="bfloat16") as caught:
            write(flat_tree({"w": array("float8_e3m4")}), ONE, tmp_path / "out")
        assert "Orbax" not in str(caught.value)

    @pytest.mark.parametrize("name", ["float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn", "float6_e2m3fn"])
    def test_suggested_cast_works(self, tmp_path, name):
        from ckpttools.formats.registry import open_tree
        from ckpttools.transforms.cast import cast

        source = array(name, (8, 4))
        built = come_back(Tree({("w",): cast(source, DTYPES["bfloat16"])}), tmp_path / "out")
        expected = source.read().astype(np.float32)
        got = built["w",].read().astype(np.float32)
        assert np.array_equal(got, expected, equal_nan=True)
        assert open_tree(tmp_path / "out")["w",].dtype.name == "bfloat16"

    @pytest.mark.parametrize("name", ["__metadata__", "half \ud800"])
    def test_unsupported_names_are_refused(self, tmp_path, name):
        self.refused(flat_tree({name: array()}), tmp_path, repr(name), "rename")

    def test_unserializable_metadata_is_refused(self, tmp_path):
        tree = flat_tree({"w": array()}, custom={"good": 1, "bad": {1, 2}})
        self.refused(tree, tmp_path, "custom metadata 'bad'", "leave it out")

    def test_write_refuses_invalid_unicode_text(self, tmp_path):
        tree = Tree({("a", "text"): Text("half \ud800"), ("w",): array()})
        self.refused(tree, tmp_path, '["a", "text"]', "surrogates not allowed", "replace")

    def test_write_refuses_invalid_unicode_names(self, tmp_path):
        tree = Tree({("a", "half \ud800"): Empty("Dict"), ("w",): array()})
        self.refused(tree, tmp_path, r"half \ud800", "Unicode text", "rename")

    @pytest.mark.parametrize("custom", [{"k": ["half \ud800"]}, {"half \ud800": 1}], ids=["value", "key"])
    def test_unreadable_metadata_is_refused(self, tmp_path, custom):
        tree = flat_tree({"w": array()}, custom=custom)
        self.refused(tree, tmp_path, "custom metadata", "surrogates not allowed")

    def test_overlong_header_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(safetensors_write, "MAX_HEADER_BYTES", 1000)
        tree = flat_tree({f"w{k}": array() for k in range(100)})
        self.refused(tree, tmp_path, "header", "at most 1,000 bytes", "`max_shard_size`")
        write(tree, SafetensorsWriter(100), tmp_path / "out")


def test_output_can_be_planned_again(tmp_path):
    write(STRUCTURED, ONE, tmp_path / "a")
    plan_tree(opened(tmp_path / "a"), SafetensorsWriter(60, "/")).run(tmp_path / "b")
    assert_same(opened(tmp_path / "b"), STRUCTURED)
