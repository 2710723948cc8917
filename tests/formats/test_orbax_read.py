"""Reading Orbax checkpoints in the layout that is written here: which step is taken, and damage."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.golden_data import (
    SCAN_NAMES,
    convert,
    golden_arrays,
    golden_checkpoint,
    golden_leaves,
    leaves_by_package,
    opened_by_tensorstore,
)
from support.internals import LINEN, ReadOptions, keystr, open_tree, parse, view_of
from support.locations import GOLDEN

from ckpttools import CheckpointError, Empty, FormatError, LaterStepWarning, UsageError
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from ckpttools.formats.orbax.runs import DamagedStepError, steps_around
from ckpttools.formats.orbax.write import INDEX_FILE

SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
LEVELS = pytest.mark.parametrize("level", ["", "0", "0/items"], ids=["run", "step", "item"])
QUERY = "params.params.decoder.layers.self_attention.query.kernel"


@pytest.fixture
def checkpoint(tmp_path):
    """A converted checkpoint that a test may damage; its item's directory."""
    return convert(tmp_path / "out", "llama3.1")


def shapes(tree) -> dict[str, object]:
    return {
        keystr(path): leaf.kind if isinstance(leaf, Empty) else [list(leaf.shape), leaf.dtype.name]
        for path, leaf in tree.items()
    }


class TestWrittenByMaxText:
    @SCANS
    @LEVELS
    def test_checkpoint_opens_at_every_level(self, scan, level):
        tree = open_tree(golden_checkpoint(scan) / level)
        expected = {
            path: leaf if isinstance(leaf, str) else [leaf["shape"], leaf["dtype"]]
            for path, leaf in golden_leaves("llama3.1", scan).items()
        }
        assert shapes(tree) == expected
        assert tree.metadata.format == "orbax"
        assert tree.metadata.step == 0
        assert tree.metadata.custom == {"scan_layers": scan}
        assert tree.metadata.location == str(golden_checkpoint(scan) / "0" / "items")

    @SCANS
    def test_leaves_are_in_the_order_of_the_metadata(self, scan):
        item = golden_checkpoint(scan) / "0" / "items"
        entries = json.loads((item / "_METADATA").read_bytes())["tree_metadata"].values()
        paths = [tuple(key["key"] for key in entry["key_metadata"]) for entry in entries]
        assert list(open_tree(item)) == paths

    @SCANS
    def test_shapes_match_tensorstore(self, scan):
        item = golden_checkpoint(scan) / "0" / "items"
        seen = {
            path: [list(array.shape), array.dtype.name] for path, array in opened_by_tensorstore(item).items()
        }
        assert shapes(open_tree(item)) == seen | {"opt_state": "Dict"}

    @SCANS
    def test_scalars_are_recorded(self, scan):
        assert open_tree(golden_checkpoint(scan)).metadata.scalars == {("step",)}

    def test_golden_checkpoints_have_a_kind(self):
        stacked, unstacked = (view_of(open_tree(golden_checkpoint(scan))) for scan in (True, False))
        assert (stacked.kind, stacked.flavor, stacked.scan_axis) == ("stacked-inference", LINEN, 1)
        assert (unstacked.kind, unstacked.flavor) == ("unstacked-inference", LINEN)

    @SCANS
    def test_values_match_golden_data(self, scan):
        assert leaves_by_package(open_tree(golden_checkpoint(scan))) == golden_leaves("llama3.1", scan)

    def test_opening_reads_no_array(self, tmp_path):
        """Data files of arrays may be absent as long as nobody reads them."""
        shutil.copytree(golden_checkpoint(True), tmp_path / "run")
        for directory in tmp_path.rglob("ocdbt.process_0"):
            index_files = index_files_of(tmp_path / "run" / "0" / "items")
            for file in (directory / "d").iterdir():
                if f"ocdbt.process_0/d/{file.name}" not in index_files:
                    file.unlink()
        assert len(open_tree(tmp_path / "run").arrays) == len(golden_arrays("llama3.1", True))


def index_files_of(item: Path) -> set[str]:
    """The files that hold nodes of the index or documents of arrays."""
    fetched = set()

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        fetched.add(file)
        data = (item / file).read_bytes()
        return data[offset:] if length is None else data[offset : offset + length]

    entries = ocdbt_files.read(fetch)
    documents = (entry for key, entry in entries.items() if key.endswith(b"/zarr.json"))
    return fetched | {entry.file for entry in documents if isinstance(entry, ocdbt.Extent)}


def without_tree(step: Path) -> None:
    handlers = {"metrics": "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"}
    document = {"item_handlers": handlers, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(document))


def without_files(directory: Path, pattern: str) -> None:
    for file in directory.rglob("*"):
        if re.search(pattern, file.name):
            file.unlink()


class TestSteps:
    """Of several steps the latest finished one is taken, judged by content."""

    @pytest.fixture
    def run(self, checkpoint):
        """Steps 0 and 10 finished, 2 without `_METADATA`, 30 without a commit time, 7 in progress."""
        run = checkpoint.parent.parent
        for step in (2, 10, 30):
            shutil.copytree(run / "0", run / str(step))
        (run / "2" / "items" / "_METADATA").unlink()
        change_json(run / "30" / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=None)
        shutil.copytree(run / "0", run / "40.orbax-checkpoint-tmp")
        return run

    def opened(self, run, step=None):
        return open_tree(run, ReadOptions(step=step)).metadata

    def test_latest_finished_step_is_chosen(self, run):
        metadata = self.opened(run)
        assert metadata.step == 10
        assert metadata.location == str(run / "10" / "items")

    @pytest.mark.parametrize("step", [0, 10])
    def test_step_can_be_chosen(self, run, step):
        assert self.opened(run, step).step == step

    @pytest.mark.parametrize(
        ("step", "reason"),
        [(2, "damaged: no _METADATA"), (30, "an unfinished save: commit timestamp null")],
    )
    def test_unfinished_step_is_refused(self, run, step, reason):
        with pytest.raises(FormatError) as caught:
            self.opened(run, step)
        assert caught.value.message == f"step {step} is {reason}"
        assert caught.value.hint.endswith(f'`ckpttools.doctor("{run / str(step)}")` shows details')

    def test_unknown_step_is_refused(self, run):
        with pytest.raises(UsageError, match="step 5 does not exist") as caught:
            self.opened(run, 5)
        assert "0, 2, 10, 30" in caught.value.expected

    def test_all_reasons_are_reported_without_a_finished_step(self, run):
        for step in (0, 10):
            shutil.rmtree(run / str(step))
        with pytest.raises(FormatError, match="no step is complete") as caught:
            self.opened(run)
        assert caught.value.hint == f'`ckpttools.doctor("{run}")` shows details'
        assert "step 2: no _METADATA" in str(caught.value)
        assert "step 30: commit timestamp null" in str(caught.value)

    @pytest.mark.parametrize("level", ["", "items"])
    def test_unfinished_step_is_refused_by_its_own_path(self, run, level):
        with pytest.raises(FormatError, match="no _METADATA"):
            open_tree(run / "2" / level)
        with pytest.raises(FormatError, match="step 30 is an unfinished save: commit timestamp null"):
            open_tree(run / "30" / level)

    @pytest.mark.parametrize("level", ["", "items"])
    def test_contradicting_path_and_step_are_refused(self, run, level):
        assert open_tree(run / "10" / level, ReadOptions(step=10)).metadata.step == 10
        with pytest.raises(UsageError, match="step 0 does not exist") as caught:
            open_tree(run / "10" / level, ReadOptions(step=0))
        assert caught.value.got == "step 10"

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (
                lambda step: (step / "_CHECKPOINT_METADATA").write_text("{"),
                "_CHECKPOINT_METADATA: not a JSON file",
            ),
            (lambda step: (step / "items" / "_METADATA").unlink(), "no _METADATA"),
            (lambda step: (step / "items" / "manifest.ocdbt").unlink(), "no manifest.ocdbt in items"),
            (lambda step: shutil.rmtree(step / "items"), "no _METADATA"),
        ],
    )
    def test_older_step_does_not_replace_a_damaged_one(self, run, damage, reason):
        """Orbax takes the damaged one for the latest; another one would be stale weights."""
        shutil.rmtree(run / "2")
        damage(run / "10")
        with pytest.raises(DamagedStepError, match="the latest step is damaged") as caught:
            self.opened(run)
        assert f"step 10: {reason}" in caught.value.message
        assert str(run / "0") in caught.value.hint
        assert self.opened(run, 0).step == 0

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda step: without_files(step, "METADATA|commit"), "no _METADATA"),
            (lambda step: (step / "items").rename(step / "items.orbax-checkpoint-tmp"), "no _METADATA"),
            (lambda step: [shutil.rmtree(step), step.mkdir()], "no _METADATA"),
            (lambda step: [shutil.rmtree(step / "items"), without_tree(step)], "no tree, but metrics"),
            (
                lambda step: [shutil.rmtree(step / "items"), (step / "_CHECKPOINT_METADATA").write_text("")],
                "no _METADATA, _CHECKPOINT_METADATA: not a JSON file",
            ),
        ],
        ids=["nothing says that it was finished", "an item is written", "begun", "metrics", "metadata begun"],
    )
    def test_damaged_later_steps_are_reported(self, run, change, reason):
        for other in ("2", "30", "40.orbax-checkpoint-tmp"):
            shutil.rmtree(run / other)
        change(run / "10")
        with pytest.warns(LaterStepWarning, match=f"step 10: {reason}"):
            assert self.opened(run).step == 0

    def test_commit_marker_shows_that_a_step_was_finished(self, run):
        """As steps of old versions on gs:// have it."""
        assert (run / "10" / "commit_success.txt").is_file()
        without_files(run / "10", "METADATA")
        with pytest.raises(DamagedStepError):
            self.opened(run)

    def test_directories_next_to_steps_are_not_steps(self, run, recwarn):
        for other in ("30", "40.orbax-checkpoint-tmp"):
            shutil.rmtree(run / other)
        shutil.copytree(run / "10", run / "finetune_2024" / "100")
        (run / "cache_77").mkdir()
        (run / "cache_77" / "manifest.ocdbt").write_bytes(b"")
        assert self.opened(run).step == 10
        assert not recwarn.list

    @pytest.mark.parametrize("name", ["backup_99", "backup_10"])
    def test_differently_named_steps_are_not_part_of_the_run(self, run, name, recwarn):
        """Orbax's manager looks for one prefix only. They are opened by their own path."""
        for other in ("30", "40.orbax-checkpoint-tmp"):
            shutil.rmtree(run / other)
        shutil.copytree(run / "0", run / name)
        for opened in (self.opened(run), self.opened(run, 10)):
            assert opened.location == str(run / "10" / "items")
        (run / name / "items" / "_METADATA").unlink()
        assert self.opened(run).step == 10
        assert not recwarn.list
        assert steps_around(open_tree(run)) == ({}, {})

    def test_plain_numbers_take_precedence_as_steps(self, run, recwarn):
        """Orbax looks for no prefix unless it is told one."""
        for other in ("0", "2", "30", "40.orbax-checkpoint-tmp"):
            shutil.rmtree(run / other)
        for number in (98, 99):
            shutil.copytree(run / "10", run / f"backup_{number}")
        assert self.opened(run).location == str(run / "10" / "items")
        shutil.rmtree(run / "10")
        assert self.opened(run).location == str(run / "backup_99" / "items")
        assert not recwarn.list

    def test_backup_next_to_checkpoints_is_not_a_step(self, run, tmp_path, recwarn):
        above = tmp_path / "above"
        shutil.copytree(run / "10", above / "checkpoints" / "10")
        shutil.copytree(run / "0", above / "backup_99")
        assert self.opened(above).step == 10
        shutil.rmtree(above / "checkpoints" / "10")
        assert self.opened(above).step == 99
        assert not recwarn.list

    def test_damaged_neighbor_step_is_not_an_unfinished_save(self, run):
        shutil.rmtree(run / "10" / "items")
        beside = steps_around(open_tree(run / "0"))
        assert beside.damaged == {"2": "no _METADATA", "10": "no _METADATA"}
        assert beside.unfinished.keys() == {"30", "40.orbax-checkpoint-tmp"}

    @pytest.mark.parametrize("beside", ["export_2/100", "checkpoints_old_2"])
    def test_step_below_does_not_claim_a_directory(self, run, tmp_path, beside):
        """Neither one of safetensors, nor a run whose steps are in `checkpoints`."""
        hf = shutil.copytree(GOLDEN / "qwen3" / "hf", tmp_path / "hf")
        above = tmp_path / "above"
        shutil.copytree(run / "10", above / "checkpoints" / "10")
        for location in (hf, above):
            (location / beside).mkdir(parents=True)
            (location / beside / "commit_success.txt").write_text("")
            (location / beside / "manifest.ocdbt").write_text("")
        assert open_tree(hf).metadata.format == "safetensors"
        assert self.opened(above).step == 10

    def test_orbax_opens_the_damaged_step(self, run):
        import orbax.checkpoint as ocp

        for unfinished in (run / "30", run / "40.orbax-checkpoint-tmp"):
            shutil.rmtree(unfinished)
        (run / "10" / "items" / "_METADATA").unlink()
        assert ocp.CheckpointManager(run).latest_step() == 10

    def test_unfinished_steps_are_reported(self, run):
        with pytest.warns(LaterStepWarning) as caught:
            self.opened(run)
        (told,) = map(str, (item.message for item in caught))
        assert f"step 10 of {run} is opened" in told
        assert "step 30: commit timestamp null" in told and "step 40: temporary name" in told
        assert "step 2" not in told

    def test_named_step_opens_without_warnings(self, run, recwarn):
        assert self.opened(run, 10).step == 10
        assert not recwarn.list

    def test_item_of_several_must_be_chosen(self, run):
        shutil.copytree(run / "10" / "items", run / "10" / "other")
        with pytest.raises(FormatError, match="several items") as caught:
            self.opened(run)
        assert caught.value.got == "items, other"
        assert open_tree(run / "10" / "other").metadata.step == 10


class TestStepsWithoutItems:
    """`Checkpointer.save(run / "5")` puts the files of step and item into one directory."""

    @pytest.fixture
    def run(self, checkpoint, tmp_path):
        for step in ("5", "6"):
            shutil.copytree(checkpoint, tmp_path / "run_9" / step)
        return tmp_path / "run_9"

    def test_latest_step_is_chosen(self, run):
        metadata = open_tree(run).metadata
        assert (metadata.step, metadata.location) == (6, str(run / "6"))

    @pytest.mark.parametrize("step", [5, 6])
    def test_single_step_can_be_chosen(self, run, step):
        assert open_tree(run, ReadOptions(step=step)).metadata.location == str(run / str(step))
        metadata = open_tree(run / str(step)).metadata
        assert (metadata.step, metadata.custom) == (step, {"scan_layers": True})

    def test_unfinished_run_step_is_refused(self, run):
        change_json(run / "6" / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=None)
        assert open_tree(run).metadata.step == 5
        with pytest.raises(FormatError, match="unfinished save"):
            open_tree(run / "6")

    def test_step_in_progress_may_have_a_lower_number(self, run):
        """A job that went back to an earlier step saves some again, after the one that is opened."""
        (run / "5").rename(run / "5.orbax-checkpoint-tmp")
        assert [*steps_around(open_tree(run / "6")).unfinished] == ["5.orbax-checkpoint-tmp"]
        (run / "5.orbax-checkpoint-tmp").rename(run / "other_5.orbax-checkpoint-tmp")
        assert not steps_around(open_tree(run / "6")).unfinished

    @pytest.mark.parametrize("old", [("5",), ("5", "6")])
    def test_steps_of_old_versions_are_recognized(self, run, old):
        """Not items of the run, of which one would be taken for all there is."""
        for step in old:
            (run / step / "_CHECKPOINT_METADATA").unlink()
        assert open_tree(run).metadata.step == 6
        assert open_tree(run / "5").metadata.step == 5

    def test_step_directory_may_have_any_name(self, run):
        (run / "6").rename(run / "final")
        assert open_tree(run / "final").metadata.step is None


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def test_array_metadata_is_read_from_one_process(tmp_path):
    """Orbax refuses saves whose processes write different ones: 1,000 files of a large job say the same."""
    array_metadata = {"param_name": "keys", "write_shape": [2], "ext_metadata": {"random_key_impl": "rbg"}}
    (tmp_path / "array_metadatas").mkdir()
    declared = {"array_metadatas": [{"array_metadata": array_metadata}]}
    (tmp_path / "array_metadatas" / "process_0").write_text(json.dumps(declared))
    (tmp_path / "array_metadatas" / "process_1").write_text("is not read")
    assert orbax_metadata.key_impls(parse(tmp_path)) == {"keys": "rbg"}


class TestDamaged:
    """What is wrong is said with its place; a damaged array does not hide the others."""

    def test_missing_chunk_is_reported(self, checkpoint):
        change_index(checkpoint, lambda entries: entries.pop(f"{QUERY}/c/0/0/0/0".encode()))
        error = self.error_of_query(checkpoint)
        assert error.message == "a chunk is missing"
        assert "query/kernel" in error.location
        assert "c/0/0/0/0" in error.location

    @pytest.mark.parametrize("length", [0, 2, 32766, 32770])
    def test_chunk_of_the_wrong_length_is_reported(self, checkpoint, length):
        key = f"{QUERY}/c/0/0/0/0".encode()

        def change(entries):
            entries[key] = ocdbt.Extent(entries[key].file, entries[key].offset, length)

        change_index(checkpoint, change)
        error = self.error_of_query(checkpoint)
        assert error.message == "a chunk has the wrong length"
        assert (error.got, error.expected) == (f"{length} bytes", "32768 bytes")
        assert "query/kernel" in error.location

    def test_missing_array_is_reported(self, checkpoint):
        change_index(checkpoint, lambda entries: entries.pop(f"{QUERY}/zarr.json".encode()))
        with pytest.raises(FormatError, match=f"no {QUERY}/zarr.json") as caught:
            open_tree(checkpoint)
        assert caught.value.location == str(checkpoint)

    def test_invalid_document_is_refused(self, checkpoint):
        change_index(checkpoint, lambda entries: entries.update({f"{QUERY}/zarr.json".encode(): b"{}"}))
        with pytest.raises(FormatError, match="not the metadata of a zarr v3 array") as caught:
            open_tree(checkpoint)
        assert f"{QUERY}/zarr.json" in caught.value.location

    def test_missing_manifest_is_reported(self, checkpoint):
        (checkpoint / "manifest.ocdbt").unlink()
        for level in (checkpoint.parents[1], checkpoint.parent, checkpoint):
            with pytest.raises(FormatError, match=r"step 0.*no manifest\.ocdbt in items"):
                open_tree(level)

    def test_damaged_manifest_is_reported(self, checkpoint):
        manifest = checkpoint / "manifest.ocdbt"
        data = bytearray(manifest.read_bytes())
        data[len(data) // 2] ^= 1
        manifest.write_bytes(data)
        with pytest.raises(FormatError, match=r"CRC-32C") as caught:
            open_tree(checkpoint)
        assert "manifest.ocdbt" in str(caught.value)

    @pytest.mark.parametrize("file", ["manifest.ocdbt", INDEX_FILE])
    def test_truncated_index_is_reported(self, checkpoint, file):
        data = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(data[: len(data) // 2])
        with pytest.raises(FormatError) as caught:
            open_tree(checkpoint)
        assert file in str(caught.value)

    def test_missing_index_is_reported(self, checkpoint):
        (checkpoint / INDEX_FILE).unlink()
        with pytest.raises(FormatError, match=INDEX_FILE):
            open_tree(checkpoint)

    def test_truncated_data_file_is_reported(self, checkpoint):
        data = checkpoint / "d" / "data"
        whole = data.read_bytes()
        data.write_bytes(whole[: len(whole) // 2])
        failed = set()
        for path, array in open_tree(checkpoint).arrays.items():
            try:
                array.read()
            except FormatError as error:
                assert str(data) in str(error)
                failed.add(path)
        assert 0 < len(failed) < len(open_tree(checkpoint).arrays)

    def test_missing_data_file_is_reported(self, checkpoint):
        (checkpoint / "d" / "data").unlink()
        with pytest.raises(FormatError, match="d/data"):
            leaves_by_package(open_tree(checkpoint))

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": {"a": {}}}', '{"tree_metadata": 1}'])
    def test_damaged_tree_is_reported(self, checkpoint, text):
        (checkpoint / "_METADATA").write_text(text)
        with pytest.raises(FormatError) as caught:
            open_tree(checkpoint)
        assert caught.value.location == str(checkpoint / "_METADATA")

    def test_unrelated_directory_is_refused(self, tmp_path):
        (tmp_path / "0").mkdir()
        with pytest.raises(FormatError, match="not a checkpoint of a known format"):
            open_tree(tmp_path)

    def error_of_query(self, checkpoint) -> CheckpointError:
        """The error of reading the query; every other array still reads as it should."""
        arrays = {keystr(path): array for path, array in open_tree(checkpoint).arrays.items()}
        query = arrays.pop(QUERY.replace(".", "/"))
        with pytest.raises(FormatError) as caught:
            query.read()
        for array in arrays.values():
            array.read()
        return caught.value


def change_index(item: Path, change) -> None:
    """Rewrites the item's index with some entries changed."""

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        data = (item / file).read_bytes()
        return data[offset:] if length is None else data[offset : offset + length]

    entries = ocdbt_files.read(fetch)
    change(entries)
    index = ocdbt_files.encode(entries.items(), INDEX_FILE)
    (item / INDEX_FILE).write_bytes(index.nodes)
    (item / "manifest.ocdbt").write_bytes(index.manifest)
