"""Damaged arrays of Orbax items: what is wrong is said, and where."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command_line import examine
from support.internals import LocalFile
from support.locations import ORBAX
from support.orbax_items import (
    BIG,
    BLOSC,
    CRC,
    GZIP,
    LITTLE,
    ZSTD,
    change_index,
    change_json,
    damage_node,
    sharded,
    values_of,
    write_item,
    zarr2,
    zarr3,
)

import ckpttools
from ckpttools import FormatError, Region
from ckpttools.formats.zarr import inner_chunks

F32 = np.dtype("float32")
OCDBT = pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])


class TestDamaged:
    def item(self, tmp_path, created=None, use_ocdbt=True):
        truth = values_of(F32, (600, 2))
        created = created or zarr3([LITTLE], [300, 2])
        return write_item(tmp_path / "item", {("w",): (created, truth)}, use_ocdbt=use_ocdbt)

    def error(self, item, kind=FormatError):
        with pytest.raises(kind) as caught:
            ckpttools.open(item).arrays["w",].read()
        return caught.value

    def test_entry_past_the_end_of_its_data_file_is_reported(self, tmp_path):
        item = self.item(tmp_path)

        def change(entries):
            entry = entries[b"w/c/1/0"]
            entries[b"w/c/1/0"] = replace(entry, offset=(item / entry.file).stat().st_size - 2000)

        change_index(item, change)
        error = self.error(item)
        assert "a chunk extends beyond the end of " in error.message
        assert str(item / "d") in error.message
        assert error.location.endswith("w, chunk c/1/0")

    def test_truncated_chunk_is_reported(self, tmp_path):
        item = self.item(tmp_path, zarr3([LITTLE, ZSTD], [300, 2]), use_ocdbt=False)
        file = item / "w" / "c" / "1" / "0"
        file.write_bytes(file.read_bytes()[:-100])
        error = self.error(item)
        assert error.message == "a chunk decodes to fewer bytes than its shape needs"
        assert error.location.endswith("w, chunk c/1/0")

    def test_deleted_data_file_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        change_index(item, lambda entries: None)
        for file in item.glob("d/*"):
            if file.name != "index":
                file.unlink()
        error = self.error(item)
        assert "a data file is missing: " in error.message
        assert str(item / "d") in error.message

    @pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "_METADATA"])
    def test_invalid_custom_metadata_is_refused(self, tmp_path, file):
        item = shutil.copytree(ORBAX / "standard", tmp_path / "item")
        change_json(item / file, custom_metadata=3)
        with pytest.raises(FormatError, match="not a JSON object") as caught:
            ckpttools.open(item)
        assert caught.value.location == str(item / file)
        (result,) = (finding for finding in examine(item).findings if finding.level == "error")
        assert "not a JSON object" in result.what

    def test_deleted_node_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        change_index(item, lambda entries: None)
        (item / "d" / "index").unlink()
        with pytest.raises(FormatError, match="a file of the index is missing") as caught:
            ckpttools.open(item)
        assert str(item / "d" / "index") in caught.value.message
        assert f'ckpttools.doctor("{item}")' in caught.value.hint
        (result,) = (finding for finding in examine(item).findings if finding.level == "error")
        assert result.check == "index" and "a file of the index is missing" in result.what
        assert "ckpt doctor" not in result.hint

    def test_file_deleted_after_opening_is_reported(self, tmp_path):
        item = self.item(tmp_path, use_ocdbt=False)
        array = ckpttools.open(item).arrays["w",]
        path = item / "w" / "c" / "1" / "0"
        source = LocalFile.at(path)
        path.unlink()
        with pytest.raises(FormatError, match="cannot open") as caught:
            source.read(0, 1)
        assert "ckpttools.doctor" in caught.value.hint
        with pytest.raises(FormatError, match="a chunk is missing"):
            array.read()

    def test_deleted_chunk_is_reported(self, tmp_path):
        item = self.item(tmp_path, use_ocdbt=False)
        (item / "w" / "c" / "1" / "0").unlink()
        error = self.error(item)
        assert (error.message, error.got) == ("a chunk is missing", "no such file")
        assert error.location.endswith("w, chunk c/1/0")

    def test_chunk_of_the_wrong_length_is_reported(self, tmp_path):
        item = self.item(tmp_path, use_ocdbt=False)
        with (item / "w" / "c" / "1" / "0").open("ab") as file:
            file.write(b"more")
        error = self.error(item)
        assert error.message == "a chunk has the wrong length"
        assert (error.got, error.expected) == ("2404 bytes", "2400 bytes")

    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize(
        ("codecs", "message"),
        [
            ([LITTLE, ZSTD], "the zstd data is damaged"),
            ([LITTLE, GZIP], "the gzip data is damaged"),
            ([LITTLE, ZSTD, CRC], "the CRC-32C of a chunk does not match"),
            ([LITTLE, CRC], "a chunk has the wrong length"),
            ([LITTLE, BLOSC], "tensorstore cannot decode the chunk|decodes to more"),
            ([BIG], "a chunk has the wrong length"),
            ([sharded([300, 2], [LITTLE, ZSTD])], "CRC-32C of a shard's index"),
        ],
    )
    def test_encoded_chunk_with_other_content_is_reported(self, tmp_path, codecs, message, kept, monkeypatch):
        if not kept:
            monkeypatch.setattr(inner_chunks, "KEPT_BYTES", 0)
        item = self.item(tmp_path, zarr3(codecs, [300, 2]), use_ocdbt=False)
        (item / "w" / "c" / "1" / "0").write_bytes(b"something else" * 100)
        with pytest.raises(FormatError, match=message) as caught:
            ckpttools.open(item).arrays["w",].read(Region((299, 0), (600, 1)))
        assert caught.value.location.endswith("w, chunk c/1/0")

    @pytest.mark.parametrize(("rows", "word"), [(299, "fewer"), (301, "more")])
    def test_chunk_decoding_to_another_length_is_reported(self, tmp_path, rows, word):
        import zstandard

        item = self.item(tmp_path, zarr3([LITTLE, ZSTD], [300, 2]), use_ocdbt=False)
        (item / "w" / "c" / "1" / "0").write_bytes(zstandard.compress(bytes(8 * rows)))
        error = self.error(item)
        assert error.message == f"a chunk decodes to {word} bytes than its shape needs"
        assert error.expected == "2400 bytes"

    def test_shard_shorter_than_its_index_is_reported(self, tmp_path):
        item = self.item(tmp_path, zarr3([sharded([300, 2], [LITTLE, ZSTD])], [300, 2]), use_ocdbt=False)
        (item / "w" / "c" / "1" / "0").write_bytes(b"short")
        assert self.error(item).message == "a shard is shorter than its index"

    @OCDBT
    @pytest.mark.parametrize("changed", [{"shape": [300, 2]}, {"shape": [600, 1]}])
    def test_metadata_contradicting_the_chunks_is_reported(self, tmp_path, use_ocdbt, changed):
        truth = values_of(F32, (600, 4))
        item = write_item(
            tmp_path / "item", {("w",): (zarr3([LITTLE], [300, 2]), truth)}, use_ocdbt=use_ocdbt
        )
        change_document(item, use_ocdbt, **changed)
        with pytest.raises(FormatError, match="contradicts its chunks") as caught:
            ckpttools.open(item)
        assert "w/c/" in caught.value.location
        assert str(changed["shape"]) in caught.value.expected

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"data_type": "float128"}, "an unknown zarr data type"),
            ({"shape": [600]}, "shape and chunk shape do not match"),
            ({"shape": [600, -2]}, "an invalid shape"),
            ({"fill_value": "none"}, "an invalid fill value"),
            ({"chunk_key_encoding": {"name": "v9"}}, "an unknown encoding of chunk keys"),
            ({"codecs": [3]}, "not the metadata of a zarr v3 array"),
            ({"codecs": 3}, "not the metadata of a zarr v3 array"),
        ],
    )
    def test_invalid_array_metadata_is_refused(self, tmp_path, changed, message):
        item = self.item(tmp_path, use_ocdbt=False)
        change_document(item, False, **changed)
        with pytest.raises(FormatError, match=message) as caught:
            ckpttools.open(item)
        assert caught.value.location == f"{item}: w/zarr.json"

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"dtype": "<M8"}, "an unknown zarr data type"),
            ({"dtype": [["a", "<f4"]]}, "an unknown zarr data type"),
            ({"filters": [{"id": "delta"}]}, "an unknown order or filter"),
            ({"order": "A"}, "an unknown order or filter"),
            ({"chunks": None}, "not the metadata of a zarr v2 array"),
        ],
    )
    def test_invalid_zarr2_metadata_is_refused(self, tmp_path, changed, message):
        item = self.item(tmp_path, zarr2(None, [300, 2]), use_ocdbt=False)
        change_json(item / "w" / ".zarray", **changed)
        with pytest.raises(FormatError, match=message):
            ckpttools.open(item)

    def test_copy_without_dot_files_is_reported(self, tmp_path):
        item = shutil.copytree(ORBAX / "pytree_ocdbt0_zarr30", tmp_path / "item")
        for file in item.rglob(".*"):
            file.unlink()
        with pytest.raises(FormatError, match=r"has no params\.dense\.bias/\.zarray") as caught:
            ckpttools.open(item)
        assert "names start with a dot" in caught.value.hint

    def test_deleted_array_is_reported(self, tmp_path):
        item = shutil.copytree(ORBAX / "pytree_ocdbt0_zarr31", tmp_path / "item")
        shutil.rmtree(item / "params.dense.bias")
        with pytest.raises(FormatError, match=r"has no params\.dense\.bias/zarr\.json") as caught:
            ckpttools.open(item)
        assert "deleted or not copied" in caught.value.hint

    def test_damaged_node_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        assert len(damaged := [file for file in item.glob("d/*") if damage_node(file)]) >= 1
        with pytest.raises(FormatError, match="CRC-32C does not match") as caught:
            ckpttools.open(item)
        assert any(str(file) in caught.value.location for file in damaged)

    @pytest.mark.parametrize("size", [0, 3, 20])
    def test_truncated_manifest_is_reported(self, tmp_path, size):
        manifest = self.item(tmp_path) / "manifest.ocdbt"
        manifest.write_bytes(manifest.read_bytes()[:size])
        with pytest.raises(FormatError, match="truncated") as caught:
            ckpttools.open(manifest.parent)
        assert caught.value.location == str(manifest)

    def test_two_leaves_with_one_name_are_reported(self, tmp_path):
        created = zarr3([LITTLE], [2]), np.zeros(2)
        item = write_item(tmp_path / "item", {("a", "b"): created})
        document = json.loads((item / "_METADATA").read_bytes())
        entry = document["tree_metadata"]["('a', 'b')"]
        dotted = entry | {"key_metadata": [{"key": "a.b", "key_type": 2}]}
        change_json(item / "_METADATA", tree_metadata={"1": entry, "2": dotted})
        with pytest.raises(FormatError, match="two leaves have the same name on disk") as caught:
            ckpttools.open(item)
        assert caught.value.got == "a/b and a.b are both 'a.b'"

    def test_file_name_outside_the_directory_is_reported(self, tmp_path):
        outside = write_item(
            tmp_path / "outside", {("w",): (zarr3([LITTLE], [2]), np.zeros(2))}, use_ocdbt=False
        )
        item = shutil.copytree(outside, tmp_path / "item")
        entry = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]["('w',)"]
        entry["key_metadata"][0]["key"] = "../outside/w"
        change_json(item / "_METADATA", tree_metadata={"1": entry})
        with pytest.raises(FormatError, match="the directory has no"):
            ckpttools.open(item)

    def test_missing_string_is_reported(self, tmp_path):
        item = shutil.copytree(ORBAX / "tree_zoo", tmp_path / "item")
        (item / "_strings.json").write_text("{}")
        with pytest.raises(FormatError, match="a string is missing") as caught:
            ckpttools.open(item)
        assert "'str'" in caught.value.expected

    def test_invalid_metadata_of_arrays_is_refused(self, tmp_path):
        item = shutil.copytree(ORBAX / "tree_zoo", tmp_path / "item")
        (item / "array_metadatas" / "process_0").write_text('{"array_metadatas": [1]}')
        with pytest.raises(FormatError, match="not the metadata of arrays"):
            ckpttools.open(item)


def change_document(item: Path, use_ocdbt: bool, **changes: object) -> None:
    """Changes entries of the `zarr.json` of the array `w`."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{item}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base} if use_ocdbt else base).result()
    document = json.loads(store.read("w/zarr.json").result().value) | changes
    store.write("w/zarr.json", json.dumps(document).encode()).result()
