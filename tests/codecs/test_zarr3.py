"""Plain zarr v3 hierarchies: what is written opens in zarr-python and tensorstore, and theirs opens here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr
import zarr.codecs
import zarr.storage
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.golden_data import described
from support.internals import OrbaxWriter, ReadOptions, ZarrWriter, Zstd, parse
from support.stored_trees import EVERYTHING, ZARR3, array, contents, write
from zarr.codecs import numcodecs

import ckpttools
from ckpttools import CheckpointError, Empty, FormatError, Metadata, Region, Text, Tree
from ckpttools.formats.orbax import format as orbax
from ckpttools.formats.zarr import chunking
from ckpttools.formats.zarr import read as zarr3_read
from ckpttools.formats.zarr.array import parse_grid
from ckpttools.testing.conformance import FormatTests
from ckpttools.testing.strategies import assert_same, trees, unambiguous

CODECS = {"raw": None, "zstd": Zstd(3)}
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
# Those that zarr-python (3.1) has a dtype for.
KNOWN = [name for name in ZARR3 if hasattr(np, name)]


class TestZarr3(FormatTests):
    format = zarr3_read.FORMAT
    dtypes = tuple(ZARR3.values())
    most_leaves = 200

    def writer(self, tree):
        return ZarrWriter()


class TestZarr3Zstd(TestZarr3):
    most_leaves = 100

    def writer(self, tree):
        return ZarrWriter(Zstd(1))


@pytest.fixture(scope="module")
def locations(tmp_path_factory):
    """The tree of every kind of leaf, by codec, in small chunks with cut edges."""
    top = tmp_path_factory.mktemp("zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "SMALLEST", 2000)
        patch.setattr(chunking, "LARGEST", 1500)
        for name, codec in CODECS.items():
            write(EVERYTHING, ZarrWriter(codec), top / name)
    return top


@pytest.mark.parametrize("codec", CODECS)
class TestWrittenFiles:
    def test_every_leaf_round_trips(self, locations, codec):
        back = ckpttools.open(locations / codec)
        assert_same(back, EVERYTHING)
        assert list(back) == list(EVERYTHING)
        assert back.metadata.key_impls == EVERYTHING.metadata.key_impls
        assert back.metadata.format == "zarr3"

    def test_zarr_python_opens_arrays_of_supported_dtypes(self, locations, codec):
        group = zarr.open_group(locations / codec, mode="r")
        opened = 0
        for path, item in EVERYTHING.arrays.items():
            if item.dtype.name in KNOWN:
                opened += 1
                theirs = group["/".join(map(str, path))]
                assert described(np.asarray(theirs[...])) == described(item.read()), path
        assert opened > len(KNOWN)

    def test_tensorstore_opens_all_arrays(self, locations, codec):
        for path, item in EVERYTHING.arrays.items():
            location = locations / codec / "/".join(map(str, path))
            opened = by_tensorstore(location)
            assert described(opened.read().result()) == described(item.read()), path

    def test_chunk_grids_cut_large_arrays(self, locations, codec):
        chunk = by_tensorstore(locations / codec / "ranks/2/kernel").chunk_layout.read_chunk.shape
        assert any(n % c for n, c in zip((37, 5, 23), chunk, strict=True))

    def test_two_runs_write_identical_files(self, locations, codec, tmp_path, monkeypatch):
        monkeypatch.setattr(chunking, "SMALLEST", 2000)
        monkeypatch.setattr(chunking, "LARGEST", 1500)
        write(EVERYTHING, ZarrWriter(CODECS[codec]), tmp_path / "again", jobs=1)
        assert contents(tmp_path / "again") == contents(locations / codec)

    def test_zarr_output_is_not_identified_as_orbax(self, locations, codec):
        assert orbax.FORMAT.mismatch_reason(parse(locations / codec))


def by_tensorstore(location: Path) -> ts.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{location}/"},
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, read=True).result()


@EVERY_CODEC
def test_zarr_python_walks_the_hierarchy(tmp_path, codec):
    """It lists groups whose arrays are all of dtypes that it knows; others it opens by name only."""
    leaves = {("a", "b", name): array(name, 3, 2) for name in KNOWN} | {("list", 0): array("int8", 2)}
    write(Tree(leaves), ZarrWriter(codec), tmp_path / "z")
    members = dict(zarr.open_group(tmp_path / "z", mode="r").members(max_depth=None))
    groups = {name for name, node in members.items() if isinstance(node, zarr.Group)}
    assert groups == {"a", "a/b", "list"}
    theirs = {name: described(node[...]) for name, node in members.items() if name not in groups}
    assert theirs == {"/".join(map(str, path)): described(item.read()) for path, item in leaves.items()}


@EVERY_CODEC
def test_empty_arrays_round_trip(tmp_path, codec):
    tree = Tree(
        {
            ("a", "none"): array("float32", 0, 3),
            ("a", "some"): array("int8", 2),
            ("b",): array("bfloat16", 4, 0),
        }
    )
    write(tree, ZarrWriter(codec), tmp_path / "z")
    assert_same(ckpttools.open(tmp_path / "z"), tree)
    assert zarr.open_group(tmp_path / "z", mode="r")["a/none"].shape == (0, 3)
    assert by_tensorstore(tmp_path / "z" / "b").shape == (4, 0)


def test_tree_with_only_empty_arrays_round_trips(tmp_path):
    tree = Tree({("a",): array("float32", 0)})
    write(tree, ZarrWriter(), tmp_path / "z")
    assert_same(ckpttools.open(tmp_path / "z"), tree)


def test_tree_without_arrays_round_trips(tmp_path):
    tree = Tree({("text",): Text("x"), ("a", 0): Empty("List")}, Metadata(step=5))
    write(tree, ZarrWriter(), tmp_path / "z")
    assert_same(ckpttools.open(tmp_path / "z"), tree)


@EVERY_CODEC
def test_single_array_tree_round_trips(tmp_path, codec):
    tree = Tree({(): array("float32", 37, 5)}, Metadata(step=5))
    write(tree, ZarrWriter(codec), tmp_path / "z")
    assert_same(ckpttools.open(tmp_path / "z"), tree)
    assert described(zarr.open_array(tmp_path / "z", mode="r")[...]) == described(tree.arrays[()].read())


@settings(max_examples=25)
@given(data=st.data())
def test_any_tree_round_trips_through_zarr_and_orbax(data, tmp_path):
    tree = data.draw(trees(tuple(ZARR3.values())))
    assume(unambiguous(tree))
    for name, writer in (("z", ZarrWriter()), ("o", OrbaxWriter(step=None)), ("back", ZarrWriter(Zstd(1)))):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        write(tree, writer, tmp_path / name)
        back = ckpttools.open(tmp_path / name)
        assert_same(back, tree)
        tree = back


class TestZarrPythonHierarchies:
    """Hierarchies that know nothing of this package."""

    TRUTH = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)

    def check(self, location: Path, truth: np.ndarray = TRUTH) -> None:
        tree = ckpttools.open(location)
        assert list(tree) == [("group", "array")]
        opened = tree.arrays["group", "array"]
        assert described(opened.read()) == described(truth)
        part = opened.read(Region((2, 1), (6, 4)))
        assert described(part) == described(truth[2:6, 1:4])

    def make(self, location: Path, truth: np.ndarray = TRUTH, **options) -> zarr.Array:
        group = zarr.create_group(location).create_group("group")
        built = group.create_array("array", shape=truth.shape, chunks=(3, 2), dtype=truth.dtype, **options)
        built[...] = truth
        return built

    OPTIONS = {  # noqa: RUF012
        "default": {},
        "raw": {"compressors": None},
        "gzip": {"compressors": zarr.codecs.GzipCodec(level=5)},
        "zlib": {"compressors": numcodecs.Zlib(level=2)},
        "bz2": {"compressors": numcodecs.BZ2(level=2)},
        "blosc": {"compressors": zarr.codecs.BloscCodec(cname="zstd")},
        "crc32c": {"compressors": [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()]},
        "big-endian": {"compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
        "transposed": {"compressors": None, "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
        "shards": {"shards": (6, 4)},
        "raw-shards": {"shards": (6, 4), "compressors": None},
        "v2-keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}, "compressors": None},
        "dotted-keys": {"chunk_key_encoding": {"name": "default", "separator": "."}},
        "named-axes": {"dimension_names": ["rows", "columns"]},
    }

    @pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_codecs_and_key_encodings_are_read(self, tmp_path, options):
        self.make(tmp_path / "z", **options)
        self.check(tmp_path / "z")

    @pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
    def test_consolidated_metadata_is_read(self, tmp_path):
        self.make(tmp_path / "z")
        zarr.consolidate_metadata(tmp_path / "z")
        self.check(tmp_path / "z")

    @pytest.mark.parametrize("name", KNOWN)
    def test_dtypes_of_zarr_python_are_read(self, tmp_path, name):
        truth = array(name, 7, 5).read()
        self.make(tmp_path / "z", truth, compressors=None)
        self.check(tmp_path / "z", truth)

    @pytest.mark.parametrize(("name", "fill"), [("float32", 7.5), ("float64", float("nan")), ("int16", -3)])
    def test_omitted_chunks_read_as_the_fill_value(self, tmp_path, name, fill):
        built = zarr.create_group(tmp_path / "z").create_array(
            "a", shape=(7, 5), chunks=(3, 2), dtype=name, fill_value=fill
        )
        built[:3] = 1
        truth = np.full((7, 5), fill, name)
        truth[:3] = 1
        assert len(list((tmp_path / "z" / "a" / "c").rglob("?"))) < 12
        assert np.array_equal(ckpttools.open(tmp_path / "z").arrays["a",].read(), truth, equal_nan=True)

    def test_attributes_are_custom_metadata(self, tmp_path):
        zarr.create_group(tmp_path / "z", attributes={"a": [1, {"b": None}]}).create_array(
            "w", data=self.TRUTH
        )
        assert ckpttools.open(tmp_path / "z").metadata.custom == {"a": [1, {"b": None}]}

    def test_arrays_are_sorted_by_name(self, tmp_path):
        group = zarr.create_group(tmp_path / "z")
        for name in ("b/x", "b/a/y", "a", "c"):
            group.create_array(name, data=self.TRUTH)
        (tmp_path / "z" / "no node").mkdir()
        assert list(ckpttools.open(tmp_path / "z")) == [("a",), ("b", "a", "y"), ("b", "x"), ("c",)]

    def test_unknown_dtype_is_refused(self, tmp_path):
        zarr.create_group(tmp_path / "z").create_array("when", shape=3, dtype="datetime64[s]")
        with pytest.raises(FormatError, match="unknown zarr data type") as caught:
            ckpttools.open(tmp_path / "z")
        assert "when" in caught.value.location

    def test_zarr_python_arrays_convert_to_orbax(self, tmp_path):
        self.make(tmp_path / "z")
        write(ckpttools.open(tmp_path / "z"), OrbaxWriter(step=None), tmp_path / "o")
        self.check(tmp_path / "o")


class TestReaderErrors:
    def location(self, tmp_path: Path, codec: Zstd | None = None) -> Path:
        write(Tree({("a", "w"): array("float32", 5, 3)}, Metadata(step=0)), ZarrWriter(codec), tmp_path / "z")
        return tmp_path / "z"

    def test_non_zarr_locations_are_not_matched(self, tmp_path):
        assert zarr3_read.FORMAT.mismatch_reason(parse(tmp_path)) == "no zarr.json here"
        (tmp_path / "file").write_text("")
        assert zarr3_read.FORMAT.mismatch_reason(parse(tmp_path / "file")) == "not a directory"

    def test_orbax_items_are_not_matched_as_zarr(self, tmp_path):
        writer = OrbaxWriter(ocdbt=False)
        write(Tree({(): array("float32", 5)}), writer, tmp_path / "run")
        item = tmp_path / "run" / "0" / "items"
        assert (item / "zarr.json").is_file()
        assert "Orbax" in zarr3_read.FORMAT.mismatch_reason(parse(item))
        assert ckpttools.open(item).metadata.format == "orbax"

    @EVERY_CODEC
    def test_missing_chunk_is_refused(self, tmp_path, codec):
        location = self.location(tmp_path, codec)
        (location / "a/w/c/0/0").unlink()
        with pytest.raises(CheckpointError, match="missing"):
            ckpttools.open(location).arrays["a", "w"].read()

    def test_missing_array_is_refused(self, tmp_path):
        location = self.location(tmp_path)
        shutil.rmtree(location / "a" / "w")
        with pytest.raises(FormatError, match="contradicts the arrays"):
            ckpttools.open(location)

    @pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"zarr_format":2,"node_type":"group"}'])
    def test_root_without_node_is_refused(self, tmp_path, text):
        location = self.location(tmp_path)
        (location / "zarr.json").write_text(text)
        with pytest.raises(FormatError) as caught:
            ckpttools.open(location)
        assert "zarr.json" in caught.value.location

    def test_invalid_attributes_are_refused(self, tmp_path):
        location = self.location(tmp_path)
        document = json.loads((location / "zarr.json").read_bytes())
        (location / "zarr.json").write_text(json.dumps({**document, "attributes": 3}))
        with pytest.raises(FormatError, match="attributes"):
            ckpttools.open(location)

    def test_damaged_description_is_refused(self, tmp_path):
        location = self.location(tmp_path)
        document = json.loads((location / "zarr.json").read_bytes())
        document["attributes"]["ckpttools.tree"]["leaves"] = 3
        (location / "zarr.json").write_text(json.dumps(document))
        with pytest.raises(FormatError, match="description of the tree is damaged"):
            zarr3_read.FORMAT.open(parse(location), ReadOptions())


class TestWriterErrors:
    def refused(self, *paths: tuple[str | int, ...]) -> FormatError:
        with pytest.raises(FormatError) as caught:
            ZarrWriter().layout(Tree({path: array("int8", 2) for path in paths}), 1 << 20)
        return caught.value

    @pytest.mark.parametrize(
        "key", ["", "a/b", "a\\b", ".", "..", "...", "__x", "zarr.json", "x" * 256, "\0"]
    )
    def test_unrepresentable_keys_are_refused(self, key):
        error = self.refused(("a", key, "w"), ("b",))
        assert error.message.startswith("these keys cannot be names of zarr nodes:")
        assert repr(key) in error.message
        assert "ocdbt=True" in error.hint

    def test_all_invalid_names_are_listed_together(self):
        error = self.refused(("__a",), ("b", "."))
        assert "'__a' in __a" in error.message
        assert "'.' in b/." in error.message

    def test_array_below_an_array_is_refused(self):
        error = self.refused(("a",), ("a", "b", "c"))
        assert (error.message, error.got) == (
            "a zarr array cannot contain other arrays",
            "a is an array",
        )
        assert error.location == "a/b/c"

    def test_number_and_equal_text_key_are_refused(self):
        error = self.refused(("a", 0), ("a", "0"))
        assert error.message == "two arrays would have the same name a/0"
        assert error.got == '["a", 0] and ["a", "0"]'

    def test_unsupported_dtypes_are_refused(self):
        with pytest.raises(FormatError, match="zarr v3 does not support float6_e2m3fn") as caught:
            ZarrWriter().layout(Tree({("w",): array("float6_e2m3fn", 2)}), 1 << 20)
        assert "w: float6_e2m3fn" in caught.value.message
        assert 'dtype="bfloat16"' in caught.value.hint

    def test_custom_metadata_outside_json_is_refused(self):
        tree = Tree({("w",): array("int8", 2)}, Metadata(custom={"a": object()}))
        with pytest.raises(FormatError, match="custom metadata 'a'"):
            ZarrWriter().layout(tree, 1 << 20)


@pytest.mark.parametrize("grid", [([2], [0]), ([2], [-1]), ([-1], [2]), ([2.0], [2]), ([2], [2.0])])
def test_invalid_grid_is_refused(grid):
    assert parse_grid([2, 0], [1, 2], "a") == ((2, 0), (1, 2))
    with pytest.raises(FormatError, match="an invalid shape"):
        parse_grid(*grid, "a")


def test_group_without_metadata_is_refused(tmp_path):
    """What is in it would be missing, and nobody would be told."""
    node = {"zarr_format": 3, "node_type": "group"}
    (tmp_path / "c/m/w").mkdir(parents=True)
    for location in ("c", "c/m/w"):
        (tmp_path / location / "zarr.json").write_text(json.dumps(node))
    with pytest.raises(FormatError, match=r"a group of arrays has no zarr\.json"):
        ckpttools.open(tmp_path / "c")
