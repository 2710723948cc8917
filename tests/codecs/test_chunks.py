"""`ckpt inspect chunks`: what files hold, against tensorstore's own counts and plain enumeration."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.internals import OrbaxWriter, advice, count_runs, grid_cell, grid_indices, keystr, parse_mesh
from support.locations import HF, ORBAX
from support.orbax_items import BIG, CRC, GZIP, LITTLE, ZSTD, sharded, values_of, write_item, zarr2, zarr3
from support.stored_trees import write

import ckpttools
from ckpttools import DTYPES, Metadata, Region, Tree, UsageError
from ckpttools.array.storage import Storage, StoredArray, StoredFile
from ckpttools.core.region import ceil_div
from ckpttools.formats.registry import storage_of
from ckpttools.inspection.chunks import inspect_chunks, parse_spec, predict
from ckpttools.sharding.mesh import MeshShape
from ckpttools.testing.strategies import stored

F32 = np.dtype("float32")
TRANSPOSED_EXPERTS = {"name": "transpose", "configuration": {"order": [1, 0]}}
READABLE = [
    "pytree_ocdbt1_zarr31",
    "pytree_ocdbt0_zarr30",
    "maxtext_run",
    "lazy_2proc",
    "tree_zoo",
    "standard",
]


def array(shape, chunk, piece=None, *, nbytes=None, missing=0, dtype="float32", codecs=(), **how):
    """A stored array as a format would describe it; `piece` "any" is one of plain ranges."""
    piece = None if piece == "any" else chunk if piece is None else piece
    chunks = prod(map(ceil_div, shape, chunk))
    size = prod(shape) * DTYPES[dtype].itemsize if nbytes is None else nbytes
    return StoredArray(
        "w", tuple(shape), DTYPES[dtype], tuple(chunk), piece, codecs, chunks, missing, size, **how
    )


class TestMeshes:
    @pytest.mark.parametrize(
        ("text", "axes"),
        [
            ("8", {"0": 8}),
            ("4x2", {"0": 4, "1": 2}),
            ("data=4,fsdp=2", {"data": 4, "fsdp": 2}),
            (" data = 4 , x = 1", {"data": 4, "x": 1}),
        ],
    )
    def test_parse_mesh_accepts_documented_forms(self, text, axes):
        assert dict(parse_mesh(text).axes) == axes

    @pytest.mark.parametrize(
        "text", ["", "0", "x", "4x", "a=", "a=2,a=3", "-1", "a", "a=2,3", "=4", "9999999x9"]
    )
    def test_invalid_mesh_is_refused(self, text):
        with pytest.raises(UsageError, match="is not a mesh"):
            parse_mesh(text)

    @pytest.mark.parametrize(
        ("text", "reason"), [("a=2,a=2", "named twice"), ("99999999999", "at most 1,048,576 devices")]
    )
    def test_invalid_mesh_is_explained(self, text, reason):
        with pytest.raises(UsageError) as caught:
            parse_mesh(text)
        assert reason in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("axis0", (8, 1, 1)),
            ("axis-1", (1, 1, 8)),
            ("axis5", (1, 1, 1)),
            ("layer", (1, 8, 1)),
            ("replicated", (1, 1, 1)),
            ("axis0=x,axis2=y", (4, 1, 2)),
            ("axis0=x+y", (8, 1, 1)),
            ("P('x', None, y)", (4, 1, 2)),
            ("P(None, ('x', 'y'))", (1, 8, 1)),
            ("PartitionSpec(y)", (2, 1, 1)),
            ("P()", (1, 1, 1)),
            ("P(x, None, None, y)", (1, 1, 1)),
        ],
    )
    def test_parse_spec_accepts_documented_forms(self, text, pieces):
        mesh = parse_mesh("x=4,y=2")
        assert parse_spec(text, mesh).pieces(3, 1, mesh) == pieces

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "axis",
            "axis0=z",
            "P(z)",
            "P(1.5)",
            "P('x'",
            "P(x, x)",
            "axis0,axis1",
            "rows",
            "P(*x)",
            "P(a=x)",
        ],
    )
    def test_invalid_spec_is_refused(self, text):
        with pytest.raises(UsageError):
            parse_spec(text, parse_mesh("x=4,y=2"))

    def test_layer_spec_does_not_split_unstacked_arrays(self):
        mesh = parse_mesh("8")
        assert parse_spec("layer", mesh).pieces(2, None, mesh) == (1, 1)


@st.composite
def cut_arrays(draw):
    rank = draw(st.integers(1, 3))
    shape = draw(st.tuples(*[st.integers(1, 12)] * rank))
    piece = tuple(draw(st.integers(1, n)) for n in shape)
    chunk = tuple(p * draw(st.integers(1, 3)) for p in piece)
    mesh = parse_mesh(draw(st.sampled_from(["1", "2", "3x2", "4"])))
    names = list(mesh.axes)
    axes = draw(st.lists(st.integers(0, rank - 1), min_size=len(names), max_size=len(names), unique=False))
    text = ",".join(f"axis{axis}={name}" for axis, name in zip(axes, names, strict=True))
    return array(shape, chunk, piece), mesh, parse_spec(text, mesh)


class TestReads:
    @given(cut_arrays())
    def test_prediction_matches_enumeration(self, case):
        stored, mesh, spec = case
        result = predict(stored, mesh, spec, None)
        shards = list(grid_indices(result.shards_per_axis, (1,) * len(result.shards_per_axis)))
        shape = tuple(n // k for n, k in zip(stored.shape, result.shards_per_axis, strict=True))
        regions = [grid_cell(stored.shape, shape, index) for index in shards]
        met = [self.cells(stored.shape, stored.piece, region) for region in regions]
        whole = [self.cells(stored.shape, stored.chunk, region) for region in regions]
        copies = mesh.size // len(shards)
        assert result.total_fetched == sum(met) * copies * prod(stored.piece) * 4
        assert result.total_needed == prod(stored.shape) * 4 * copies
        assert result.needed == prod(shape) * 4
        assert result.reads == max(met) + (0 if stored.piece == stored.chunk else max(whole))
        assert result.over_read >= 1

    def cells(self, shape, size, region):
        """Cells of a grid that a region meets."""
        return sum(
            grid_cell(shape, size, index).intersect(region) is not None for index in grid_indices(shape, size)
        )

    @pytest.mark.parametrize(
        ("codecs", "piece"),
        [
            ([LITTLE], None),
            ([sharded([64, 256], [LITTLE])], None),
            ([sharded([16, 64], [LITTLE])], (16, 64)),
        ],
        ids=["plain", "one-piece-shards", "shards"],
    )
    @pytest.mark.parametrize("spec", ["axis0", "axis1", "axis0=0,axis1=1"])
    def test_prediction_matches_bytes_read_by_tensorstore(self, tmp_path, codecs, piece, spec):
        import tensorstore as ts

        values = values_of(F32, (512, 256))
        item = write_item(tmp_path / "item", {("w",): (zarr3(codecs, [64, 256]), values)}, use_ocdbt=False)
        tree = ckpttools.open(item)
        mesh = parse_mesh("4x2")
        report = inspect_chunks(tree, storage_of(tree), mesh=mesh, spec=parse_spec(spec, mesh))
        reads = report.arrays[0].reads
        store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{item}/w/"}}
        opened = ts.open(store).result()
        shape = tuple(n // k for n, k in zip(values.shape, reads.shards_per_axis, strict=True))
        before = bytes_read(ts)
        for index in grid_indices(reads.shards_per_axis, (1, 1)):
            opened[grid_cell(values.shape, shape, index).slices].read().result()
        measured = (bytes_read(ts) - before) * (mesh.size // prod(reads.shards_per_axis))
        # Indexes of shards are read, too; tensorstore takes one for several pieces.
        index_bytes = 16 * (1 if piece is None else 16) + 4 if codecs[0] is not LITTLE else 0
        assert measured <= reads.total_fetched + mesh.size * 8 * index_bytes
        assert measured >= reads.total_fetched

    def test_contiguous_runs_are_read_as_ranges(self):
        mesh = parse_mesh("4")
        stored = array((8, 8), (8, 8), "any")
        rows, columns = (predict(stored, mesh, parse_spec(text, mesh), None) for text in ("axis0", "axis1"))
        assert (rows.reads, columns.reads) == (1, count_runs((8, 8), Region((0, 0), (8, 2)))) == (1, 8)
        assert rows.over_read == columns.over_read == 1

    def test_indivisible_axis_is_not_split(self):
        mesh = parse_mesh("3")
        result = predict(array((8, 6), (8, 6)), mesh, parse_spec("axis0", mesh), None)
        assert (result.shards_per_axis, result.is_uneven, result.over_read) == ((1, 1), True, 1)

    def test_compressed_bytes_are_predicted(self):
        mesh = parse_mesh("4")
        result = predict(array((8, 8), (4, 8), nbytes=100), mesh, parse_spec("axis0", mesh), None)
        assert (result.fetched, result.needed, result.over_read) == (50, 64, 2)


def bytes_read(ts):
    name = "/tensorstore/kvstore/file/bytes_read"
    metrics = ts.experimental_collect_matching_metrics(name)
    return sum(value["value"] for metric in metrics for value in metric["values"])


class TestSurvey:
    @pytest.mark.parametrize("name", READABLE)
    def test_every_byte_is_accounted_for(self, name):
        tree = ckpttools.open(ORBAX / name)
        storage = storage_of(tree)
        for file in storage.files:
            assert file.nbytes == (Path(storage.root) / file.name).stat().st_size
            assert min(file.referenced_nbytes, file.index_nbytes, file.unreferenced_nbytes) >= 0
        assert {item.path: item.shape for item in storage.arrays} == {
            keystr(path): leaf.shape for path, leaf in tree.arrays.items()
        }
        assert [item.path for item in storage.arrays] == [keystr(path) for path in tree.arrays]
        assert not any(item.missing for item in storage.arrays)

    def test_survey_counts_chunk_files(self):
        storage = storage_of(ckpttools.open(ORBAX / "llama3.1_scanned_zarr3_noocdbt"))
        on_disk = sum(file.nbytes for file in storage.files if file.kind == "data")
        assert sum(item.nbytes for item in storage.arrays) == on_disk
        assert sum(file.referenced_nbytes for file in storage.files) == on_disk
        assert storage.indexes == ()

    def test_survey_describes_safetensors(self):
        storage = storage_of(ckpttools.open(HF))
        file = next(item for item in storage.files if item.kind == "data")
        assert file.referenced_nbytes + file.index_nbytes == file.nbytes
        assert file.arrays == len(storage.arrays) == 39
        assert all(item.piece is None for item in storage.arrays)

    def test_holes_and_unused_shards_are_counted(self, tmp_path):
        shutil.copy(HF / "model.safetensors", tmp_path)
        shutil.copy(HF / "model.safetensors", tmp_path / "old.safetensors")
        storage = storage_of(ckpttools.open(tmp_path))
        kinds = {file.name: (file.kind, file.unreferenced_nbytes) for file in storage.files}
        size = (HF / "model.safetensors").stat().st_size
        assert kinds == {"model.safetensors": ("data", 0), "old.safetensors": ("unused", size)}

    def test_survey_reports_dead_bytes_and_shared_files(self, tmp_path):
        values = values_of(F32, (600, 2))
        item = write_item(tmp_path / "item", {("w",): (zarr3([LITTLE], [300, 2]), values)})
        before = storage_of(ckpttools.open(item))
        largest = max(
            (file for file in before.files if file.kind == "data"), key=lambda file: file.referenced_nbytes
        )
        with (item / largest.name).open("ab") as file:
            file.write(bytes(1000))
        os.link(item / largest.name, tmp_path / "second name")
        after = {file.name: file for file in storage_of(ckpttools.open(item)).files}[largest.name]
        assert (after.unreferenced_nbytes, after.referenced_nbytes) == (
            largest.unreferenced_nbytes + 1000,
            largest.referenced_nbytes,
        )
        assert (largest.links, after.links) == (1, 2)

    @pytest.mark.parametrize("cut", [None, 1000])
    def test_survey_reports_lost_or_truncated_data_file(self, tmp_path, cut):
        # Tensorstore at times puts the index beside the data, and without that nothing opens.
        array = stored(values_of(F32, (600, 2)).view(np.uint32), DTYPES["float32"])
        write(Tree({("w",): array}), OrbaxWriter(), tmp_path)
        item = tmp_path / "0" / "items"
        before = max(storage_of(ckpttools.open(item)).files, key=attrgetter("referenced_nbytes"))
        assert not before.index_nbytes
        if cut is None:
            (item / before.name).unlink()
        else:
            os.truncate(item / before.name, cut)
        tree = ckpttools.open(item)
        result = inspect_chunks(tree, storage_of(tree))
        after = next(file for file in result.files if file.name == before.name)
        assert after.kind == ("missing" if cut is None else "data")
        assert (
            after.referenced_nbytes + after.index_nbytes + after.unreferenced_nbytes
            == after.nbytes
            == (cut or 0)
        )
        assert (
            after.referenced_nbytes + after.index_nbytes + after.missing_nbytes
            == before.referenced_nbytes + before.index_nbytes
        )
        assert advice(result)[0].subject == "missing data"

    def test_survey_reports_unmerged_processes(self, tmp_path):
        item = shutil.copytree(ORBAX / "lazy_2proc" / "7" / "items", tmp_path / "items")
        merged = storage_of(ckpttools.open(item))
        (item / "manifest.ocdbt").unlink()
        storage = storage_of(ckpttools.open(item))
        assert storage.indexes == ("ocdbt.process_0/manifest.ocdbt", "ocdbt.process_1/manifest.ocdbt")
        assert storage.arrays == merged.arrays

    @pytest.mark.parametrize("use_ocdbt", [True, False])
    def test_survey_reports_missing_chunks(self, tmp_path, use_ocdbt):
        values = np.zeros((600, 2), F32)
        values[:300] = 1
        created = zarr3([LITTLE], [100, 2])
        item = write_item(
            tmp_path / "item", {("w",): (created, values)}, use_ocdbt=use_ocdbt, all_chunks=False
        )
        tree = ckpttools.open(item)
        result = inspect_chunks(tree, storage_of(tree))
        assert (result.num_chunks, result.missing_chunks, result.stored_nbytes) == (6, 3, 2400)
        assert [entry.subject for entry in advice(result)] == ["missing chunks"]

    @pytest.mark.parametrize(
        ("created", "words", "piece"),
        [
            (zarr3([LITTLE], [4, 4]), (), (4, 4)),
            (zarr3([BIG], [4, 4]), ("big-endian",), (4, 4)),
            (zarr3([LITTLE, ZSTD, CRC], [4, 4]), ("zstd:3", "crc32c"), (4, 4)),
            (
                zarr3([TRANSPOSED_EXPERTS, sharded([4, 4], [sharded([2, 4], [LITTLE, GZIP])])], [4, 4]),
                ("transpose[1,0]", "gzip:5", "in shards of [4,4]", "sharded"),
                (4, 4),
            ),
            (zarr2({"id": "blosc", "clevel": 5}, [4, 4], dtype=">f4"), ("big-endian", "blosc:5"), (4, 4)),
            (zarr3([LITTLE, ZSTD], [4, 4]), ("zstd:3",), (4, 4)),
            (zarr3([sharded([4, 4], [LITTLE, ZSTD])], [4, 4]), ("zstd:3", "sharded"), (4, 4)),
            (zarr3([sharded([2, 4], [LITTLE])], [4, 4]), ("in shards of [4,4]",), (2, 4)),
            (
                zarr3([TRANSPOSED_EXPERTS, LITTLE], [4, 4]),
                ("transpose[1,0]",),
                (4, 4),
            ),
            (zarr2(None, [4, 4], order="F"), ("order F",), (4, 4)),
            (zarr2({"id": "zstd", "level": 1}, [4, 4]), ("zstd:1",), (4, 4)),
        ],
    )
    def test_survey_names_codecs(self, tmp_path, created, words, piece):
        item = write_item(tmp_path / "item", {("w",): (created, values_of(F32, (8, 8)))})
        stored = storage_of(ckpttools.open(item)).arrays[0]
        assert (stored.codecs, stored.piece, stored.chunk) == (words, piece, (4, 4))
        assert stored.compressed == any(word.startswith(("zstd", "gzip", "blosc")) for word in words)
        assert stored.transposed == any(word.startswith(("transpose", "order")) for word in words)

    def test_survey_describes_a_zarr_hierarchy(self, tmp_path):
        import zarr

        group = zarr.open_group(str(tmp_path / "z"), mode="w")
        group.create_array("a/b", shape=(8, 4), chunks=(4, 4), dtype="f4")[:] = 1
        storage = storage_of(ckpttools.open(tmp_path / "z"))
        assert [(item.path, item.chunks, item.missing) for item in storage.arrays] == [("a/b", 2, 0)]


class TestAdvice:
    GIB = 1 << 30

    def subjects(self, *arrays, files=(), mesh=None, spec=None, indexes=("manifest.ocdbt",)):
        storage = Storage("/x", indexes, tuple(files), arrays)
        tree = Tree({}, Metadata("orbax", location="/x"))
        parsed = parse_mesh(mesh) if mesh else None
        report = inspect_chunks(tree, storage, "*", parsed, parse_spec(spec, parsed) if parsed else None)
        return [item.subject for item in advice(report)]

    def test_well_chunked_arrays_need_no_advice(self):
        assert self.subjects(array((16384, 16, 1024), (1024, 1, 1024))) == []
        assert self.subjects(array((8, 8), (1, 1)), array((4, 4), (4, 4), compressed=True)) == []
        assert self.subjects(array((16384, 1024), (16, 1024))) == []  # of 64 KiB

    @pytest.mark.parametrize(
        ("stored", "subject"),
        [
            (array((16384, 16384), (16384, 16384)), "giant chunks"),
            (array((16384, 1024), (15, 1024)), "over-fine chunks"),
            (array((16384, 1024), (1024, 1024), (8, 1024)), "over-fine chunks"),
            (
                array((16384, 1024), (1024, 1024), compressed=True),
                "compressed chunks",
            ),
            (
                array((16384, 1024), (1024, 1024), transposed=True),
                "transposed chunks",
            ),
            (array((16384, 1024), (1024, 1024), missing=3), "missing chunks"),
        ],
    )
    def test_advice_covers_arrays(self, stored, subject):
        assert self.subjects(stored) == [subject]

    def test_advice_covers_files(self):
        dead = StoredFile("d/x", "unused", 1 << 28)
        chunks = [StoredFile(f"w/c/{k}", "data", 4, 4) for k in range(3000)]
        assert self.subjects(files=[dead]) == ["dead bytes"]
        assert self.subjects(files=chunks, indexes=()) == ["many files"]
        assert self.subjects(indexes=("ocdbt.process_0/manifest.ocdbt",)) == ["unmerged index"]

    def test_advice_covers_sharding(self):
        cut_by_layer = array((2048, 16, 8192), (2048, 1, 8192), dtype="bfloat16")
        assert self.subjects(cut_by_layer, mesh="8", spec="axis0") == ["over-read"]
        assert self.subjects(cut_by_layer, mesh="8", spec="axis1") == []
        tensor = array((4096, 4096), (4096, 4096), "any")
        assert self.subjects(tensor, mesh="8", spec="axis1") == ["short runs"]
        assert self.subjects(tensor, mesh="8", spec="axis0") == []

    def test_advice_reports_unequal_shards(self):
        uneven, drop_uneven_axes = array((10, 8), (10, 8)), array((9, 8), (9, 8))
        assert self.subjects(uneven, drop_uneven_axes, mesh="3", spec="axis0") == ["does not divide"]
        assert self.subjects(drop_uneven_axes, mesh="3", spec="axis0") == []

    @pytest.mark.parametrize("spec", ["axis2", "layer", "P(None, None, '0')"])
    def test_advice_reports_replicating_spec(self, spec):
        assert self.subjects(array((8, 8), (8, 8)), mesh="2", spec=spec) == ["replicated"]
        assert self.subjects(array((8, 8), (8, 8)), mesh="1", spec=spec) == []

    @pytest.mark.parametrize("spec", ["replicated", "P()", "P(None)", "axis1"])
    def test_advice_accepts_sufficient_spec(self, spec):
        assert self.subjects(array((8, 8), (8, 8)), mesh="2", spec=spec) == []

    def test_layer_spec_splits_only_stacked_layers(self):
        tree = ckpttools.open(ORBAX / "maxtext_run")
        mesh = MeshShape({"0": 2})
        report = inspect_chunks(tree, storage_of(tree), "params/*", mesh, parse_spec("layer", mesh))
        cut = {item.path.rpartition("decoder/")[2]: item.reads.shards_per_axis for item in report.arrays}
        assert cut["layers/mlp/wi_0/kernel"] == (1, 2, 1)
        assert cut["decoder_norm/scale"] == (1,)


class TestCommand:
    def run(self, *arguments, columns="80"):
        return ckpt("inspect", "chunks", *arguments, COLUMNS=columns)

    @pytest.mark.parametrize("name", READABLE)
    @pytest.mark.parametrize("columns", ["80", "200"])
    def test_chunks_text_fits_the_terminal(self, name, columns):
        result = self.run(ORBAX / name, "--mesh", "4x2", "--spec", "axis0=0,axis1=1", columns=columns)
        assert result.exit_code == 0
        table = [line for line in result.output.splitlines() if line.startswith(("array ", "    "))]
        assert table and max(map(len, table)) <= int(columns)
        assert "over-read" in result.output
        below = result.output[result.output.index(" unused in all files") :].splitlines()
        paths = ("in", "next", "params", "and")
        assert all(len(line) <= int(columns) for line in below if not line.lstrip().startswith(paths))

    @pytest.mark.parametrize("columns", ["40", "80", "200"])
    def test_indivisible_axes_are_reported_at_any_width(self, columns):
        result = self.run(HF, "--mesh", "3", "--spec", "axis0", columns=columns)
        declared = result.output[result.output.index("does not divide: ") :]
        assert "lm_head.weight" in declared
        assert "does not divide" not in self.run(HF, "--mesh", "4", "--spec", "axis0", columns=columns).output

    def test_repeated_layers_are_one_line(self):
        output = self.run(HF).output
        assert "model.layers.{0..3}.mlp.up_proj.weight" in output
        assert "39 arrays in 39 chunks" in output

    def test_chunks_prints_json(self):
        result = self.run(ORBAX / "maxtext_run", "--json", "--mesh", "fsdp=4", "--spec", "P('fsdp')")
        report = json.loads(result.output)["report"]
        assert report["loading"]["mesh"] == {"fsdp": 4}
        assert report["num_arrays"] == len(report["arrays"]) == 17
        assert {
            "name",
            "kind",
            "nbytes",
            "referenced_nbytes",
            "index_nbytes",
            "unreferenced_nbytes",
            "links",
        } <= report["files"][0].keys()

    @pytest.mark.parametrize("columns", [80, 200])
    def test_empty_checkpoint_has_no_chunks(self, tmp_path, columns):
        save_file({}, tmp_path / "empty.safetensors")
        result = ckpt("inspect", "chunks", tmp_path / "empty.safetensors", COLUMNS=str(columns))
        assert result.exit_code == 0
        assert "0 arrays in 0 chunks" in result.stdout

    def test_filter_selects_arrays(self):
        report = json.loads(self.run(ORBAX / "maxtext_run", "--json", "--filter", "*/mlp/*").output)["report"]
        assert {item["path"].split("/")[-3] for item in report["arrays"]} == {"mlp"}

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["--mesh", "8"], 2, "requires a spec"),
            (["--mesh", "8", "--spec", "rows"], 2, "is not a partition spec"),
            (["--mesh", "eight", "--spec", "axis0"], 2, "is not a mesh"),
        ],
    )
    def test_invalid_calls_are_refused(self, arguments, code, words):
        result = self.run(HF, *arguments)
        assert result.exit_code == code
        assert words in result.output

    def test_chunk_files_fold_into_one_line_per_array(self, tmp_path):
        values = values_of(F32, (64, 2))
        arrays = {(name,): (zarr3([LITTLE], [2, 2]), values) for name in "ab"}
        item = write_item(tmp_path / "item", arrays, use_ocdbt=False)
        output = self.run(item).output
        assert "a/ (32 files)" in output and "b/ (32 files)" in output and "*/zarr.json (2 files)" in output


def test_ten_thousand_arrays_fold_quickly():
    one = array((64, 64), (64, 64))
    arrays = tuple(
        replace(one, path=f"layers_{k}/w_{n}") for k, n in itertools.product(range(100), range(100))
    )
    report = inspect_chunks(Tree({}, Metadata(location="/x")), Storage("/x", (), (), arrays))
    from ckpttools.cli.chunks import _array_cells, _group_arrays

    groups = _group_arrays(report.arrays)
    assert [_array_cells(group)[0] for group in groups] == ["layers_{0..99}/w_{0..99}"]
