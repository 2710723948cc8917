"""Codecs, dtypes and names in Orbax items, as tensorstore writes them; and how often chunks are decoded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.golden_data import described
from support.internals import Chunked, Decoded, Relayout, Scratch, Stored, relayout
from support.locations import ORBAX
from support.orbax_items import (
    BIG,
    BLOSC,
    CRC,
    GZIP,
    LITTLE,
    ZSTD,
    change_json,
    check_regions,
    sharded,
    values_of,
    write_item,
    zarr2,
    zarr3,
)

import ckpttools
from ckpttools import DTYPES, FormatError, Region
from ckpttools.array import read_blocks
from ckpttools.formats.zarr import inner_chunks

F32 = np.dtype("float32")
OCDBT = pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])


# name -> how to create an array of 7 x 10 elements
CODECS = {
    "plain": zarr3([LITTLE], [3, 4]),
    "big endian": zarr3([BIG], [3, 4]),
    "zstd": zarr3([LITTLE, ZSTD], [3, 4]),
    "gzip": zarr3([LITTLE, GZIP], [3, 4]),
    "blosc": zarr3([LITTLE, BLOSC], [3, 4]),
    "crc32c": zarr3([LITTLE, ZSTD, CRC], [3, 4]),
    "transposed": zarr3([{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE], [3, 4]),
    "transposed zstd": zarr3(
        [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE, ZSTD], [3, 4]
    ),
    "shard of one": zarr3([sharded([3, 4], [LITTLE, ZSTD])], [3, 4]),
    "plain shard of one": zarr3([sharded([3, 4], [LITTLE])], [3, 4]),
    "plain shard of one, index first": zarr3([sharded([3, 4], [LITTLE], "start")], [3, 4]),
    "shard": zarr3([sharded([2, 2], [LITTLE, ZSTD])], [4, 6]),
    "plain shard": zarr3([sharded([2, 2], [LITTLE])], [4, 6]),
    "gzip shard, index first": zarr3([sharded([2, 2], [LITTLE, GZIP], "start")], [4, 6]),
    "shard of shards": zarr3([sharded([4, 4], [sharded([2, 2], [LITTLE, ZSTD])])], [4, 8]),
    "transposed shard": zarr3(
        [{"name": "transpose", "configuration": {"order": [1, 0]}}, sharded([2, 3], [LITTLE])], [3, 4]
    ),
    "dotted keys": zarr3(
        [LITTLE], [3, 4], chunk_key_encoding={"name": "default", "configuration": {"separator": "."}}
    ),
    "v2 keys": zarr3([LITTLE], [3, 4], chunk_key_encoding={"name": "v2"}),
    "zarr2 plain": zarr2(None, [3, 4]),
    "zarr2 zstd": zarr2({"id": "zstd", "level": 1}, [3, 4]),
    "zarr2 gzip": zarr2({"id": "gzip", "level": 5}, [3, 4]),
    "zarr2 zlib": zarr2({"id": "zlib", "level": 5}, [3, 4]),
    "zarr2 bz2": zarr2({"id": "bz2", "level": 5}, [3, 4]),
    "zarr2 blosc": zarr2({"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}, [3, 4]),
    "zarr2 F": zarr2(None, [3, 4], order="F"),
    "zarr2 F zstd": zarr2({"id": "zstd", "level": 1}, [3, 4], order="F"),
    "zarr2 F blosc": zarr2({"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2}, [3, 4], order="F"),
    "zarr2 slashes": zarr2(None, [3, 4], dimension_separator="/"),
    "zarr2 big endian": zarr2(None, [3, 4], dtype=">f4"),
}
# Those whose bytes are the elements in some order: read by position, no decoder involved.
STORED = [
    *(
        "plain",
        "transposed",
        "plain shard of one",
        "plain shard of one, index first",
        "dotted keys",
        "v2 keys",
    ),
    *("zarr2 plain", "zarr2 F", "zarr2 slashes"),
]
BY_NAME = pytest.mark.parametrize("codec", CODECS)


class TestCodecs:
    @BY_NAME
    @OCDBT
    def test_every_codec_is_decoded(self, tmp_path, codec, use_ocdbt):
        truth = values_of(F32, (7, 10))
        item = write_item(tmp_path / "item", {("w",): (CODECS[codec], truth)}, use_ocdbt=use_ocdbt)
        (array,) = ckpttools.open(item).arrays.values()
        assert described(array.read()) == described(truth)
        check_regions(array, truth, 20)

    @pytest.mark.parametrize("codec", [name for name in CODECS if name != "shard of shards"])
    def test_every_codec_is_decoded_in_blocks(self, tmp_path, codec, monkeypatch):
        """As large pieces are read: on and on, back only by starting again."""
        monkeypatch.setattr(inner_chunks, "KEPT_BYTES", 0)
        monkeypatch.setattr(read_blocks, "READ_BLOCK_BYTES", 16)
        truth = values_of(F32, (7, 10))
        item = write_item(tmp_path / "item", {("w",): (CODECS[codec], truth)})
        (array,) = ckpttools.open(item).arrays.values()
        check_regions(array, truth, 40)

    @BY_NAME
    def test_only_coded_chunks_are_decoded(self, tmp_path, codec):
        item = write_item(tmp_path / "item", {("w",): (CODECS[codec], values_of(F32, (7, 10)))})
        (array,) = ckpttools.open(item).arrays.values()
        assert isinstance(array, Chunked)
        part = array.part((0, 0))
        if isinstance(part, Relayout):
            part = part.source
        assert isinstance(part, Stored if codec in STORED else Decoded)

    @pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.zarr3])
    @pytest.mark.parametrize("driver", ["zarr3", "zarr2"])
    @pytest.mark.parametrize("is_coded", [True, False], ids=["zstd", "plain"])
    def test_every_dtype_is_decoded(self, tmp_path, name, driver, is_coded):
        v3, v2 = [LITTLE, ZSTD] if is_coded else [LITTLE], {"id": "zstd", "level": 1} if is_coded else None
        truth = values_of(DTYPES[name].numpy, (5, 3))
        created = zarr3(v3, [2, 3]) if driver == "zarr3" else zarr2(v2, [2, 3])
        item = write_item(tmp_path / "item", {("w",): (created, truth)})
        (array,) = ckpttools.open(item).arrays.values()
        assert array.dtype.name == name
        assert described(array.read()) == described(truth)

    @OCDBT
    @pytest.mark.parametrize(
        "created",
        [
            zarr3([LITTLE], []),
            zarr3([LITTLE, ZSTD], []),
            zarr3([LITTLE, GZIP], []),
            zarr3([sharded([], [LITTLE, ZSTD])], []),
            zarr2(None, []),
            zarr2({"id": "blosc"}, []),
        ],
    )
    def test_scalar_arrays_are_decoded(self, tmp_path, created, use_ocdbt):
        item = write_item(tmp_path / "item", {("n",): (created, np.array(7.5))}, use_ocdbt=use_ocdbt)
        assert ckpttools.open(item).arrays["n",].read() == 7.5

    @OCDBT
    def test_names_with_dots_and_slashes_are_read(self, tmp_path, use_ocdbt):
        arrays = {path: (zarr3([LITTLE], [2]), values_of(F32, (3,), k)) for k, path in enumerate(NAMES)}
        item = write_item(tmp_path / "item", arrays, use_ocdbt=use_ocdbt)
        tree = ckpttools.open(item)
        assert list(tree) == NAMES
        for path, (_, truth) in arrays.items():
            assert described(tree[path].read()) == described(truth)

    @pytest.mark.parametrize("use_ocdbt", [True, False])
    @pytest.mark.parametrize("created", [zarr3([LITTLE], [2]), zarr2(None, [2])])
    def test_incomplete_metadata_is_read(self, tmp_path, use_ocdbt, created):
        truth = values_of(F32, (5,))
        item = write_item(tmp_path / "item", {("w",): (created, truth)}, use_ocdbt=use_ocdbt)
        change_json(item / "_METADATA", use_ocdbt=None, use_zarr3=None)
        assert described(ckpttools.open(item).arrays["w",].read()) == described(truth)

    def test_custom_data_file_prefixes_are_read(self, tmp_path):
        prefixes = {f"{kind}_data_prefix": f"ocdbt_{kind}/" for kind in ("value", "btree_node")}
        truth = values_of(F32, (900,))
        item = write_item(tmp_path / "item", {("w",): (zarr3([LITTLE], [500]), truth)}, config=prefixes)
        assert list(item.glob("ocdbt_value/*"))
        assert described(ckpttools.open(item).arrays["w",].read()) == described(truth)


NAMES = [("a.b", "c"), ("a/b c", "d"), ("a", "b/c"), ("layers", 0, "k"), ("layers", 1, "k"), ("ü",)]


class TestOmittedChunks:
    """Chunks of nothing but the fill value may have been left out, but only if the metadata says so."""

    TRUTH = np.concatenate([np.zeros((3, 4)), np.ones((3, 4))]).astype("float32")
    BY_CODEC = pytest.mark.parametrize(
        "created",
        [
            zarr3([LITTLE], [3, 4]),
            zarr3([LITTLE, ZSTD], [3, 4]),
            zarr3([sharded([1, 2], [LITTLE, ZSTD])], [3, 4]),
            zarr2(None, [3, 4], fill_value=0, dtype="<f4"),
            zarr2({"id": "blosc"}, [3, 4], order="F", fill_value=0, dtype="<f4"),
        ],
    )

    @OCDBT
    @BY_CODEC
    def test_missing_chunks_are_filled(self, tmp_path, created, use_ocdbt):
        item = self.written(tmp_path, created, use_ocdbt=use_ocdbt)
        (array,) = ckpttools.open(item).arrays.values()
        assert described(array.read()) == described(self.TRUTH)
        check_regions(array, self.TRUTH, 10)
        assert len(list(array.sources())) < 12

    @OCDBT
    @BY_CODEC
    @pytest.mark.parametrize("declared", [True, None])
    def test_missing_chunks_without_fill_rule_are_refused(self, tmp_path, created, use_ocdbt, declared):
        item = self.written(
            tmp_path, created, use_ocdbt=use_ocdbt, store_array_data_equal_to_fill_value=declared
        )
        with pytest.raises(FormatError, match="a chunk is missing") as caught:
            ckpttools.open(item).arrays["w",].read()
        assert "w, chunk" in caught.value.location
        # Where it says that nothing was left out, saying otherwise would make zeros of what was lost.
        assert ("store_array_data_equal_to_fill_value" in caught.value.hint) is (declared is None)

    def test_missing_inner_chunk_is_filled_or_refused(self, tmp_path):
        truth = np.arange(12, dtype="float32").reshape(3, 4)
        truth[0, :2] = 0
        created = zarr3([sharded([1, 2], [LITTLE, ZSTD])], [3, 4])
        item = write_item(tmp_path / "item", {("w",): (created, truth)}, all_chunks=False)
        assert described(ckpttools.open(item).arrays["w",].read()) == described(truth)
        change_json(item / "_METADATA", store_array_data_equal_to_fill_value=True)
        with pytest.raises(FormatError, match="a piece of a shard is missing") as caught:
            ckpttools.open(item).arrays["w",].read()
        assert "w, chunk c/0/0" in caught.value.location

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            ("float32", "NaN"),
            ("float32", "-Infinity"),
            ("float32", 1.5),
            ("float32", "0x7fc00001"),
            ("bfloat16", 2.5),
            ("int16", -3),
            ("bool", True),
            ("complex64", [1.0, -2.0]),
            ("float8_e4m3fn", 1.0),
        ],
    )
    def test_fill_values_match_tensorstore(self, tmp_path, dtype, value):
        created = zarr3([LITTLE], [2], fill_value=value, data_type=dtype)
        store = write_item(
            tmp_path / "item", {("w",): (created, values_of(DTYPES[dtype].numpy, (4,)))}, all_chunks=False
        )
        by_us, by_tensorstore = tmp_path / "ours", tmp_path / "theirs"
        for location in (by_us, by_tensorstore):
            shutil.copytree(store, location)
        array = ckpttools.open(by_us).arrays["w",]
        entries = array.part.arrays.entries
        for key in [key for key in entries.all if "/c/" in key]:
            del entries.all[key]
        assert described(array.read()) == described(filled(by_tensorstore))

    def written(self, tmp_path, created, **options):
        return write_item(tmp_path / "item", {("w",): (created, self.TRUTH)}, all_chunks=False, **options)


def filled(item: Path) -> np.ndarray:
    """What tensorstore reads in the array `w` without its chunks."""
    import tensorstore as ts

    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    store = ts.KvStore.open(spec).result()
    for key in store.list().result():
        if b"/c/" in key:
            store.write(key, None).result()
    return ts.open({"driver": "zarr3", "kvstore": spec | {"path": "w/"}}, open=True).result().read().result()


class TestDecodedChunkCache:
    """A coded piece that is read read block by read block is not decoded for every read block."""

    @pytest.fixture
    def decoded(self, monkeypatch):
        """Counts openings of streams."""
        opened = []
        original = inner_chunks.EncodedChunk.open

        def counting(piece):
            opened.append(piece.name)
            return original(piece)

        monkeypatch.setattr(inner_chunks.EncodedChunk, "open", counting)
        return opened

    def array(self, tmp_path, chunk, shape=(64, 64)):
        self.truth = values_of(F32, shape)
        created = zarr3([LITTLE, ZSTD], list(chunk))
        (array,) = ckpttools.open(
            write_item(tmp_path / "item", {("w",): (created, self.truth)})
        ).arrays.values()
        return array

    @pytest.mark.parametrize("chunk", [(64, 64), (16, 64), (64, 8)])
    def test_reading_by_rows_decodes_each_chunk_once(self, tmp_path, decoded, chunk):
        array = self.array(tmp_path, chunk)
        scratch, out = Scratch(array.scratch_bytes), np.empty((1, 64), "u4")
        for row in range(64):
            array.read_into(Region((row, 0), (row + 1, 64)), out, scratch)
            assert np.array_equal(out[0], self.truth.view("u4")[row])
        assert len(decoded) == (64 // chunk[0]) * (64 // chunk[1])

    @pytest.mark.parametrize("chunk", [(64, 64), (16, 64), (64, 32)])
    def test_reading_rows_of_large_chunks_decodes_once(self, tmp_path, decoded, monkeypatch, chunk):
        monkeypatch.setattr(inner_chunks, "KEPT_BYTES", 0)
        self.test_reading_by_rows_decodes_each_chunk_once(tmp_path, decoded, chunk)

    def test_transposed_reading_decodes_once(self, tmp_path, decoded, monkeypatch):
        monkeypatch.setattr("ckpttools.array.read_blocks.READ_BLOCK_BYTES", 1024)
        array = self.array(tmp_path, (64, 64))
        turned = relayout(array, [(64,), (64,)], (1, 0), (1, 1))
        assert np.array_equal(turned.read().view("u4"), self.truth.T.view("u4"))
        assert len(decoded) == 1

    def test_decoded_cache_is_bounded(self, tmp_path, decoded, monkeypatch):
        monkeypatch.setattr(inner_chunks, "KEPT_BYTES", 3000)
        array = self.array(tmp_path, (8, 8), (64, 64))
        scratch = Scratch(array.scratch_bytes)
        array.read_into(Region((0, 0), (64, 60)), np.empty((64, 60), "u4"), scratch)
        worker = inner_chunks._worker(scratch)
        assert sum(piece.nbytes for piece in worker._pieces.values()) <= 3000

    def test_cached_chunks_are_freed_with_their_worker(self, tmp_path):
        array = self.array(tmp_path, (8, 8), (64, 64))
        before = len(inner_chunks._WORKERS)
        scratch = Scratch(array.scratch_bytes)
        array.read_into(Region((0, 0), (3, 3)), np.empty((3, 3), "u4"), scratch)
        assert len(inner_chunks._WORKERS) == before + 1
        del scratch
        assert len(inner_chunks._WORKERS) == before

    def test_scratch_counts_cached_chunks(self, tmp_path):
        small = self.array(tmp_path / "small", (8, 8))
        assert 64 * 64 * 4 <= small.scratch_bytes < 2 << 20
        large = self.array(tmp_path / "large", (64, 64), (64, 64))
        assert large.read_cost(Region((0, 0), (1, 1))).nbytes == large.part((0, 0)).encoded.nbytes


def test_opening_and_zstd_do_not_import_tensorstore():
    code = """
import sys
from dataclasses import replace
from pathlib import Path
from ckpttools.formats.registry import open_tree
tree = open_tree(Path(sys.argv[1]))
assert not {"tensorstore", "jax", "orbax", "numpy"} & set(sys.modules), "opening"
for array in tree.arrays.values():
    array.read()
assert not {"tensorstore", "jax", "orbax"} & set(sys.modules), "reading"
"""
    subprocess.run([sys.executable, "-c", code, ORBAX / "maxtext_run"], check=True)
